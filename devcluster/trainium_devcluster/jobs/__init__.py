"""Drive TrainingJobs of demos, benchmarks and tests on any cluster, and read the files of their runs."""
