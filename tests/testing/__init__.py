"""Shared parts of tests, benchmarks and scripts: fakes, builders, clusters, a clock that jumps.

The product never imports it; `make check` holds that, its types (strict) and the order of its rooms. What the tests of
one folder use alone lies in that folder. One question a room, from the top: `versions`, `virtual`, `cluster`,
`operator`, `api`, `trainer`, `page`, `suite` (docs/architecture.md).
"""
