"""Idle spares compile graphs of other sizes with the real command, and stop when they are needed."""

import contextlib
import json
from pathlib import Path

import pytest

from tests.testing.suite.processes import has_ended
from tests.wire.agent.agent_job import AgentJob
from trainium_contract.worker_process.process_tree import list_descendants

pytestmark = pytest.mark.timeout(180)  # processes that import torch again

CONFIG = {
    "model": {"numLayers": 1, "hiddenSize": 32, "intermediateSize": 64},
    "data": {"source": "/there/is/no/such/folder", "sequenceLength": 32, "tokenizer": {"vocabSize": 320}},
    "batch": {"globalSize": 6},
}


def start_with_spare(job: AgentJob, sizes: str) -> Path:
    shared = job.folder / "shared"
    config = CONFIG | {"neuron": {"sharedCacheDirectory": str(shared)}}
    (job.folder / "trainer.yaml").write_text(json.dumps(config))
    job.start("a")
    job.start("spare", TRAINIUM_BACKGROUND_SIZES=sizes, XDG_CACHE_HOME=str(job.folder / "cache"))
    return shared


def compilers(job: AgentJob) -> list[int]:
    """Return the pids of the compiling processes of the spare."""
    pids = []
    for pid in list_descendants(job.agents["spare"].pid):
        with contextlib.suppress(OSError):
            if b"precompile" in Path(f"/proc/{pid}/cmdline").read_bytes():
                pids.append(pid)
    return pids


@pytest.mark.long
async def test_a_spare_compiles_the_other_sizes_during_training(job: AgentJob) -> None:
    shared = start_with_spare(job, "2,3")
    await job.until_ready("a", "spare")
    assert not shared.exists(), "a possible member compiles nothing"
    await job.coordinator.publish(["a"])
    await job.until_training("a")
    log = job.agents["spare"].log_path
    await job.until(lambda: "the graphs for 3 nodes are ready" in log.read_text(), "both sizes compiled", 120)
    heartbeat = await job.until_heartbeat("spare", lambda heartbeat: len(heartbeat.compiled) == 2, "both sizes")
    assert [size.nodes for size in heartbeat.compiled] == [2, 3]
    assert all(size.seconds > 0 for size in heartbeat.compiled)
    assert "[precompile] 2 nodes: data parallel 2, 1 place(s) in the model: compiled" in log.read_text()
    assert len(list((shared / "keys").iterdir())) == 2
    assert (heartbeat.phase, heartbeat.ready) == ("Standby", True)


async def test_a_spare_stops_compiling_before_it_joins(job: AgentJob) -> None:
    start_with_spare(job, "2,3,6")
    await job.until_ready("a", "spare")
    await job.coordinator.publish(["a"])
    await job.until(lambda: compilers(job), "a compiling process", 60)
    before = compilers(job)
    await job.coordinator.publish(["a", "spare"])
    await job.until_training("a", "spare", generation=2)
    assert not [pid for pid in before if not has_ended(pid)]
    assert "not all compiled" not in job.agents["spare"].log
