"""The demo: one TrainingJob on a real control plane, taken through faults, compared with an undisturbed run."""
