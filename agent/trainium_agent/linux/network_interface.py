"""Find the network interface over which ranks meet: the one that has the pod's address.

Left alone gloo looks the host's name up and takes the address that it gets. In a pod with its own network a hosts
file answers; on the network of the node DNS does, and where it is silent or names no address of this host, gloo waits
and then takes the loopback interface, over which no other node is met.

Guarantees:
- The interface is chosen only where gloo finds the very address by it (the first IPv4 address that it bears).
- Anywhere else, and where the user has chosen, nothing changes.
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
"""In what the kernel answers: a name of 16 bytes, then a `sockaddr_in`."""


def use_interface(otherwise: str) -> None:
    """Have gloo meet others over the interface of this pod's address; outside of a pod `otherwise` is the address."""
    name = interface_of(os.environ.get(worker_env.ENV_POD_IP) or otherwise)
    if name:
        os.environ.setdefault(ENV_INTERFACE, name)


def interface_of(address: str) -> str | None:
    """Return the name of the interface; None for an address that is not the first IPv4 address of one."""
    try:
        wanted = ipaddress.ip_address("127.0.0.1" if address == "localhost" else address)
    except ValueError:
        return None
    if wanted.is_loopback:
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            request = struct.pack(f"{_REQUEST_BYTES}s", name[:_NAME_BYTES].encode())
            with contextlib.suppress(OSError):  # it has no IPv4 address
                if fcntl.ioctl(asking, _SIOCGIFADDR, request)[_ADDRESS] == wanted.packed:
                    return name
    return None
