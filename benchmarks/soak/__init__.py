"""The soak: real training on a development cluster through random faults for hours, beside the simulator's own hours.

`python -m benchmarks.soak` (`make soak`) draws a schedule with the simulator's dice and plays it against real ones.
It looks for leftovers (curve, samples, pods, files, processes, memory, sockets). Then the simulator plays the same
schedule with the stages that the first half of the job's ledger shows, and both are written beside each other.
"""
