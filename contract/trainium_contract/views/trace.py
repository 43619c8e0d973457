"""Traces of torch.profiler in chrome's format: the largest spans of each rank, and one trace of several ranks.

Guarantees:
- What is unpacked is bounded, and events that are not spans of a known form are left out.
- Names have no control characters.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import mapping, number, objects, text, whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MOST_BYTES = 512 << 20
_STEP = re.compile(r"(?:step |ProfilerStep#)(\d{1,18})")
_IN_STEP = "step, outside its parts"
_OUTSIDE = ", outside operators"
_OTHER_VIEWS = frozenset({"Trace", "gpu_user_annotation", "python_function"})
"""Categories that repeat what other spans show."""
_LONGEST_NAME = 48
_SHOWN = 10


@dataclass(frozen=True, slots=True)
class Trace:
    """The trace of one rank."""

    rank: int
    content: dict[str, Any]
    """Contents of the file."""


@dataclass(frozen=True, slots=True)
class SpanTotal:
    """All spans of one name."""

    name: str
    calls: int
    seconds: float
    """Together; without the spans inside them, unless it is a part of a step."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Spans of one rank."""

    rank: int
    first: int
    """First recorded step; 0 in a trace without steps."""
    last: int
    step_seconds: float
    """Mean length of a recorded step; that of the whole trace where it has no steps."""
    parts: tuple[SpanTotal, ...]
    """Parts of a step as the trainer names them, in their order, with the spans inside them."""
    spans: tuple[SpanTotal, ...]
    """The largest first."""

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return self.last - self.first + 1


def parse_trace(data: bytes) -> Trace:
    """Read a trace, compressed or not. Raises ValueError with the reason."""
    if data[:2] == b"\x1f\x8b":
        unpacker = zlib.decompressobj(wbits=31)
        try:
            data = unpacker.decompress(data, _MOST_BYTES)
        except zlib.error as error:
            raise ValueError(f"it is damaged ({error})") from error
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError(f"it is cut off or has more than {_MOST_BYTES >> 20} MiB")
    try:
        content = json.loads(data.decode(errors="replace"), strict=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or not objects(content, "traceEvents"):
        raise ValueError("it has no traceEvents")
    known = mapping(content, "trainium") or mapping(content, "distributedInfo")
    return Trace(whole(known, "rank"), content)


def summarize_trace(trace: Trace) -> TraceSummary:
    """Add up the spans by name."""
    threads = defaultdict[tuple[str, str], list[tuple[float, float, str]]](list)
    lengths: dict[int, float] = {}
    named: list[tuple[tuple[str, str], float, str]] = []
    for event in objects(trace.content, "traceEvents"):
        start, length, name = number(event, "ts"), number(event, "dur"), text(event, "name")
        if event.get("ph") != "X" or start is None or length is None or text(event, "cat") in _OTHER_VIEWS:
            continue
        thread = str(event.get("pid")), str(event.get("tid"))
        if found := _STEP.fullmatch(name):
            lengths[int(found[1])], name = length, _IN_STEP
        elif text(event, "cat") == "user_annotation":
            named.append((thread, length, name))
        threads[thread].append((start, length, name))
    parts: dict[str, list[float]] = {}
    for thread, length, name in named:
        if any(other == _IN_STEP for _, _, other in threads[thread]):
            parts.setdefault(name, []).append(length)
    seconds, calls = defaultdict[str, float](float), Counter[str]()
    for spans in threads.values():
        _add_own_times(spans, seconds, calls)
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    shown = {name: f"{name}{_OUTSIDE}" for name in parts}
    ends = [(start, start + length) for spans in threads.values() for start, length, _ in spans] or [(0.0, 0.0)]
    whole_trace = max(end for _, end in ends) - min(start for start, _ in ends)
    return TraceSummary(
        rank=trace.rank,
        first=min(lengths, default=0),
        last=max(lengths, default=0),
        step_seconds=(sum(lengths.values()) / len(lengths) if lengths else whole_trace) / 1e6,
        parts=tuple(SpanTotal(name, len(each), sum(each) / 1e6) for name, each in parts.items()),
        spans=tuple(SpanTotal(shown.get(name, name), calls[name], seconds[name] / 1e6) for name in ordered),
    )


def _add_own_times(
    spans: list[tuple[float, float, str]], seconds: defaultdict[str, float], calls: Counter[str]
) -> None:
    """Add the spans of one thread (start, length, name), each without the spans inside it. Times in microseconds."""
    around: list[tuple[float, str]] = []
    for start, length, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1][0] <= start:
            around.pop()
        if around:
            seconds[around[-1][1]] -= length
        seconds[name] += length
        calls[name] += 1
        around.append((start + length, name))


def merge_traces(traces: Sequence[Trace]) -> bytes:
    """Return one compressed trace, in which each rank is a process beside the others, on the wall clock."""
    events: list[dict[str, Any]] = []
    bases = [number(trace.content, "baseTimeNanoseconds") or 0.0 for trace in traces]
    numbers: dict[tuple[int, int], int] = {}
    for trace, base in zip(traces, bases, strict=True):
        for event in objects(trace.content, "traceEvents"):
            pid = event.get("pid")
            if not isinstance(pid, int):
                continue  # marks of the profiler itself
            changed = {**event, "pid": numbers.setdefault((trace.rank, pid), len(numbers) + 1)}
            if "ts" in event:
                changed["ts"] = (number(event, "ts") or 0.0) + (base - bases[0]) / 1000
            if "id" in event:  # arrows of different ranks are different ones
                changed["id"] = f"{trace.rank}.{event['id']}"
            if event.get("ph") == "M" and event.get("name") == "process_name":
                changed["args"] = {"name": f"rank {trace.rank}: {text(mapping(event, 'args'), 'name')}"}
            events.append(changed)
    # The events come first: older versions of Perfetto's trace processor read no events after other keys.
    kept = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": int(bases[0])}
    return gzip.compress(json.dumps(kept).encode(), compresslevel=6)


def span_lines(summaries: Sequence[TraceSummary]) -> Iterator[str]:
    """Format the parts of a step and the largest spans of each rank, with the difference of two or the share of one."""
    for each in summaries:
        where = f"steps {each.first} to {each.last}" if each.last > each.first else f"step {each.first}"
        yield f"rank {each.rank}: {where if each.first else 'a trace'}, {1000 * each.step_seconds:,.1f} ms each"
    last = {1: "SHARE", 2: "DIFFERENCE"}.get(len(summaries), "")
    heads = "".join(f"{f'RANK {each.rank}':>12}" for each in summaries) + f"{last:>12}"
    parts = [each.parts for each in summaries]
    spans = [each.spans for each in summaries]
    largest = sorted((span for each in spans for span in each), key=lambda span: -span.seconds)
    for title, groups, names in (
        ("MILLISECONDS OF A STEP, BY PART", parts, dict.fromkeys(span.name for each in parts for span in each)),
        ("LARGEST SPANS, WITHOUT THOSE INSIDE THEM", spans, dict.fromkeys(span.name for span in largest)),
    ):
        if not names:
            continue
        yield ""
        yield f"{title:<{_LONGEST_NAME}} {'CALLS':>7}{heads}".rstrip()
        for name in list(names)[:_SHOWN]:
            yield _line(name, summaries, [{span.name: span for span in group} for group in groups])


def _line(name: str, summaries: Sequence[TraceSummary], groups: Sequence[Mapping[str, SpanTotal]]) -> str:
    found = [group.get(name, SpanTotal(name, 0, 0.0)) for group in groups]
    times = [1000 * span.seconds / each.steps for span, each in zip(found, summaries, strict=True)]
    end = ""
    if len(found) == 1 and summaries[0].step_seconds:
        end = f"{times[0] / 10 / summaries[0].step_seconds:.1f} %"
    elif len(found) == 2:
        end = f"{times[0] - times[1]:+,.2f}"
    calls = found[0].calls / summaries[0].steps
    cells = "".join(f"{value:>12,.2f}" for value in times)
    return f"{name[:_LONGEST_NAME]:<{_LONGEST_NAME}} {calls:>7,.0f}{cells}{end:>12}".rstrip()
