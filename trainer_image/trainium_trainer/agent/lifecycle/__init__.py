"""What an agent decides, as pure functions: what has happened in, what to do out. No clock, no thread, no I/O."""
