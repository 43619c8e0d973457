"""The process node runtime: one process that is a Kubernetes node and runs the pods bound to it as local processes.

Invariants: every process that a pod starts is a descendant of the node process and dies with it; nothing is written
on the machine outside the node's state directory; what a pod asks for and this runtime does not honour is refused
with an event.
"""
