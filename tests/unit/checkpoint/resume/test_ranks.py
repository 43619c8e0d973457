"""Resume in several gloo ranks: other sizes, snapshots from peers, damage on one rank."""

import gc
from pathlib import Path
from typing import Any

import pytest

from tests.testing.trainer.base_models import flip_bit
from tests.unit.checkpoint.checkpoint_builders import run_ranks, start_run
from tests.unit.checkpoint.checkpoint_scenarios import (
    gather_texts,
    reduce_with_failures,
    report_after,
    save_as_a_peer_dies,
    scatter_with_failures,
)
from trainium_trainer.checkpoint.resume.leader import ResumeLeader
from trainium_trainer.checkpoint.root.survey import survey
from trainium_trainer.storage.posix import PosixStorage
from trainium_worker.snapshots.files import read_part


def memories(folder: Path, count: int, *, prefix: str = "node") -> list[Path]:
    return [folder / f"{prefix}-{rank}" for rank in range(count)]


def snapshot_step(path: Path) -> int:
    part = read_part(path)
    return -1 if part is None else part.version.step


def assert_resumed(reports: list[dict[str, Any]], step: int | None) -> None:
    assert {report["resumed_step"] for report in reports} == {step}
    assert [report["wrong_tensors"] for report in reports] == [[] for _ in reports]


@pytest.mark.parametrize("mode", ["Replicated", "FullySharded"])
def test_a_durable_checkpoint_is_resumed_at_any_data_parallel_size(tmp_path: Path, mode: str) -> None:
    root = tmp_path / "root"
    for size, resumed, saved in ((4, None, 2), (2, 2, 3), (3, 3, 5), (4, 5, 6)):
        reports = run_ranks(size, report_after, root, None, saved, {"save_at": (saved,)}, mode=mode)
        assert_resumed(reports, resumed)
        assert {report["durable_step"] for report in reports} == {saved}


def test_a_durable_checkpoint_is_resumed_at_another_tensor_parallel_size(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run_ranks(2, report_after, root, None, 2, {"save_at": (2,)}, tp=2)
    assert_resumed(run_ranks(1, report_after, root, None, 3, {"save_at": (3,)}), 2)
    assert_resumed(run_ranks(4, report_after, root, None, 4, {"save_at": (4,)}, tp=2, mode="FullySharded"), 3)
    assert_resumed(run_ranks(2, report_after, root, None, 4, {}), 4)


def test_a_checkpoint_is_resumed_with_ranks_in_another_order(tmp_path: Path) -> None:
    root = tmp_path / "root"
    assert_resumed(run_ranks(3, report_after, root, None, 2, {"save_at": (2,), "reversed_order": True}), None)
    assert_resumed(run_ranks(3, report_after, root, None, 3, {"save_at": (3,)}), 2)
    assert_resumed(run_ranks(2, report_after, root, None, 3, {"reversed_order": True}), 3)


def test_a_rank_without_a_snapshot_gets_it_from_a_peer_also_at_another_size(tmp_path: Path) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    run_ranks(2, report_after, root, nodes, 5, {"generation": 1})
    with_spares = [*nodes, *memories(tmp_path, 2, prefix="spare")]
    reports = run_ranks(4, report_after, root, with_spares, 7, {"generation": 2})
    assert_resumed(reports, 5)
    assert [report["source"] for report in reports] == ["memory", "memory", "peer", "peer"]
    # One spare has no memory folder, and the old nodes are deleted.
    reports = run_ranks(3, report_after, root, [tmp_path / "new", with_spares[3], None], 8, {"generation": 3})
    assert_resumed(reports, 7)
    assert [report["source"] for report in reports] == ["peer", "memory", "peer"]


def test_ranks_that_share_a_node_share_one_snapshot(tmp_path: Path) -> None:
    node = tmp_path / "node"
    run_ranks(2, report_after, tmp_path / "root", [node, node], 4, {})
    assert len(list(node.rglob("*.snapshot"))) == 3
    reports = run_ranks(2, report_after, tmp_path / "root", [node, node], 5, {})
    assert_resumed(reports, 4)
    assert [report["source"] for report in reports] == ["memory", "memory"]


@pytest.mark.parametrize(("buddies", "resumed"), [(0, 4), (1, 5)])
def test_the_newest_step_that_every_shard_has_is_resumed(tmp_path: Path, buddies: int, resumed: int) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    settings = {"buddies": buddies}
    run_ranks(2, report_after, root, nodes, 5, settings, mode="FullySharded")
    for path in nodes[1].rglob("*-d1of2-*.snapshot"):
        if snapshot_step(path) == 5:
            flip_bit(path, 4200)
    reports = run_ranks(2, report_after, root, nodes, 6, settings, mode="FullySharded")
    assert_resumed(reports, resumed)
    assert reports[1]["source"] == ("peer" if buddies else "memory")
    assert all(
        any("damaged" in warning and "rank 1" in warning for warning in report["warnings"]) for report in reports
    )


@pytest.mark.parametrize("buddies", [0, 1])
def test_sharded_ranks_that_changed_places_exchange_their_snapshots(tmp_path: Path, buddies: int) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    settings = {"buddies": buddies}
    run_ranks(2, report_after, root, nodes, 5, settings, mode="FullySharded")
    reports = run_ranks(2, report_after, root, nodes[::-1], 9, settings | {"generation": 2}, mode="FullySharded")
    assert_resumed(reports, 5)
    # With buddies, the other node already has a copy.
    assert [report["source"] for report in reports] == (["memory"] * 2 if buddies else ["peer"] * 2)
    assert [len(list(node.rglob("*.snapshot"))) for node in nodes] == [3 + 2 * buddies] * 2


def test_without_a_copy_of_a_lost_shard_the_durable_checkpoint_is_resumed(tmp_path: Path) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    without_buddies = {"buddies": 0}
    run_ranks(2, report_after, root, nodes, 5, {"save_at": (3,), **without_buddies}, mode="FullySharded")
    reports = run_ranks(2, report_after, root, [nodes[0], tmp_path / "new"], 4, without_buddies, mode="FullySharded")
    assert_resumed(reports, 3)
    assert {report["source"] for report in reports} == {"durable"}
    reports = run_ranks(2, report_after, root, [nodes[0], tmp_path / "new"], 4, without_buddies, mode="FullySharded")
    assert_resumed(reports, 4)


@pytest.mark.parametrize(("size", "tp", "mode"), [(3, 1, "FullySharded"), (2, 2, "Replicated")])
def test_the_shard_of_a_lost_node_comes_from_its_buddy(tmp_path: Path, size: int, tp: int, mode: str) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, size)
    settings = {"save_at": (2,)}
    reports = run_ranks(size, report_after, root, nodes, 5, settings, tp=tp, mode=mode)
    assert [report["buddy_step"] for report in reports] == [5] * size
    for lost in range(size):
        nodes[lost] = tmp_path / f"instead-of-{lost}"
        reports = run_ranks(size, report_after, root, nodes, 7 + lost, {}, tp=tp, mode=mode)
        assert_resumed(reports, 5 if lost == 0 else 6 + lost)
        assert [report["source"] for report in reports] == ["peer" if r == lost else "memory" for r in range(size)]
        assert [report["warnings"] for report in reports] == [[]] * size
    # Each node has three files of its shard and two of another shard.
    assert [len(list(node.rglob("*.snapshot"))) for node in nodes] == [5] * size


def test_all_ranks_resume_from_the_step_before_a_damaged_copy(tmp_path: Path) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 3)
    both = [nodes[0], nodes[0], nodes[1], nodes[1]]
    reports = run_ranks(4, report_after, root, both, 5, {}, mode="FullySharded")
    assert [report["buddy_step"] for report in reports] == [5] * 4
    (copy,) = (path for path in nodes[0].rglob("*-d2of4-*") if snapshot_step(path) == 5)
    flip_bit(copy)
    reports = run_ranks(4, report_after, root, [nodes[0], nodes[0], nodes[2], nodes[2]], 7, {}, mode="FullySharded")
    assert_resumed(reports, 4)
    assert [report["source"] for report in reports] == ["memory", "memory", "peer", "peer"]
    assert all(any("damaged" in warning for warning in report["warnings"]) for report in reports)


def test_a_node_without_capacity_for_copies_warns_and_continues(tmp_path: Path) -> None:
    nodes = memories(tmp_path, 2)
    reports = run_ranks(2, report_after, tmp_path / "root", nodes, 3, {"snapshots": 3}, mode="FullySharded")
    assert [report["buddy_step"] for report in reports] == [None, None]
    assert any("keeps no copies of another's snapshots" in warning for warning in reports[0]["warnings"])
    assert_resumed(run_ranks(2, report_after, tmp_path / "root", nodes, 3, {}, mode="FullySharded"), 3)


def test_all_ranks_resume_from_the_previous_checkpoint_when_one_finds_damage(tmp_path: Path) -> None:
    root = tmp_path / "root"
    run_ranks(2, report_after, root, None, 4, {"save_at": (2, 4)}, tp=2)
    flip_bit(next((root / "step-4").glob("*/shard-00001.safetensors")))
    reports = run_ranks(2, report_after, root, None, 5, {"save_at": (5,)}, tp=2)
    assert_resumed(reports, 2)
    assert all(len(report["warnings"]) == 1 for report in reports)


def test_a_peer_that_dies_before_it_receives_the_commit_does_not_damage_the_checkpoint(tmp_path: Path) -> None:
    (failure,) = run_ranks(2, save_as_a_peer_dies, tmp_path / "root", killed=1)
    assert failure, "rank 0 did not fail"
    surveyed = survey(PosixStorage(tmp_path / "root"))
    assert (surveyed.damaged, [item.step for item in surveyed.committed]) == ({}, [1])
    assert_resumed(run_ranks(2, report_after, tmp_path / "root", None, 1, {}), 1)


def test_all_ranks_report_that_the_store_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AssertionError, match="StorageError: checkpoint storage"):
        run_ranks(2, report_after, tmp_path / "file" / "root", None, 1, {})


def test_tensor_parallel_replicas_resume_from_memory_and_peers(tmp_path: Path) -> None:
    root, nodes = tmp_path / "root", memories(tmp_path, 2)
    both = [nodes[0], nodes[0], nodes[1], nodes[1]]
    run_ranks(4, report_after, root, both, 3, {}, tp=2)
    reports = run_ranks(4, report_after, root, [nodes[0], nodes[0], tmp_path / "new", tmp_path / "new"], 4, {}, tp=2)
    assert_resumed(reports, 3)
    assert [report["source"] for report in reports] == ["memory", "memory", "peer", "peer"]
    assert len(list(nodes[0].rglob("*"))) == 1 + 2 * 3 + 2


@pytest.mark.parametrize("sizes", [[0, 100_000, 7, 3], [5, 0, 1, 70_000, 2]])
def test_every_rank_receives_the_texts_of_all_ranks_in_their_order(sizes: list[int]) -> None:
    expected = ["abcde"[rank] * size for rank, size in enumerate(sizes)]
    assert run_ranks(len(sizes), gather_texts, sizes) == [expected] * len(sizes)


def test_all_ranks_receive_the_decision_of_the_first_or_the_first_error() -> None:
    first, *others = run_ranks(3, reduce_with_failures)
    assert others == [first, first]
    assert first[:5] == [
        "3",
        "ValueError: one",
        "StorageError: two",
        "OSError: [Errno 28] full",
        "StorageError: no room",
    ]
    assert "Unpicklable" in first[5]
    assert "lost at sea" in first[5]
    assert first[6] == "RuntimeError: ranks are at different points: same and late"
    assert first[7] == "3"
    assert first[8] == "[0, 100, 200]"
    assert first[9] == "ZeroDivisionError: integer division or modulo by zero"
    assert first[10] == "ValueError: one"


@pytest.mark.parametrize("size", [3, 8])
def test_each_rank_gets_its_own_answer_and_all_get_the_same_error(size: int) -> None:
    letters = "abcdefgh"[:size]
    results = run_ranks(size, scatter_with_failures)
    for rank, outcomes in enumerate(results):
        assert outcomes[0] == outcomes[5] == f"{rank} of {letters}{'x' * 50_000 * (rank == 1)}"
    assert [outcomes[1:5] for outcomes in results] == [results[0][1:5]] * size
    assert results[0][1:4] == [
        "StorageError: two",
        "StorageError: no room",
        "RuntimeError: ranks are at different points: same and late",
    ]
    assert results[0][4].startswith("RuntimeError")  # an answer that cannot be pickled is an error of all ranks


def test_garbage_collection_is_disabled_while_the_first_rank_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_enabled: list[bool] = []
    decide = ResumeLeader.decide

    def decide_and_record(leader: ResumeLeader, reports: list[Any]) -> list[Any]:
        was_enabled.append(gc.isenabled())
        return decide(leader, reports)

    monkeypatch.setattr(ResumeLeader, "decide", decide_and_record)
    start_run(tmp_path).close()
    assert was_enabled == [False]
    assert gc.isenabled()
