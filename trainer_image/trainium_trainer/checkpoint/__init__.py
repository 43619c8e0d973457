"""Checkpoints: in the node's memory after every step, on durable storage at intervals, and how a run resumes."""
