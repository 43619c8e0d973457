"""Share options, conditions of a measurement, figures with goals, and launchers between all benchmarks."""
