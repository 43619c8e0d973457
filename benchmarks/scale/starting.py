"""A start: what ranks tell each other of where the state is, and the decision where to resume.

Simulated: the ranks. One process makes what each of them would say of a world of nodes whose state is sharded, with
three snapshots of each shard and two copies on a buddy's node. Real: the messages, their packing, the decisions.
"""

from __future__ import annotations

import hashlib
import pickle
from typing import TYPE_CHECKING, Any

from benchmarks.scale.book import MIBIBYTE, Book, measured
from benchmarks.scale.talk import Rounds
from trainium_contract.wire.checkpoint_manifest import Manifest, ManifestFile
from trainium_trainer.checkpoint.collectives import pack, part, uncollected, unpack
from trainium_trainer.checkpoint.interfaces import Position
from trainium_trainer.checkpoint.memory.claims import Claim, Moment, ShardKey
from trainium_trainer.checkpoint.resume.agreement import RankView, spoken_for
from trainium_trainer.checkpoint.resume.buddy_pairing import Room, duties_of, promises_of
from trainium_trainer.checkpoint.resume.first_rank import Check, Council, Done, Load, Offer, RankReport
from trainium_trainer.checkpoint.root.survey import Committed, Survey

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.scale.models import Model

SECTION = "Agreement: where to resume"
TALK = "a start from memory, buddies found: received and sent"
OWN, COPIES = 3, 2


def snapshot(key: ShardKey, step: int) -> Claim:
    """What a header says."""
    moment = Moment(Position(step, 1024 * step, 4_194_304 * step, loss=2.5, grad_norm=0.25), 3, "0123456789ab")
    return Claim(moment, key, "a" * 32, hashlib.sha256(f"{key} {step}".encode()).hexdigest()[:32])


def fleet(ranks: int, tensor: int, on_a_node: int, own: int = OWN, copies: int = COPIES) -> list[RankView]:
    """Every rank and all that its node holds."""
    keys = [ShardKey(rank % tensor, tensor, rank // tensor, ranks // tensor) for rank in range(ranks)]
    nodes = max(1, ranks // on_a_node)
    here = ranks // nodes
    views: list[RankView] = []
    for node in range(nodes):
        mine = range(here * node, here * (node + 1))
        buddy = (node + nodes // 2) % nodes
        claims = [snapshot(keys[rank], 1000 + step) for rank in mine for step in range(own)]
        if buddy != node:
            theirs = range(here * buddy, here * (buddy + 1))
            claims += [snapshot(keys[rank], 1000 + step) for rank in theirs for step in range(own - copies, own)]
        store = hashlib.sha256(str(node).encode()).hexdigest()[:32]
        views += [RankView(rank, store, keys[rank], "a" * 32, frozenset(claims)) for rank in mine]
    return views


def newest(ranks: int, tensor: int) -> Committed:
    """The newest checkpoint: one file of each rank, the index, and tables of 48 ranks each."""

    def digest(*of: object) -> str:
        return hashlib.sha256(str(of).encode()).hexdigest()

    names = [f"shard-{rank:05}.safetensors" for rank in range(ranks)]
    names += ["index.json", *(f"blocks-{rank:05}.json" for rank in range(0, ranks, 48))]
    manifest = Manifest(
        step=5, samples=5120, tokens=5 * 4_194_304, generation=3, world_size=ranks, data_parallel=ranks // tensor,
        tensor_parallel=tensor, config_digest=digest(0), created=0.0,
        files=tuple(ManifestFile(name=name, size=26_400_000, digest=digest(name)) for name in names),
    )  # fmt: skip
    return Committed(5, "step-5/g3-0123456789ab", manifest).for_readers()


def measure(book: Book, model: Model, ranks: int) -> None:
    """A start from memory: rounds up to the first rank and down again, its decisions, and what storage adds."""
    on_a_node = min(ranks, model.on_a_node)
    views = fleet(ranks, model.tensor, on_a_node)
    places = [RankView(view.rank, view.store, view.needs, view.layout) for view in views]
    offers = offers_of(Council("root").meet(places), views)
    rounds = Rounds()

    def start(deal: Callable[..., Any]) -> Council:
        council = Council("root")
        council.take_survey(Survey([newest(ranks, model.tensor)]))
        deal(places, council.meet, "resume: who is where")
        orders = deal(offers, council.hear_offers, "resume: what is there")
        assert all(isinstance(order, Check) for order in orders)
        ends = deal([RankReport() for _ in views], council.hear, "resume: how it went")
        assert isinstance(ends[0], Done)
        return council

    council = start(rounds.deal)
    wanted = council.wanted
    if wanted:
        sizes = [26_400_000] * ranks
        duties = rounds.deal(sizes, lambda said: duties_of(wanted, council.views, said), "resume: copies")
        rooms = [
            Room(frozenset(duty.number for duty in mine if duty.guard.target == rank), ())
            for rank, mine in enumerate(duties)
        ]
        rounds.deal(rooms, lambda said: promises_of(wanted, council.views, said), "resume: room for copies")
    section = f"{SECTION} ({model.name})"
    book.add(section, TALK, "rank 0", "MiB", ranks, rounds.first / MIBIBYTE, budget=1.0)
    book.add(section, TALK, "a middle rank", "MiB", ranks, rounds.middle / MIBIBYTE, budget=1.0)
    book.add(section, "the same: received", "every other rank", "MiB", ranks, rounds.leaf / MIBIBYTE)
    book.add(section, "the same: all bytes", "the job", "MiB", ranks, rounds.total / MIBIBYTE)
    checkpoint = len(part("value", [Load(newest(ranks, model.tensor).for_readers())])) / MIBIBYTE
    book.add(section, "received besides in a start from storage", "every rank", "MiB", ranks, checkpoint, budget=1.0)
    packed = iter([b""])

    def as_first(_said: list[Any], decide: Callable[..., list[Any]], _: str) -> list[Any]:
        told = unpack(next(packed))
        with uncollected():  # as `deal` does
            answers = decide([pickle.loads(pickle.loads(each)[1])[1] for each in told])
            part("value", answers)
        return answers

    for _ in range(3):
        packed = iter([pack(words) for words in rounds.said[:3]])
        _, seconds, peak = measured(lambda: start(as_first))
        book.add(section, "read what was said, decide, answer", "rank 0", "s", ranks, seconds, budget=1.0)
        book.add(section, "the same", "rank 0", "MiB peak", ranks, peak)


def offers_of(near: Sequence[Sequence[RankView]], views: Sequence[RankView]) -> list[Offer]:
    """What the ranks say of their stores."""
    return [Offer(spoken_for(mine, view.rank, view.claims), keeps=True) for mine, view in zip(near, views, strict=True)]
