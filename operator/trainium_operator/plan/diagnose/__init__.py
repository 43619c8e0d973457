"""Find failed members and their causes, and decide whether the job has failed. Changes nothing."""
