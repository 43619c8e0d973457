"""Build the objects of a job: pure construction, no decision."""
