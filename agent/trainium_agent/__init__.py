"""PID 1 of a worker pod: preflight, membership, rendezvous, supervision of the ranks, heartbeats."""
