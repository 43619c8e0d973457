"""The division of tensors over the ranks of a job, and the rank that writes each part; pure, the same on every rank."""
