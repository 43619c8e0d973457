"""Run as PID 1 of a worker pod: check the pod, join the membership, supervise the ranks, send heartbeats."""
