"""Inject every fault that needs no accelerator into real training, time the recovery and check it.

`python -m benchmarks.faults` (`make faults`) runs the rows and writes `fault-table.md` from `results/`. A row has
a name, the fault, what is injected, what is expected, and a function that runs it; there is one file per family of
rows. The clusters are those of the tests (`tests.testing.cluster`), so rows run on the development cluster and others.
"""
