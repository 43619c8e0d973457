"""Parts of the operator for tests: coordinator, port for readers, metrics."""
