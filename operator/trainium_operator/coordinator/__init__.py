"""The HTTPS endpoint that agents talk to: registration, membership, heartbeats."""
