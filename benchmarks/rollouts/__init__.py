"""Run the example of GRPO with rollout servers through faults, and beside a JobSet of the same pods."""
