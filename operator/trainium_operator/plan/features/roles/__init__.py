"""Run the pods of `spec.roles`, which serve the training program and are no members of it."""
