"""What the objects of a job look like: pure construction, no decision."""
