"""Diagnose the end of a training process and decide what this pod does about it."""
