"""Trainium 1: neuronx-distributed (NxD) on torch-xla, as Neuron SDK 2.30 has them; docs/backends.md has the details.

All that knows NxD is here. `backend` computes. `layout` says which rows of which tensors a rank holds, in NxD's words
and in those of checkpoints; `conversion` reads and writes NxD's own checkpoints; `presence` and `limits` say whether a
run can be had, `extraction` how its graphs are compiled ahead. Invariant: these five work on any machine; the others
need NxD's packages, and `backend`, which alone imports them, is imported once `presence` has found those packages.
"""
