"""Data that are tokenised once and kept: written, found again, read."""
