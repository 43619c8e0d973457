"""Data that are tokenized once and cached."""
