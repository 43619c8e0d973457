"""Options and fixtures of all tests: which cluster the cluster tests use."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from sites import Site, open_site

if TYPE_CHECKING:
    from collections.abc import Iterator


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--cluster",
        choices=("local", "kind", "existing"),
        default="local",
        help="local: the development cluster; kind: a kind cluster; existing: that of KUBECONFIG (docs/testing.md)",
    )


@pytest.fixture(scope="session")
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """The cluster with nodes that all tests of this session share."""
    with open_site(request.config.getoption("--cluster")) as opened:
        yield opened
