"""Exhaustive exploration of small models: every sequence of faults up to a length, breadth first.

`search` explores, `transitions` lists faults and user changes, `fingerprint` decides which states are equal, and
`oracles` checks the invariants of each state and that it converges. The first violation has a shortest history.
Explore deeper with `make explore ARGS="--depth 5"`.
"""
