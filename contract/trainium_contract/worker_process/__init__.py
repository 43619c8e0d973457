"""Processes of a worker pod, the agent's and the trainer's: their logs, limits, write access and descendants."""
