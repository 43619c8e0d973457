"""Read traces of torch.profiler in Chrome's format: the largest spans of each rank, and one trace of several ranks.

Guarantees:
- Unpacked data are bounded, and events that are not spans of a known form are left out.
- Names have no control characters.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from trainium_contract.views.raw import read_integer, read_mapping, read_number, read_objects, read_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_MAX_BYTES = 512 << 20
_STEP = re.compile(r"(?:step |ProfilerStep#)(\d{1,18})")
_STEP_SPAN = "step, outside its parts"
_OUTSIDE_OPERATORS = ", outside operators"
_REPEATED_CATEGORIES = frozenset({"Trace", "gpu_user_annotation", "python_function"})
"""Categories that repeat other spans."""
_MAX_NAME_LENGTH = 48
_SHOWN_ROWS = 10


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
    """Total, without the spans inside them, except for a part of a step."""


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """Spans of one rank."""

    rank: int
    first: int
    """First recorded step; 0 in a trace without steps."""
    last: int
    step_seconds: float
    """Mean length of a recorded step; of the whole trace if it has no steps."""
    parts: tuple[SpanTotal, ...]
    """Parts of a step as the trainer names them, in order, including the spans inside them."""
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
            data = unpacker.decompress(data, _MAX_BYTES)
        except zlib.error as error:
            raise ValueError(f"it is damaged ({error})") from error
        if unpacker.unconsumed_tail or not unpacker.eof:
            raise ValueError(f"it is cut off or has more than {_MAX_BYTES >> 20} MiB")
    try:
        content = json.loads(data.decode(errors="replace"), strict=False)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(content, dict) or not read_objects(content, "traceEvents"):
        raise ValueError("it has no traceEvents")
    metadata = read_mapping(content, "trainium") or read_mapping(content, "distributedInfo")
    return Trace(read_integer(metadata, "rank"), content)


def summarize_trace(trace: Trace) -> TraceSummary:
    """Add up the spans by name."""
    threads = defaultdict[tuple[str, str], list[tuple[float, float, str]]](list)
    lengths: dict[int, float] = {}
    annotations: list[tuple[tuple[str, str], float, str]] = []
    for event in read_objects(trace.content, "traceEvents"):
        start, length, name = read_number(event, "ts"), read_number(event, "dur"), read_text(event, "name")
        if event.get("ph") != "X" or start is None or length is None or read_text(event, "cat") in _REPEATED_CATEGORIES:
            continue
        thread = str(event.get("pid")), str(event.get("tid"))
        if step := _STEP.fullmatch(name):
            lengths[int(step[1])], name = length, _STEP_SPAN
        elif read_text(event, "cat") == "user_annotation":
            annotations.append((thread, length, name))
        threads[thread].append((start, length, name))
    parts: dict[str, list[float]] = {}
    for thread, length, name in annotations:
        if any(span_name == _STEP_SPAN for _, _, span_name in threads[thread]):
            parts.setdefault(name, []).append(length)
    seconds, calls = defaultdict[str, float](float), Counter[str]()
    for spans in threads.values():
        _add_self_times(spans, seconds, calls)
    ordered = sorted(seconds, key=lambda name: -seconds[name])
    labels = {name: f"{name}{_OUTSIDE_OPERATORS}" for name in parts}
    ends = [(start, start + length) for spans in threads.values() for start, length, _ in spans] or [(0.0, 0.0)]
    whole_trace = max(end for _, end in ends) - min(start for start, _ in ends)
    return TraceSummary(
        rank=trace.rank,
        first=min(lengths, default=0),
        last=max(lengths, default=0),
        step_seconds=(sum(lengths.values()) / len(lengths) if lengths else whole_trace) / 1e6,
        parts=tuple(SpanTotal(name, len(durations), sum(durations) / 1e6) for name, durations in parts.items()),
        spans=tuple(SpanTotal(labels.get(name, name), calls[name], seconds[name] / 1e6) for name in ordered),
    )


def _add_self_times(
    spans: list[tuple[float, float, str]], seconds: defaultdict[str, float], calls: Counter[str]
) -> None:
    """Add the spans of one thread (start, length, name), each without the spans inside it. Times in microseconds."""
    open_spans: list[tuple[float, str]] = []
    """End and name of each enclosing span, the innermost last."""
    for start, length, name in sorted(spans, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        if open_spans:
            seconds[open_spans[-1][1]] -= length
        seconds[name] += length
        calls[name] += 1
        open_spans.append((start + length, name))


def merge_traces(traces: Sequence[Trace]) -> bytes:
    """Return one compressed trace, with each rank as a process, on the wall clock."""
    events: list[dict[str, Any]] = []
    base_times = [read_number(trace.content, "baseTimeNanoseconds") or 0.0 for trace in traces]
    merged_pids: dict[tuple[int, int], int] = {}
    for trace, base_time in zip(traces, base_times, strict=True):
        for event in read_objects(trace.content, "traceEvents"):
            pid = event.get("pid")
            if not isinstance(pid, int):
                continue  # marks of the profiler itself
            changed = {**event, "pid": merged_pids.setdefault((trace.rank, pid), len(merged_pids) + 1)}
            if "ts" in event:
                changed["ts"] = (read_number(event, "ts") or 0.0) + (base_time - base_times[0]) / 1000
            if "id" in event:  # flow arrows of different ranks are separate
                changed["id"] = f"{trace.rank}.{event['id']}"
            if event.get("ph") == "M" and event.get("name") == "process_name":
                changed["args"] = {"name": f"rank {trace.rank}: {read_text(read_mapping(event, 'args'), 'name')}"}
            events.append(changed)
    # The events come first: older versions of Perfetto's trace processor read no events after other keys.
    merged = {"traceEvents": events, "displayTimeUnit": "ms", "baseTimeNanoseconds": int(base_times[0])}
    return gzip.compress(json.dumps(merged).encode(), compresslevel=6)


def format_summaries(summaries: Sequence[TraceSummary]) -> Iterator[str]:
    """Format the parts of a step and the largest spans of each rank.

    Two ranks are shown with their difference, one with shares.
    """
    for summary in summaries:
        first, last = summary.first, summary.last
        steps = f"steps {first} to {last}" if last > first else f"step {first}"
        steps = steps if first else "a trace"
        yield f"rank {summary.rank}: {steps}, {1000 * summary.step_seconds:,.1f} ms each"
    comparison = {1: "SHARE", 2: "DIFFERENCE"}.get(len(summaries), "")
    heads = "".join(f"{f'RANK {summary.rank}':>12}" for summary in summaries) + f"{comparison:>12}"
    parts = [summary.parts for summary in summaries]
    spans = [summary.spans for summary in summaries]
    largest = sorted(chain.from_iterable(spans), key=lambda span: -span.seconds)
    for title, groups, names in (
        ("MILLISECONDS OF A STEP, BY PART", parts, dict.fromkeys(span.name for span in chain.from_iterable(parts))),
        ("LARGEST SPANS, WITHOUT THOSE INSIDE THEM", spans, dict.fromkeys(span.name for span in largest)),
    ):
        if not names:
            continue
        yield ""
        yield f"{title:<{_MAX_NAME_LENGTH}} {'CALLS':>7}{heads}".rstrip()
        for name in list(names)[:_SHOWN_ROWS]:
            yield _format_row(name, summaries, [{span.name: span for span in group} for group in groups])


def _format_row(name: str, summaries: Sequence[TraceSummary], groups: Sequence[Mapping[str, SpanTotal]]) -> str:
    totals = [group.get(name, SpanTotal(name, 0, 0.0)) for group in groups]
    times = [1000 * total.seconds / summary.steps for total, summary in zip(totals, summaries, strict=True)]
    comparison = ""
    if len(totals) == 1 and summaries[0].step_seconds:
        comparison = f"{times[0] / 10 / summaries[0].step_seconds:.1f} %"
    elif len(totals) == 2:
        comparison = f"{times[0] - times[1]:+,.2f}"
    calls = totals[0].calls / summaries[0].steps
    cells = "".join(f"{value:>12,.2f}" for value in times)
    return f"{name[:_MAX_NAME_LENGTH]:<{_MAX_NAME_LENGTH}} {calls:>7,.0f}{cells}{comparison:>12}".rstrip()
