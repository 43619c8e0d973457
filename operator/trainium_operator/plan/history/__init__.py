"""Record interruptions: each is opened, counted and closed once."""
