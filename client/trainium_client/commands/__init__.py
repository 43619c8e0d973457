"""The commands of `kubectl trn`: they read, call pure functions and print."""
