"""Read and validate configurations."""
