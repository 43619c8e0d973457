"""From the spec of a pod to what its containers get, and what is refused of it."""
