"""Cache compiled graphs: keys, complete files, damage, and one compiler per key."""

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainium_contract.trainer.config import TrainingConfig
from trainium_contract.worker_process import compile_cache
from trainium_contract.worker_process.compile_cache import LocalCache, SharedCache, hold_lease
from trainium_trainer.compile.dry_run import (
    create_dry_run_launch,
    list_ranks_to_compile,
)
from trainium_trainer.compile.graphs import GraphInputs, describe_graphs, hash_graphs
from trainium_trainer.compile.sizes import CompileSizes, resolve_sizes
from trainium_trainer.configuration.config import read_document, resolve_settings
from trainium_trainer.exits import UserError

KEY = "k" * 32
MODULE = "neuronxcc-2.1/MODULE_1+abc"
EXAMPLES = Path(__file__).parents[4] / "manifests/examples"


def graph_inputs(nodes: int = 2, **fields: Any) -> GraphInputs:
    data = {"source": "python-docs", **fields.pop("data", {})}
    config = TrainingConfig.model_validate(
        {"model": {"preset": "Tiny"}, "batch": {"globalSize": 12}, "data": data, **fields}
    )
    return describe_graphs(
        resolve_settings(config, create_dry_run_launch(0, nodes)),
        image="image@sha256:1",
        flags=("--model-type=transformer",),
    )


def write_compiled(folder: Path, *, finished: bool = True) -> LocalCache:
    """Write the folder of a node, like the Neuron compiler."""
    module = folder / MODULE
    module.mkdir(parents=True)
    (module / "model.neff").write_bytes(b"neff" * 1000)
    (module / "model.hlo.lock").touch()
    if finished:
        (module / "model.done").touch()
    return LocalCache(folder)


def test_settings_that_change_no_graph_do_not_change_the_key() -> None:
    same = graph_inputs(steps=999, optimizer={"learningRate": 0.5}, data={"source": "elsewhere"}, seed=3)
    assert hash_graphs(graph_inputs()) == hash_graphs(same)


def test_packed_examples_have_the_graph_of_masked_documents() -> None:
    packed = graph_inputs(data={"format": "Instruction", "examples": {"packing": True}})
    masked = graph_inputs(data={"maskDocuments": True})
    assert hash_graphs(packed) == hash_graphs(masked) != hash_graphs(graph_inputs())


def test_a_key_differs_by_image_flags_model_and_size() -> None:
    inputs = graph_inputs()
    others = [
        replace(inputs, image="image@sha256:2"),
        replace(inputs, flags=()),
        graph_inputs(model={"preset": "Tiny", "numLayers": 5}),
        graph_inputs(nodes=3),
        graph_inputs(precision="BFloat16"),
        graph_inputs(data={"sequenceLength": 64}),
        graph_inputs(data={"maskDocuments": True}),
        graph_inputs(torchCompile="Layers"),
    ]
    assert len({hash_graphs(variant) for variant in [inputs, *others]}) == 1 + len(others)


def test_a_node_fetches_what_another_node_has_compiled(tmp_path: Path) -> None:
    shared = SharedCache(tmp_path / "shared")
    source, destination = write_compiled(tmp_path / "a"), LocalCache(tmp_path / "b")
    assert shared.fetch(KEY, destination) is None
    shared.publish(KEY, source)
    assert not destination.has(KEY)
    assert shared.fetch(KEY, destination)
    assert destination.has(KEY)
    copied = {path.name for path in (destination.folder / MODULE).iterdir()}
    assert copied == {"model.neff", "model.done"}
    assert (destination.folder / MODULE / "model.neff").read_bytes() == b"neff" * 1000


def test_a_module_that_the_compiler_has_not_finished_is_not_shared(tmp_path: Path) -> None:
    shared = SharedCache(tmp_path / "shared")
    assert shared.publish(KEY, write_compiled(tmp_path / "a", finished=False)).files == ()


def test_a_key_with_a_damaged_file_is_set_aside_and_can_be_published_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shared = SharedCache(tmp_path / "shared")
    source, destination = write_compiled(tmp_path / "a"), LocalCache(tmp_path / "b")
    neff = next(file for file in shared.publish(KEY, source).files if file.size)
    stored = shared.folder / "files" / neff.digest[:2] / neff.digest
    stored.write_bytes(b"X" * neff.size)  # the same size, other bytes
    assert shared.fetch(KEY, destination) is None
    assert not (destination.folder / MODULE / "model.neff").exists()
    assert not (destination.folder / MODULE / "model.done").exists()
    assert "set aside" in caplog.text
    assert not shared.has(KEY)
    shared.publish(KEY, source)
    assert shared.fetch(KEY, destination)


@pytest.mark.parametrize("path", ["../outside", "a/../../outside", "/etc/outside"])
def test_a_key_that_names_a_file_outside_of_the_folder_is_not_used(tmp_path: Path, path: str) -> None:
    shared, destination = SharedCache(tmp_path / "shared"), LocalCache(tmp_path / "b")
    shared.publish(KEY, write_compiled(tmp_path / "a"))
    entry_file = shared.folder / "keys" / f"{KEY}.json"
    entry = json.loads(entry_file.read_text())
    entry["files"][0]["path"] = path
    entry_file.write_text(json.dumps(entry))
    assert shared.fetch(KEY, destination) is None
    assert not (tmp_path / "outside").exists()


def test_a_partial_file_in_the_node_s_folder_is_copied_again(tmp_path: Path) -> None:
    shared = SharedCache(tmp_path / "shared")
    destination = LocalCache(tmp_path / "b")
    shared.publish(KEY, write_compiled(tmp_path / "a"))
    shared.fetch(KEY, destination)
    (destination.folder / MODULE / "model.neff").write_bytes(b"ne")
    assert not destination.has(KEY)
    shared.fetch(KEY, destination)
    assert destination.has(KEY)


@pytest.fixture
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_cache, "_POLL_SECONDS", 0.02)
    monkeypatch.setattr(compile_cache, "_LEASE_SECONDS", 1.0)


@pytest.mark.usefixtures("_short_intervals")
def test_only_one_of_many_holds_a_lock_at_a_time(tmp_path: Path) -> None:
    holders: list[int] = []
    holder_counts: list[int] = []

    def compile_once() -> None:
        with hold_lease(tmp_path / "locks" / KEY, unless=lambda: False):
            holders.append(1)
            holder_counts.append(len(holders))
            holders.pop()

    threads = [threading.Thread(target=compile_once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert holder_counts == [1] * 8
    assert list((tmp_path / "locks").iterdir()) == []


HOLDER = """
import os, socket, sys, time
from pathlib import Path
from trainium_contract.worker_process import compile_cache
from trainium_contract.worker_process.compile_cache import hold_lease
compile_cache._LEASE_SECONDS = 1.0
socket.gethostname = lambda: sys.argv[2]
with hold_lease(Path(sys.argv[1]), unless=lambda: False):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Start a process that holds the lock under the name of a machine."""
    started: list[subprocess.Popen[str]] = []

    def start(machine: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", HOLDER, str(tmp_path / KEY), machine]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[0].stdout.readline() == "held\n"
        return started[0]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.usefixtures("_short_intervals")
def test_the_lock_of_a_process_that_was_killed_is_broken(
    tmp_path: Path, holder: Callable[[str], subprocess.Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_cache, "_LEASE_SECONDS", 600.0)
    process = holder(socket.gethostname())
    process.kill()
    process.wait()
    assert (tmp_path / KEY).exists()
    with hold_lease(tmp_path / KEY, unless=lambda: False) as acquired:
        assert acquired


@pytest.mark.usefixtures("_short_intervals")
def test_the_lock_of_another_machine_is_broken_only_when_it_is_no_longer_renewed(
    tmp_path: Path, holder: Callable[[str], subprocess.Popen[str]]
) -> None:
    process = holder("another-node")
    started = time.monotonic()
    with hold_lease(tmp_path / KEY, unless=lambda: time.monotonic() > started + 2.5) as acquired:
        assert not acquired
    process.send_signal(signal.SIGSTOP)
    with hold_lease(tmp_path / KEY, unless=lambda: False) as acquired:
        assert acquired


def read_sizes(file: Path, overrides: tuple[str, ...] = (), **options: Any) -> CompileSizes:
    return resolve_sizes(file, read_document(file), overrides, **options)


def test_the_sizes_of_a_job_start_with_that_of_its_first_start() -> None:
    plan = read_sizes(EXAMPLES / "demo.yaml")
    assert plan.nodes == (4, 3, 2, 6)
    assert read_sizes(EXAMPLES / "hlat-7b.yaml").nodes == (128, 86, 64), "one more node between them has no effect"
    assert read_sizes(EXAMPLES / "hlat-7b.yaml", requested=(256,)).cores_per_node == 32


def test_a_size_that_is_not_legal_is_refused_with_the_next_one() -> None:
    with pytest.raises(UserError, match=r"--sizes has 5, but 5 x 1 ranks .* pipeline 1: the next smaller .* size is 4"):
        read_sizes(EXAMPLES / "demo.yaml", ("parallelism.tensor=2",), requested=(5,))


def test_a_job_of_even_sizes_compiles_no_others(tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "hlat-7b.yaml").read_text())
    job["spec"]["elasticity"] = {"sizes": "Even"}
    file = tmp_path / "even.yaml"
    file.write_text(yaml.safe_dump(job))
    assert read_sizes(file).nodes == (128, 64)
    with pytest.raises(UserError, match=r"a global batch of 1024 in micro-batches of 1: the next .* size is 64"):
        read_sizes(file, requested=(86,))


def test_a_configuration_of_the_trainer_needs_sizes(tmp_path: Path) -> None:
    file = tmp_path / "trainer.yaml"
    file.write_text("steps: 10\nschedule: {warmupSteps: 1}\n")
    with pytest.raises(UserError, match="give --sizes"):
        read_sizes(file)
    assert read_sizes(file, requested=(2,), cores_per_node=4).nodes == (2,)


def test_one_rank_of_each_position_in_the_model_is_compiled() -> None:
    config = TrainingConfig.model_validate({"parallelism": {"tensor": 2, "pipeline": 2}, "batch": {"globalSize": 12}})
    assert list_ranks_to_compile(config, 12) == (0, 1, 6, 7)
