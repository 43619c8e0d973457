"""Several real gloo ranks: resharding, replicas that help each other, damage that one rank sees."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from checkpoint_scenarios import report_after

if TYPE_CHECKING:
    from collections.abc import Callable


# The first test pays for importing torch in the server that ranks are forked from.
pytestmark = pytest.mark.timeout(180)


def memories(folder: Path, count: int, *, prefix: str = "node") -> list[Path]:
    return [folder / f"{prefix}-{rank}" for rank in range(count)]


def steps_of(reports: list[dict[str, Any]]) -> set[int | None]:
    return {report["step"] for report in reports}


def assert_right(reports: list[dict[str, Any]], step: int) -> None:
    assert steps_of(reports) == {step}
    assert [report["wrong"] for report in reports] == [[] for _ in reports]


@pytest.mark.parametrize("mode", ["Replicated", "FullySharded"])
def test_a_durable_checkpoint_is_resumed_at_any_data_parallel_size(
    world: Callable[..., list[dict[str, Any]]], tmp_path: Path, mode: str
) -> None:
    root = tmp_path / "root"
    reached = None
    for size, to in ((4, 2), (2, 3), (3, 5), (4, 6)):
        reports = world(size, report_after, root, None, to, {"save_at": (to,)}, mode=mode)
        assert_right(reports, reached)
        reached = to
        assert {report["durable"] for report in reports} == {to}


def test_a_durable_checkpoint_is_resumed_at_another_tensor_parallel_size(
    world: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    world(2, report_after, root, None, 2, {"save_at": (2,)}, tp=2)
    assert_right(world(1, report_after, root, None, 3, {"save_at": (3,)}), 2)
    assert_right(world(4, report_after, root, None, 4, {"save_at": (4,)}, tp=2, mode="FullySharded"), 3)
    assert_right(world(2, report_after, root, None, 4, {}), 4)


def test_a_rank_without_a_snapshot_gets_it_from_a_peer_also_at_another_size(
    world: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    world(2, report_after, root, nodes, 5, {"generation": 1})
    wider = [*nodes, *memories(tmp_path, 2, prefix="spare")]
    reports = world(4, report_after, root, wider, 7, {"generation": 2})
    assert_right(reports, 5)
    assert [report["source"] for report in reports] == ["memory", "memory", "peer", "peer"]
    # A spare without any memory folder, and the old nodes gone.
    reports = world(3, report_after, root, [tmp_path / "new", wider[3], None], 8, {"generation": 3})
    assert_right(reports, 7)
    assert [report["source"] for report in reports] == ["peer", "memory", "peer"]


def test_ranks_that_share_a_node_share_one_snapshot(world: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    node = tmp_path / "node"
    world(2, report_after, tmp_path / "root", [node, node], 4, {})
    assert len(list(node.glob("*.snapshot"))) == 3
    reports = world(2, report_after, tmp_path / "root", [node, node], 5, {})
    assert_right(reports, 4)
    assert [report["source"] for report in reports] == ["memory", "memory"]


def test_the_newest_step_that_every_shard_has_is_resumed(
    world: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    world(2, report_after, root, nodes, 5, {}, mode="FullySharded")
    for path in nodes[1].glob("*.snapshot"):
        data = bytearray(path.read_bytes())
        if b'"step": 5,' in bytes(data[:200]):
            data[4200] ^= 1
            path.write_bytes(data)
    reports = world(2, report_after, root, nodes, 6, {}, mode="FullySharded")
    assert_right(reports, 4)
    assert all(any("damaged" in w and "rank 1" in w for w in report["warnings"]) for report in reports)


def test_sharded_ranks_that_changed_places_exchange_their_snapshots(
    world: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    world(2, report_after, root, nodes, 5, {}, mode="FullySharded")
    reports = world(2, report_after, root, nodes[::-1], 9, {"generation": 2}, mode="FullySharded")
    assert_right(reports, 5)
    assert [report["source"] for report in reports] == ["peer", "peer"]
    assert [len(list(node.glob("*.snapshot"))) for node in nodes] == [3, 3]


def test_a_lost_shard_means_the_durable_tier(world: Callable[..., list[dict[str, Any]]], tmp_path: Path) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    world(2, report_after, root, nodes, 5, {"save_at": (3,)}, mode="FullySharded")
    reports = world(2, report_after, root, [nodes[0], tmp_path / "new"], 4, {}, mode="FullySharded")
    assert_right(reports, 3)
    assert {report["source"] for report in reports} == {"durable"}
    reports = world(2, report_after, root, [nodes[0], tmp_path / "new"], 4, {}, mode="FullySharded")
    assert_right(reports, 4)


def test_damage_that_one_rank_finds_turns_all_ranks_to_the_previous_checkpoint(
    world: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    root = tmp_path / "root"
    world(2, report_after, root, None, 4, {"save_at": (2, 4)}, tp=2)
    path = Path(root / "step-4" / "shard-00001.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    reports = world(2, report_after, root, None, 5, {"save_at": (5,)}, tp=2)
    assert_right(reports, 2)
    assert all(len(report["warnings"]) == 1 for report in reports)


def test_all_ranks_hear_that_the_store_cannot_be_used(
    world: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match="StorageError: checkpoint storage"):
        world(2, report_after, tmp_path / "file" / "root", None, 1, {})


def test_tensor_parallel_replicas_resume_from_memory_and_peers(
    world: Callable[..., list[dict[str, Any]]], tmp_path: Path
) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    both = [nodes[0], nodes[0], nodes[1], nodes[1]]
    world(4, report_after, root, both, 3, {}, tp=2)
    reports = world(4, report_after, root, [nodes[0], nodes[0], tmp_path / "new", tmp_path / "new"], 4, {}, tp=2)
    assert_right(reports, 3)
    assert [report["source"] for report in reports] == ["memory", "memory", "peer", "peer"]
    assert len(list(nodes[0].iterdir())) == 2 * 3 + 2
