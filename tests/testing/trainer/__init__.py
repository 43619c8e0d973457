"""Inputs of a run: files, models, a hub and an S3 that answer on loopback."""
