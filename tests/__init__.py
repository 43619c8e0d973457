"""The tests of all packages, and what they share (`tests.testing`); benchmarks and scripts use the latter as well."""
