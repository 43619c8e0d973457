"""The operator: decisions (`plan`), cluster I/O (`cluster`), the agents' endpoint (`coordinator`)."""
