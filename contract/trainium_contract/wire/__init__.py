"""Formats that one program writes and another reads: messages, environment, records, checkpoint manifests."""
