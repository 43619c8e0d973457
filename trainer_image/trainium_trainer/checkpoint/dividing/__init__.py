"""How tensors are divided over the ranks of a job, and which rank writes what; pure, the same on every rank."""
