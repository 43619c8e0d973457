"""Compilation ahead of training: the graphs of every legal size, and the caches that keep what was compiled."""
