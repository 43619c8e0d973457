"""The variables of an UltraServer are those of AWS's script, from the driver's files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from trainium_agent.workload.ultra_server import build_ultra_server_environment

if TYPE_CHECKING:
    from pathlib import Path

TRN2U = {
    "ultraserver_mode": "1,2,3,4",
    "server_id_4": "00000000deadbeef",
    "node_id_4": "3",
    "server_id_2": "0000000000000abc",
    "node_id_2": "1",
}
TRN3 = {"ultraserver_mode": "1,4", "reservation_id": "cr-0123", "node_id": "2"}


def write_files(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("nodes", "files", "expected"),
    [
        (4, TRN2U, ("1", "00000000deadbeef", "3")),
        (2, TRN2U, ("3", "0000000000000abc", "1")),
        (2, {**TRN2U, "ultraserver_mode": "2,4"}, ("2", "0000000000000abc", "1")),
        (4, TRN3, ("1", "cr-0123", "2")),
    ],
)
def test_a_node_of_an_ultra_server_names_its_place(
    tmp_path: Path, nodes: int, files: dict[str, str], expected: tuple[str, str, str]
) -> None:
    mode, server, node = expected
    assert build_ultra_server_environment(nodes, 7, "10.0.0.1", write_files(tmp_path, files)) == {
        "NEURON_RT_ULTRASERVER_MODE": mode,
        "NEURON_RT_ULTRASERVER_SERVER_ID": server,
        "NEURON_RT_ULTRASERVER_NODE_ID": node,
        "NEURON_GLOBAL_TOPOID": "7",
        "NEURON_GLOBAL_TOPOID0_HOST": "10.0.0.1",
    }


@pytest.mark.parametrize(
    ("nodes", "files"),
    [
        (1, TRN2U),
        (4, {}),
        (4, {**TRN2U, "ultraserver_mode": "busy"}),
        (4, {**TRN2U, "ultraserver_mode": "4"}),
        (4, {**TRN2U, "server_id_4": "0000000000000000"}),
        (4, {**TRN2U, "node_id_4": "-1"}),
        (3, TRN2U),
    ],
    ids=["single nodes", "no driver", "busy", "alone only", "no server", "no number", "no such mode"],
)
def test_a_node_that_is_in_no_such_ultra_server_gets_no_variable(
    tmp_path: Path, nodes: int, files: dict[str, str]
) -> None:
    assert build_ultra_server_environment(nodes, 0, "10.0.0.1", write_files(tmp_path, files)) == {}
