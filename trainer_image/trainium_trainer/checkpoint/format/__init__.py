"""The layout of a state's tensors in files and in memory, and their readers."""
