"""The commands of `kubectl trn`: they read, call the pure core and print."""
