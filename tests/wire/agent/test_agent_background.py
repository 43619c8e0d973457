"""Idle spares compile graphs of other sizes with the real command, and stop when they are needed."""

import contextlib
import json
from pathlib import Path

import pytest

from tests.wire.agent.agent_world import AgentJob, is_alive
from trainium_agent.linux.kernel import descendants

pytestmark = pytest.mark.timeout(180)  # processes that import torch again

CONFIG = {
    "model": {"numLayers": 1, "hiddenSize": 32, "intermediateSize": 64},
    "data": {"source": "/there/is/no/such/folder", "sequenceLength": 32, "tokenizer": {"vocabSize": 320}},
    "batch": {"globalSize": 6},
}


def spare_of_a_training_pod(world: AgentJob, sizes: str) -> Path:
    shared = world.folder / "shared"
    config = CONFIG | {"neuron": {"sharedCacheDirectory": str(shared)}}
    (world.folder / "trainer.yaml").write_text(json.dumps(config))
    world.start("a")
    world.start("spare", TRAINIUM_BACKGROUND_SIZES=sizes, XDG_CACHE_HOME=str(world.folder / "cache"))
    return shared


def compilers(world: AgentJob) -> list[int]:
    """Return the pids of the compiling processes of the spare."""
    found = []
    for pid in descendants(world.agents["spare"].pid):
        with contextlib.suppress(OSError):
            if b"precompile" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


@pytest.mark.long
async def test_a_spare_compiles_the_other_sizes_during_training(world: AgentJob) -> None:
    shared = spare_of_a_training_pod(world, "2,3")
    await world.ready("a", "spare")
    assert not shared.exists(), "a pod that may be a member at once has no time for that"
    await world.jobs.publish(["a"])
    await world.training("a")
    log = world.agents["spare"].log_path
    await world.until(lambda: "the graphs for 3 nodes are ready" in log.read_text(), "both sizes compiled", 120)
    beat = await world.heartbeat("spare", lambda beat: len(beat.compiled) == 2, "both sizes")
    assert [each.nodes for each in beat.compiled] == [2, 3]
    assert all(each.seconds > 0 for each in beat.compiled)
    assert "[precompile] 2 nodes: data parallel 2, 1 place(s) in the model: compiled" in log.read_text()
    assert len(list((shared / "keys").iterdir())) == 2
    assert (beat.phase, beat.ready) == ("Standby", True)


async def test_a_spare_stops_compiling_before_it_joins(world: AgentJob) -> None:
    spare_of_a_training_pod(world, "2,3,6")
    await world.ready("a", "spare")
    await world.jobs.publish(["a"])
    await world.until(lambda: compilers(world), "a compiling process", 60)
    before = compilers(world)
    await world.jobs.publish(["a", "spare"])
    await world.training("a", "spare", generation=2)
    assert not [pid for pid in before if is_alive(pid)]
    assert "not all compiled" not in world.agents["spare"].log
