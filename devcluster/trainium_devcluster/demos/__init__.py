"""Run the jobs of the demos on a development cluster, inject faults, and compare their loss curves.

Guarantees:
- The demos use only tools of a user (helm, kubectl, the cluster's fault commands).
- They measure by their own clock and from the trainer's files, and import nothing of operator or trainer.
"""
