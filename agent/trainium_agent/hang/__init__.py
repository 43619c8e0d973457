"""Detect ranks that hang, identify the rank to blame, and respond."""
