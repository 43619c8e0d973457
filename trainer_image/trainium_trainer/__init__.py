"""The trainer: what runs inside a worker pod."""
