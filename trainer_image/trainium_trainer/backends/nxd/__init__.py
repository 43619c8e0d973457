"""Trainium 1: neuronx-distributed (NxD) on torch-xla, as Neuron SDK 2.30 has them; docs/backends.md has the details.

Invariant: importing this package without theirs ends with one sentence that says what is missing and where it is.
"""

from __future__ import annotations

from trainium_trainer.backends.choose import require_nxd

require_nxd()

from trainium_trainer.backends.nxd.backend import NxdBackend  # noqa: E402 - only where its packages are

__all__ = ["NxdBackend"]
