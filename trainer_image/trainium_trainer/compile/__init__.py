"""Compilation ahead of training: the graphs of every useful size, and the caches of compiled graphs."""
