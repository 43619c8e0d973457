"""An exhaustive explorer of a small model: every sequence of faults up to a bound, breadth first.

`search` walks, `alphabet` lists what can happen, `fingerprint` decides which states are the same, `oracles` what must
hold in each and that each ends well. Breadth first means that the sequence which breaks something is a shortest one.
Run it deeper with `make explore ARGS="--depth 5"`.
"""
