"""Define what operator and trainer share: the resource, the trainer configuration, messages, exit codes, the manifest.

Invariants: depends on pydantic and the standard library only; has no policy, and no I/O outside `api_server`. Both
halves import it and it imports neither. Every wire format is camelCase, every Python name snake_case, by one alias
generator (`base.py`).
"""
