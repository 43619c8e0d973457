"""Find the network interface over which ranks connect: the one that has the pod's address.

By default gloo resolves the host's name and uses that address. In a pod with its own network the hosts file answers. On
the node's network DNS answers; if it does not, or names no address of this host, gloo waits and then uses the loopback
interface, which reaches no other node.

Guarantees:
- The interface is set only if gloo gets the pod's address from it (its first IPv4 address).
- Otherwise, and if the user has set an interface, nothing changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct

from trainium_contract.wire import worker_env

ENV_INTERFACE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "lo"
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15
_REQUEST_BYTES = 256
_ADDRESS = slice(20, 24)
"""Offset in the kernel's answer: a name of 16 bytes, then a `sockaddr_in`."""


def use_interface(default: str) -> None:
    """Make gloo connect over the interface of this pod's address; outside a pod `default` is the address."""
    name = find_interface(os.environ.get(worker_env.ENV_POD_IP) or default)
    if name:
        os.environ.setdefault(ENV_INTERFACE, name)


def find_interface(address: str) -> str | None:
    """Return the name of the interface; None if the address is not the first IPv4 address of any."""
    try:
        expected = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:
        return None
    if expected.is_loopback:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name[:_NAME_BYTES].encode())
            with contextlib.suppress(OSError):  # it has no IPv4 address
                if fcntl.ioctl(control, _SIOCGIFADDR, request)[_ADDRESS] == expected.packed:
                    return name
    return None
