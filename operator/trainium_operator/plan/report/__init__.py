"""Report to people and machines: status, conditions, events, ledger."""
