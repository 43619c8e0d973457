"""What people and machines read: status, conditions, events, ledger."""
