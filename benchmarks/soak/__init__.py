"""Train on a development cluster through random faults for hours, and look for leaks.

`python -m benchmarks.soak` (`make soak`) draws a schedule of faults from a seed and injects it into a job. Then it
compares the loss curve and the samples with those of an undisturbed run, and checks what remains (pods, other objects,
files, processes, shared memory, sockets) and what grew in long-lived processes.
"""
