"""Map changes to the jobs that they concern, and decide when a job is planned."""
