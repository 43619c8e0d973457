"""A real world on one machine: the training command in forked processes that save, die, resume and change their number.

Real: processes, gloo, the store that agents would serve, memory snapshots (nodes of 8 ranks), durable saves. One warm
parent has imported everything, so that ranks share its memory. Wall-clock times mean nothing here: all share two cores.

    python -m benchmarks.scale.world RANKS [--sharded] [--json FILE]

Prints what was found; exit code 1 when a curve differs, a rank fails, or a simulated figure is off by more than a
fifth; 2 when the world does not fit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import os
import re
import signal
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import yaml

from benchmarks.scale.ears import die_at, listen
from benchmarks.scale.wire import Counter, Traffic
from trainium_devcluster.ports import reserved_port

ON_A_NODE = 8
STEPS, KILLED_AT, RESIZED = 6, 3, 8
SAVE_EVERY = 2
TOLERANCE = 0.2
WHO, WHAT = "resume: who is where", "resume: what is there"
LEAST_MEMORY = 2.0
"""GiB that have to stay free."""
_WORDS = "gradient loss step batch token shard rank node mesh state tensor warm "
MODEL = {"numLayers": 2, "hiddenSize": 64, "intermediateSize": 128, "vocabSize": 320}


class DoesNotFitError(Exception):
    """The machine is too small for this world."""


@dataclass(slots=True)
class Life:
    """What was seen of one start of all ranks."""

    codes: list[int | None]
    private: float
    """Most memory of its own that a rank had, MiB."""
    free: float
    """Least memory that the machine had left, GiB."""
    store: dict[str, int]
    """Traffic at the store of the ranks."""
    heard: dict[str, list[dict[str, Any]]]
    """By rank ("0", "middle"): its gathers in order."""


@dataclass(slots=True)
class Finding:
    """What was found of one world."""

    ranks: int
    sharded: bool
    rows: list[dict[str, Any]] = field(default_factory=list)
    """Simulated beside real."""
    same_curve: bool = False
    resumed: str = ""
    resized_to: int = 0
    resize_kept: bool = False
    seconds: float = 0.0
    private: float = 0.0
    free: float = 0.0
    store_bytes: int = 0
    """At the store, by all ranks in their first start."""
    store_requests: int = 0

    def compare(self, name: str, simulated: float, real: float) -> None:
        """Take a pair."""
        off = abs(simulated - real) / real if real else float(simulated != real)
        self.rows.append({"name": name, "simulated": simulated, "real": real, "off": off, "met": off <= TOLERANCE})

    @property
    def good(self) -> bool:
        """Whether all is as it should be."""
        return self.same_curve and self.resize_kept and all(row["met"] for row in self.rows)

    def to_json(self) -> dict[str, Any]:
        """For the page."""
        return asdict(self) | {"good": self.good}


class World:
    """Ranks around one folder."""

    def __init__(self, folder: Path, ranks: int, *, sharded: bool) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir(parents=True, exist_ok=True)
        self.config = folder / "trainer.yaml"
        text = folder / "text.txt"
        text.write_text((_WORDS + "\n") * 400)
        document = {
            "steps": STEPS,
            "batch": {"globalSize": ranks, "microSize": 1},
            "dataParallel": "FullySharded" if sharded else "Replicated",
            "data": {
                "source": str(text),
                "sequenceLength": 16,
                "cacheDirectory": str(folder.parent / "cache"),
                "tokenizer": {"vocabSize": 320},
            },
            "model": MODEL,
            "schedule": {"warmupSteps": 1},
            "checkpoint": {"path": str(folder / "run"), "durable": {"everySeconds": None, "everySteps": SAVE_EVERY}},
            "monitor": {"tensorboard": False},
        }
        self.config.write_text(yaml.safe_dump(document))

    def losses(self) -> dict[int, float]:
        """By step."""
        path = self.folder / "run" / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {line["step"]: line["loss"] for line in lines}

    def checkpoint(self) -> Path:
        """The files of the newest one."""
        newest = max((self.folder / "run").glob("step-*/COMMITTED"), key=lambda path: int(path.parent.name[5:]))
        (folder,) = (path for path in newest.parent.iterdir() if path.is_dir())
        return folder

    def live(self, *overrides: str, ranks: int = 0, kill_at: int = 0, seconds: float = 540.0) -> Life:
        """Start all ranks and see them end; with `kill_at` the last rank is killed when it has completed that step."""
        ranks = ranks or self.ranks
        ears = {0: "0", ranks // 2: "middle"}
        for name in ears.values():
            (self.folder / f"heard-{name}").unlink(missing_ok=True)
        counter, inside = Counter(), reserved_port()
        port = counter.listen(inside)
        store = self._serve(inside)
        pids = [self._rank(rank, ranks, port, overrides, ears, kill_at) for rank in range(ranks)]
        try:
            life = self._watch(pids, time.monotonic() + seconds)
        finally:
            for pid in (*pids, store):
                with contextlib.suppress(ProcessLookupError, ChildProcessError):
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            traffic: Traffic = counter.read()
            counter.end()
        life.store = asdict(traffic)
        for name in ears.values():
            path = self.folder / f"heard-{name}"
            life.heard[name] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return life

    def _serve(self, port: int) -> int:
        """The store that the first node's agent serves, in a process as the agent is."""
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            from trainium_trainer.agent.generation.generation_store import serve_store  # noqa: PLC0415 - in the process

            store = serve_store("127.0.0.1", port)
            while store:
                time.sleep(60)
        return pid

    def _rank(
        self, rank: int, ranks: int, port: int, overrides: tuple[str, ...], ears: dict[int, str], kill_at: int
    ) -> int:  # fmt: skip
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)
            log = os.open(self.folder / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            memory = self.folder / f"memory-{rank // ON_A_NODE}"
            os.environ.update(
                RANK=str(rank),
                LOCAL_RANK=str(rank),
                WORLD_SIZE=str(ranks),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=str(port),
                TORCHELASTIC_USE_AGENT_STORE="True",
                TRAINIUM_MEMORY_DIR=str(memory),
            )
            memory.mkdir(exist_ok=True)
            if rank in ears:
                listen(self.folder / f"heard-{ears[rank]}")
            if kill_at and rank == ranks - 1:
                die_at(kill_at)
            from trainium_trainer.cli import main as train_main  # noqa: PLC0415 - in the rank

            arguments = [part for each in overrides for part in ("--set", each)]
            train_main(["train", "--config", str(self.config), *arguments])
        return pid

    def _watch(self, pids: list[int], deadline: float) -> Life:
        looked_at = {0, 1, len(pids) // 2, len(pids) - 1} & set(range(len(pids)))
        private, free, rounds = 0.0, math.inf, 0
        codes: dict[int, int] = {}
        while len(codes) < len(pids):
            if rounds % 20 == 0:
                private = max([private, *(own_memory(pids[number]) for number in looked_at)])
                free = min(free, free_memory())
                if free < LEAST_MEMORY:
                    raise DoesNotFitError(f"{free:.1f} GiB of memory were left of the machine's")
            if time.monotonic() > deadline:
                raise DoesNotFitError(f"it was not done in time: {len(codes)} of {len(pids)} ranks had ended")
            for pid in pids:
                if pid not in codes:
                    with contextlib.suppress(ChildProcessError):
                        done, status = os.waitpid(pid, os.WNOHANG)
                        if done:
                            codes[pid] = os.waitstatus_to_exitcode(status)
            rounds += 1
            time.sleep(0.02)
        return Life([codes[pid] for pid in pids], private, free, {}, {})


def own_memory(pid: int) -> float:
    """Memory that a process shares with no other, MiB; 0 when it has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0.0
    return sum(int(kib) for kib in re.findall(r"Private_\w+:\s+(\d+) kB", text)) / 1024


def free_memory() -> float:
    """What the machine has left, GiB."""
    found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    return int(found[1]) / 2**20 if found else math.inf


def descriptors_of(rank: int, ranks: int, *, sharded: bool) -> int:
    """What rank 0, or the one in the middle, opens under an agent on a CPU beside its standard streams and its log.

    Always: the store, the data, and five for each of two groups over gloo, four when state is sharded (listener, epoll,
    pipes). Three snapshots where it keeps some, two of another node's when sharded; rank 0 its records. Connections:
    two trees and a ring. Gathers climb a tree in which the middle rank is the top of a half: its parent and its
    children are together as many as there are levels. Gloo sends down another, in which it is a leaf. So only rank 0,
    the root of both, has two a level, and one neighbour in the ring besides; the middle rank has three besides.
    """
    levels = math.ceil(math.log2(max(2, ranks)))
    own = 20 if sharded else 12
    snapshots = 3 * (sharded or rank % ON_A_NODE == 0) + 2 * (sharded and ranks > ON_A_NODE)
    return own + snapshots + (1 + 2 * levels + 1 if rank == 0 else levels + 3)


def try_world(folder: Path, ranks: int, *, sharded: bool) -> Finding:
    """Train, save, kill, resume, resize. DoesNotFitError; RuntimeError when ranks end otherwise than they should."""
    began = time.monotonic()
    finding = Finding(ranks, sharded)
    whole = World(folder / "whole", ranks, sharded=sharded)
    first = whole.live()
    _expect(whole, first, {0})
    struck = World(folder / "struck", ranks, sharded=sharded)
    _expect(struck, struck.live(kill_at=KILLED_AT), None)
    again = struck.live()
    _expect(struck, again, {0})
    finding.same_curve = whole.losses() == struck.losses() and len(whole.losses()) == STEPS
    log = (struck.folder / "log-0").read_text()
    finding.resumed = (re.findall(r"step \d+ from \w+", log) or [""])[-1]
    finding.resized_to = ranks // 2
    kept = struck.losses()
    resized = struck.live(f"steps={RESIZED}", ranks=ranks // 2)
    _expect(struck, resized, {0})
    after = struck.losses()
    finding.resize_kept = {step: after.get(step) for step in kept} == kept and len(after) == RESIZED
    finding.private = max(life.private for life in (first, again, resized))
    finding.free = min(life.free for life in (first, again, resized))
    finding.store_bytes = first.store["up"] + first.store["down"]
    finding.store_requests = first.store["turns"]
    _hold_against(finding, whole, first)
    finding.seconds = time.monotonic() - began
    return finding


def _expect(world: World, life: Life, codes: set[int] | None) -> None:
    """`codes`: what ranks may end with; None: at least one was killed."""
    found = set(life.codes)
    if (codes is None and -signal.SIGKILL not in found) or (codes is not None and found != codes):
        bad = next((rank for rank, code in enumerate(life.codes) if code not in (codes or {0})), 0)
        text = (world.folder / f"log-{bad}").read_text()[-2000:]
        raise RuntimeError(f"the ranks of {world.folder.name} ended with {sorted(map(str, found))}: {text}")


def _hold_against(finding: Finding, world: World, life: Life) -> None:
    """The simulation of the same world."""
    from benchmarks.scale.models import tiny_scheme, tiny_shapes  # noqa: PLC0415 - torch
    from benchmarks.scale.saving import files_of, hand_up, tables_of, words_of  # noqa: PLC0415
    from benchmarks.scale.talk import Rounds, climb  # noqa: PLC0415
    from trainium_trainer.checkpoint.memory.claims import ShardKey  # noqa: PLC0415
    from trainium_trainer.checkpoint.resume.agreement import RankView  # noqa: PLC0415
    from trainium_trainer.checkpoint.resume.first_rank import Council, Offer  # noqa: PLC0415
    from trainium_trainer.checkpoint.root.survey import Survey  # noqa: PLC0415
    from trainium_trainer.checkpoint.storage.posix import PosixStorage  # noqa: PLC0415

    ranks = finding.ranks
    scheme = tiny_scheme(tiny_shapes(MODEL), ranks, sharded=finding.sharded)
    files = files_of(scheme)
    checkpoint = world.checkpoint()
    label = f"{checkpoint.parent.name}/{checkpoint.name}"
    keys = [ShardKey(0, 1, *((rank, ranks) if finding.sharded else (0, 1))) for rank in range(ranks)]
    stores = [os.urandom(16).hex() for _ in range(ranks)]
    views = [RankView(rank, stores[rank // ON_A_NODE], keys[rank], "a" * 32) for rank in range(ranks)]
    writes = range(ranks) if finding.sharded else range(0, ranks, ON_A_NODE)
    with tempfile.TemporaryDirectory() as folder:
        storage = PosixStorage(Path(folder))
        written = hand_up(scheme, files, storage, label)
        entries = tables_of(scheme, written, storage, label)
    costs = {"layout": climb(words_of(scheme)), label: written}
    council, rounds = Council("root"), Rounds()
    council.take_survey(Survey())
    rounds.deal(views, council.meet, WHO)
    rounds.deal([Offer(keeps=True if rank in writes else None) for rank in range(ranks)], council.hear_offers, WHAT)
    for number, about in enumerate((WHO, WHAT)):
        up, down = rounds.climbs[number], rounds.descents[number]
        (first,) = [each for each in life.heard["0"] if each["about"] == about][-1:]
        (middle,) = [each for each in life.heard["middle"] if each["about"] == about][-1:]
        finding.compare(f"{about}: bytes to rank 0", up.first, first["received"])
        finding.compare(f"{about}: answers of rank 0", down.first, first["down"])
        finding.compare(f"{about}: bytes of the middle rank", up.middle, middle["received"] + middle["sent"])
        finding.compare(f"{about}: answers through the middle rank", down.middle, middle["down"])
    for about, cost in costs.items():
        name = "plan" if about == "layout" else "commit"
        (first,) = [each for each in life.heard["0"] if each["about"] == about][-1:]
        (middle,) = [each for each in life.heard["middle"] if each["about"] == about][-1:]
        finding.compare(f"{name}: bytes to rank 0", cost.first, first["received"])
        finding.compare(f"{name}: messages to rank 0", cost.messages, first["messages"])
        finding.compare(f"{name}: bytes of the middle rank", cost.middle, middle["received"] + middle["sent"])
    names = [path.name for path in checkpoint.iterdir()]
    finding.compare("files of a checkpoint", len(entries) + 1, len(names))
    finding.compare(
        "bytes of all files but the manifest",
        sum(entry.size for entry in entries),
        sum(path.stat().st_size for path in checkpoint.iterdir() if path.name != "manifest.json"),
    )
    for name, rank, words in (("0", 0, "rank 0"), ("middle", ranks // 2, "the middle rank")):
        held = life.heard[name][-1]["files"]
        finding.compare(f"descriptors of {words}", descriptors_of(rank, ranks, sharded=finding.sharded), held)


def main() -> int:
    """One world."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", type=int)
    parser.add_argument("--sharded", action="store_true", help="FullySharded instead of Replicated")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.ranks < ON_A_NODE or options.ranks % ON_A_NODE:
        parser.error(f"a world has a multiple of {ON_A_NODE} ranks")
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch, as the agent does: a fork does not have its parent's threads
    from trainium_trainer.warm import warm  # noqa: PLC0415 - imports torch, once for all ranks

    warm()
    gc.collect()
    gc.freeze()  # a collection in a rank would copy the pages that it shares
    with tempfile.TemporaryDirectory(prefix="trainium-world-") as folder:
        try:
            finding = try_world(Path(folder), options.ranks, sharded=options.sharded)
        except DoesNotFitError as error:
            print(f"{options.ranks} ranks do not fit: {error}", file=sys.stderr)
            return 2
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(finding.to_json(), indent=1) + "\n")
    for row in finding.rows:
        print(f"{row['name']:45} {row['simulated']:10.0f} {row['real']:10.0f} {'' if row['met'] else 'off'}")
    print({name: value for name, value in finding.to_json().items() if name != "rows"})
    return 0 if finding.good else 1


if __name__ == "__main__":
    sys.exit(main())
