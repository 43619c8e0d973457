"""What is wrong with a process, a pod or a node, by the contract's table of faults; and the budgets that faults use."""
