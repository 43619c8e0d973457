"""Simulated agents, by thousands to a process: what they say, over which connection, and who steers them."""
