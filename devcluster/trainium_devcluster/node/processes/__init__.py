"""Start the processes of containers in isolation, and find them again."""
