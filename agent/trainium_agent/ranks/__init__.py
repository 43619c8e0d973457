"""Start training processes, read their output and end them."""
