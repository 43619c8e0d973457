"""An exhaustive explorer of a small model: every sequence of faults up to a bound, breadth first.

`search` walks, `transitions` lists what can happen, `fingerprint` decides which states are equal, and `oracles` checks
the invariants of each state and that it ends well. The first violation that the search finds has a shortest history.
Run it deeper with `make explore ARGS="--depth 5"`.
"""
