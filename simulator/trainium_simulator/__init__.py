"""`trainium-operator simulate`: the operator's own plans in virtual time, against simulated nodes, pods and agents.

Nothing but the command imports it, and it imports the plan and the contract alone.
"""
