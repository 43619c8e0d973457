"""Control how the suite runs: number of examples, cost of each test, timeouts, jumps of the clock."""
