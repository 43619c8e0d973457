"""What a person waits for: commands of `kubectl trn`, and a page in a browser."""
