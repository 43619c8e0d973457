"""What the agents of one generation share and agree on, and how they part."""
