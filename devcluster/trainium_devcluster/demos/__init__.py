"""Apply, follow and disturb jobs of the demos on a development cluster, and compare their curves.

Invariants: it does only what a person could do (helm, kubectl, the cluster's fault commands); it measures by its own
clock and from the files that the trainer leaves, and it imports nothing of operator, trainer or contract.
"""
