"""Run processes that end with their supervisor, and clean up leftovers."""
