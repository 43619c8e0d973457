"""Checkpoints: in the node's memory after every step, on durable storage now and then, and how a run resumes."""
