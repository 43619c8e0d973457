"""Decide what an agent does, as pure functions from events to actions: no clock, no thread, no I/O."""
