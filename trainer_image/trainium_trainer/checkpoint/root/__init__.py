"""What stands below a checkpoint root, whose it is, and who may commit there."""
