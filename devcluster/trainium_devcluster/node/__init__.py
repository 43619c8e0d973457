"""Run a process node: one process that acts as a Kubernetes node and runs its pods as local processes.

Guarantees:
- Every process of a pod is a descendant of the node process and ends with it.
- No file is written outside the node's state directory.
- A pod with a field that the runtime does not support is refused with an event.
"""
