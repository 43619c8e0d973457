"""Parts of the fleet benchmarks: a plain API client, simulated agents, the operator as its own process, figures."""
