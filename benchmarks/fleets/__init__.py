"""What operator and coordinator cost at fleet size, on fake nodes, beside others and beside a floor."""
