"""Calibration of the simulator, and the jobs and stages of its published figures (docs/simulate.md)."""
