"""Fake nodes, as many as wanted, played by kwok."""
