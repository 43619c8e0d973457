"""Operators, kubelets and agents in virtual time, with faults to inject."""
