"""Measure the models of milestones in a pod beside the workers."""
