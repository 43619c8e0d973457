"""Typed values about a job: pure functions of the objects in the API server and of the time."""
