"""How the tensors of a state lie in files and in memory, and how they are read again."""
