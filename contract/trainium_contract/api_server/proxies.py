"""Choose the proxy to an API server as kubectl does.

The library applies NO_PROXY differently (its issue 2460): it knows neither `*.domain` nor the default port, and its
client for event loops ignores the variable. The rules are those of Go's `httpproxy`.
"""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:
    from collections.abc import Mapping

_DEFAULT_PORTS = {"https": 443, "http": 80}


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy, with its login apart, so that errors do not contain it."""

    url: str = ""
    login: str = ""
    """`user:password`."""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Split a URL."""
        parts = urlsplit(url)
        login = f"{unquote(parts.username)}:{unquote(parts.password or '')}" if parts.username else ""
        return cls(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}" if url else "", login)


NO_PROXY = Proxy()


def find_proxy(server: str, environment: Mapping[str, str]) -> str:
    """Return the URL of the environment's proxy to a server; empty for none."""
    parts = urlsplit(server)
    proxy = _read_variable(environment, f"{parts.scheme}_proxy")
    host, port = parts.hostname or "", parts.port or _DEFAULT_PORTS[parts.scheme]
    if not proxy or _is_direct(host, port, _read_variable(environment, "no_proxy")):
        return ""
    return proxy if "://" in proxy else f"http://{proxy}"


def _read_variable(environment: Mapping[str, str], name: str) -> str:
    return environment.get(name.upper()) or environment.get(name) or ""


def _is_direct(host: str, port: int, no_proxy: str) -> bool:
    """Return whether NO_PROXY, or the loopback address, excludes a host from the proxy."""
    address = None
    with suppress(ValueError):
        address = ipaddress.ip_address(host)
    if host == "localhost" or (address is not None and address.is_loopback):
        return True
    return any(_matches(rule.strip().lower(), host, port, address) for rule in no_proxy.split(",") if rule.strip())


def _matches(rule: str, host: str, port: int, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
    if rule == "*":
        return True
    with suppress(ValueError):
        network = ipaddress.ip_network(rule.strip("[]"), strict=False)
        return address is not None and address in network
    name, _, rule_port = rule.rpartition(":") if ":" in rule else (rule, "", "")
    name = name.strip("[]")
    if rule_port and rule_port != str(port):
        return False
    with suppress(ValueError):
        return address == ipaddress.ip_address(name)
    suffix = name.removeprefix("*") if name.startswith("*.") else name
    return host.endswith(suffix) if suffix.startswith(".") else host == suffix or host.endswith(f".{suffix}")
