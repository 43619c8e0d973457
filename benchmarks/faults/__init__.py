"""The fault table: every row of faults that needs no accelerator, injected into real training and timed.

`python -m benchmarks.faults` (`make faults`) plays the rows and writes `docs/fault-table.md` from `results/`. A row
is a name, what is injected, what is expected and a function that plays it; one file per family of rows. The clusters
are those of the tests (`tests.testing.cluster`), so the same rows run on the development cluster and on others.
"""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
