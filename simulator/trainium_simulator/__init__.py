"""`trainium-operator simulate`: the operator's own plans in virtual time, on simulated nodes, pods and agents.

Only the command imports it, and it imports only the plan and the contract.
"""
