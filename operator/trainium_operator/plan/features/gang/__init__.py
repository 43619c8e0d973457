"""Create the pods that a job starts with as one group of a gang scheduler."""
