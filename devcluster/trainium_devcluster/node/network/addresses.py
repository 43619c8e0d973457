"""Allocate loopback addresses: a /24 of 127.0.0.0/8 for the node, and one address of it per pod.

Guarantees:
- No two nodes on a machine share a /24, in any cluster, because a node reserves its /24 by listening on the kubelet
  port of its first address.
- A pod's address is reused only after all other addresses.
"""

import hashlib
import ipaddress
import socket
from collections.abc import Iterator

_FIRST_SECOND_OCTET = 16  # 127.0 to 127.15 stay free for other programs of the machine
_MAX_ATTEMPTS = 512


class NoFreeAddressError(Exception):
    """No address is left."""


def iterate_candidate_networks(seed: str) -> Iterator[ipaddress.IPv4Network]:
    """Yield the /24 networks that a node tries, in an order that only depends on `seed`."""
    for attempt in range(_MAX_ATTEMPTS):
        digest = hashlib.sha256(f"{seed}/{attempt}".encode()).digest()
        second = _FIRST_SECOND_OCTET + digest[0] % (255 - _FIRST_SECOND_OCTET)
        yield ipaddress.IPv4Network(f"127.{second}.{digest[1]}.0/24")


def reserve_network(
    networks: Iterator[ipaddress.IPv4Network], port: int
) -> tuple[ipaddress.IPv4Network, socket.socket]:
    """Reserve the first free network; return it and the listening socket that reserves it.

    Raises:
        NoFreeAddressError: when all are reserved.
    """
    for network in networks:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((str(network[1]), port))
            sock.listen(128)
        except OSError:
            sock.close()
            continue
        return network, sock
    raise NoFreeAddressError(f"no free network below 127.0.0.0/8 with port {port}: are other clusters running?")


class PodAddresses:
    """Allocates the addresses of a /24, from .2 on."""

    def __init__(self, network: ipaddress.IPv4Network) -> None:
        self._all = [str(address) for address in list(network.hosts())[1:]]
        self._next = 0
        self._owners: dict[str, str] = {}

    def allocate(self, owner: str, previous: str = "") -> str:
        """Allocate an address for the pod with uid `owner`, by default the `previous` one if it is free.

        Raises:
            NoFreeAddressError: when every address is in use.
        """
        for address, uid in self._owners.items():
            if uid == owner:
                return address
        if previous in self._all and previous not in self._owners:
            self._owners[previous] = owner
            return previous
        for offset in range(len(self._all)):
            address = self._all[(self._next + offset) % len(self._all)]
            if address not in self._owners:
                self._next = (self._next + offset + 1) % len(self._all)
                self._owners[address] = owner
                return address
        raise NoFreeAddressError(f"all {len(self._all)} pod addresses of this node are in use")

    def release(self, owner: str) -> None:
        """Release the address of a pod."""
        for address in [address for address, uid in self._owners.items() if uid == owner]:
            del self._owners[address]
