"""Detect ranks that hang, find the rank to blame, and respond."""
