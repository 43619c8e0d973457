"""The operator's decisions: `Observed` in, `Plan` out.

Invariant: pure. No I/O, no clock, no randomness, no Kubernetes: the contract and the standard library only. Every
decision that must survive a crash is in the returned status, which is written before the actions.
"""
