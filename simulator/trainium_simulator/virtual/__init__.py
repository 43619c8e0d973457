"""The world in virtual time: what fails and when, nodes, pods, agents, training, and the operator that plans."""
