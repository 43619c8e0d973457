"""Processes that do a part of the work beside the training process, started clean."""
