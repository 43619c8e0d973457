"""Typed values about a job, for plugin and pages: pure functions of the objects in the API server."""
