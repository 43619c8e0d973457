"""The world in virtual time: faults, nodes, pods, agents, training, and the operator's plans."""
