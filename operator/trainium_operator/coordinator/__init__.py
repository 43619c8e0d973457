"""The HTTPS endpoint of agents: registration, membership, heartbeats."""
