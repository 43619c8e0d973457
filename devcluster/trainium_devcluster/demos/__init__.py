"""What the demos share: jobs applied, followed and disturbed on a development cluster, and curves compared.

Invariants: it does only what a person could do (helm, kubectl, the cluster's fault commands); it measures by its own
clock and from the files that the trainer leaves, and it imports nothing of operator, trainer or contract.
"""
