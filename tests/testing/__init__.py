"""Shared parts of tests, benchmarks and scripts: fakes, builders, clusters, a clock that jumps.

The product never imports it; `make check` holds that, its types (strict) and the order of its packages. Helpers
of one folder of tests are in that folder. docs/architecture.md lists the packages.
"""
