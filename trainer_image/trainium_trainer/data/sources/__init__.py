"""Where text and records come from: files, the hub, Python's documentation; as blocks that can be read alone."""
