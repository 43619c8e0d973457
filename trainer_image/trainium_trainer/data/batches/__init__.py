"""The samples of each step, their order, and the preparation of a rank's batches ahead of the step."""
