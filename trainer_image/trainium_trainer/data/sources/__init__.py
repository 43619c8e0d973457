"""Sources of text and records (files, the hub, Python's documentation), divided into independent blocks."""
