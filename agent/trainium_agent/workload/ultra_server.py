"""Name this node's place in its UltraServer to the Neuron runtime.

Variables and values are those that AWS's script for MPI jobs sets on each worker (aws-neuron-sdk
`src/k8/k8s-ultraserver-init-script.sh`), from the driver's files (aws-neuron-driver `v3/neuron_pelect.c`). Like
the script, they number the nodes by UltraServer and by place in it; the operator's ranks have that order.
"""

from __future__ import annotations

from pathlib import Path

_DRIVER = Path("/sys/class/neuron_device")
_MODES = {4: ("1",), 2: ("3", "2")}
"""Modes by number of nodes, the preferred first: all four, and two by their vertical or by their horizontal links
(`enum neuron_ultraserver_mode`)."""
_NO_SERVER = "0000000000000000"
"""Content of the driver's file while it has not found its neighbours."""


def build_ultra_server_environment(
    unit_nodes: int, node_rank: int, master_ip: str, driver: Path = _DRIVER
) -> dict[str, str]:
    """Return the runtime's variables; empty for single nodes, and where the driver knows no such UltraServer.

    master_ip: address of the node of rank 0.
    """
    if unit_nodes < 2:
        return {}
    supported = _read(driver / "ultraserver_mode").split(",")
    mode = next((mode for mode in _MODES.get(unit_nodes, ()) if mode in supported), "")
    # Trn3 has the files without a number.
    server = _read(driver / "reservation_id") or _read(driver / f"server_id_{unit_nodes}")
    node = _read(driver / "node_id") or _read(driver / f"node_id_{unit_nodes}")
    if not mode or server in ("", _NO_SERVER) or not node.isdecimal():
        return {}
    return {
        "NEURON_RT_ULTRASERVER_MODE": mode,
        "NEURON_RT_ULTRASERVER_SERVER_ID": server,
        "NEURON_RT_ULTRASERVER_NODE_ID": node,
        "NEURON_GLOBAL_TOPOID": str(node_rank),
        "NEURON_GLOBAL_TOPOID0_HOST": master_ip,
    }


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
