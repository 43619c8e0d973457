"""Trainium 1: neuronx-distributed (NxD) on torch-xla, as Neuron SDK 2.30 has them; docs/backends.md has the details.

All code that depends on NxD is here. `backend` trains. `layout` describes the rows of tensors that a rank holds, in
NxD's form and in that of checkpoints; `conversion` reads and writes NxD's checkpoints; `requirements` and `limits`
check whether a run is possible; `extraction` compiles its graphs ahead.

Guarantees:
- `layout`, `conversion`, `requirements`, `limits` and `extraction` work on any machine.
- The other modules need NxD's packages; only `backend` imports them, and it is imported after `requirements` has found
  those packages.
"""
