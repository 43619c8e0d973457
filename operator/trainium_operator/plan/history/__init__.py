"""Record interruptions: each is opened once, counted once and closed once."""
