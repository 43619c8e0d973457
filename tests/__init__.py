"""The tests of all rooms, and what they share (`tests.testing`); benchmarks and scripts use the latter as well."""
