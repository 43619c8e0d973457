"""Report to people and tools: status, conditions, events, ledger."""
