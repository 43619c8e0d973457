"""Trainium 1: neuronx-distributed (NxD) on torch-xla, as Neuron SDK 2.30 has them; docs/backends.md has the details.

All that knows NxD is here. `backend` computes. `layout` has the rows of the tensors that a rank holds, in NxD's form
and in that of checkpoints; `conversion` reads and writes NxD's own checkpoints; `presence` and `limits` decide whether
a run is possible, `extraction` how its graphs are compiled ahead.

Guarantees:
- These five work on any machine.
- The others need NxD's packages, and `backend`, which alone imports them, is imported once `presence` has found those
  packages.
"""
