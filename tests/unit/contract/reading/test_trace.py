"""Traces of torch.profiler: summaries, merged traces, and malformed files."""

import gzip
import json
import zlib
from typing import Any

import pytest

from trainium_contract.views.trace import (
    SpanTotal,
    Trace,
    format_summaries,
    merge_traces,
    parse_trace,
    summarize_trace,
)


def span(name: str, start: float, length: float, *, thread: int = 1, category: str = "cpu_op") -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": name, "pid": 7, "tid": thread, "ts": start, "dur": length}


def part(name: str, start: float, length: float) -> dict[str, Any]:
    return span(name, start, length, category="user_annotation")


EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 0, "args": {"name": "python"}},
    part("step 4", 0, 1000),
    part("wait for data", 0, 100),
    part("forward and backward", 100, 700),
    span("aten::mm", 150, 300),
    span("aten::linear", 500, 200),
    span("aten::mm", 550, 100),
    span("gloo:all_reduce", 200, 400, thread=2, category="user_annotation"),
    part("step 5", 1000, 2000),
    span("aten::mm", 1500, 500),
    {"ph": "s", "id": 3, "name": "fwdbwd", "cat": "fwdbwd", "pid": 7, "tid": 1, "ts": 150},
    span("PyTorch Profiler (0)", 0, 3000, category="Trace") | {"pid": "Spans", "tid": "PyTorch Profiler"},
]


def trace(rank: int = 0, events: list[dict[str, Any]] = EVENTS, **content: Any) -> Trace:
    return parse_trace(json.dumps({"trainium": {"rank": rank}, "traceEvents": events, **content}).encode())


def test_a_span_counts_without_the_spans_inside_it_on_each_thread() -> None:
    summary = summarize_trace(trace(3))
    assert (summary.rank, summary.first, summary.last, summary.steps) == (3, 4, 5, 2)
    assert summary.step_seconds == pytest.approx(1500e-6)
    assert {span.name: (span.calls, round(span.seconds * 1e6)) for span in summary.spans} == {
        "step, outside its parts": (2, 200 + 1500),
        "aten::mm": (3, 900),
        "gloo:all_reduce": (1, 400),
        "forward and backward, outside operators": (1, 200),
        "aten::linear": (1, 100),
        "wait for data, outside operators": (1, 100),
    }
    assert [span.name for span in summary.spans][:2] == ["step, outside its parts", "aten::mm"]
    assert summary.parts == (SpanTotal("wait for data", 1, 100e-6), SpanTotal("forward and backward", 1, 700e-6))
    on_one_thread = sum(span.seconds for span in summary.spans if span.name != "gloo:all_reduce")
    assert on_one_thread == pytest.approx(3000e-6), "nothing is counted twice"


def test_steps_of_another_program_are_found_by_profilerstep_spans() -> None:
    summary = summarize_trace(parse_trace(json.dumps({"traceEvents": [span("ProfilerStep#8", 0, 10)]}).encode()))
    assert (summary.first, summary.last) == (8, 8)
    without = summarize_trace(parse_trace(json.dumps({"traceEvents": [span("aten::mm", 5, 10)]}).encode()))
    assert (without.first, without.steps, without.spans) == (0, 1, (SpanTotal("aten::mm", 1, 10e-6),))
    assert without.step_seconds == pytest.approx(10e-6)


def test_two_ranks_are_two_processes_of_one_trace_on_one_clock() -> None:
    later = [event | {"ts": event["ts"] - 5000} for event in EVENTS]
    traces = [trace(2, baseTimeNanoseconds=1_000_000_000), trace(0, later, baseTimeNanoseconds=1_005_000_000)]
    merged = json.loads(gzip.decompress(merge_traces(traces)))
    events = merged["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 2: python", "rank 0: python"]
    first, second = (
        {event["pid"]: event["ts"] for event in events if event.get("name") == name} for name in ("step 4", "step 5")
    )
    assert list(first.values()) == [0.0, 0.0]
    assert list(second.values()) == [1000.0, 1000.0]
    assert len(first) == 2
    assert [event["id"] for event in events if event["ph"] == "s"] == ["2.3", "0.3"]
    assert all(isinstance(event["pid"], int) for event in events)


def test_the_lines_compare_two_ranks_and_give_the_share_of_one() -> None:
    thrice = [event | {name: 3 * event[name] for name in ("dur", "ts") if event["ph"] == "X"} for event in EVENTS]
    slow = summarize_trace(trace(2, thrice))
    lines = list(format_summaries([slow, summarize_trace(trace(0))]))
    assert lines[:2] == ["rank 2: steps 4 to 5, 4.5 ms each", "rank 0: steps 4 to 5, 1.5 ms each"]
    lines = [" ".join(line.split()) for line in lines]
    assert lines[3] == "MILLISECONDS OF A STEP, BY PART CALLS RANK 2 RANK 0 DIFFERENCE"
    assert lines[5] == "forward and backward 0 1.05 0.35 +0.70"
    assert lines[7].endswith(" RANK 2 RANK 0 DIFFERENCE")
    assert lines[9] == "aten::mm 2 1.35 0.45 +0.90"
    (alone,) = [line for line in format_summaries([summarize_trace(trace(0))]) if line.startswith("aten::mm")]
    assert alone.split() == ["aten::mm", "2", "0.45", "30.0", "%"]


def test_control_characters_are_removed_and_malformed_events_left_out() -> None:
    events: list[Any] = [
        span("a\x1b[2Jb\x07", 0, 10), {"ph": "X"}, 3, None, span("x", 0, 1) | {"ts": "now"}, {"ph": "M", "pid": 1},
        span("y", 0, 1) | {"dur": float("inf")},
    ]  # fmt: skip
    malformed = trace(0, events)
    assert [span.name for span in summarize_trace(malformed).spans] == ["ab"]
    assert json.loads(gzip.decompress(merge_traces([malformed])))["traceEvents"]


def test_a_malformed_trace_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = gzip.compress(json.dumps({"traceEvents": EVENTS}).encode())
    for data, reason in (
        (b"{", "not JSON"),
        (b"[]", "no traceEvents"),
        (b'{"traceEvents": []}', "no traceEvents"),
        (compressed[:-20], "cut off"),
        (b"\x1f\x8b" + bytes(20), "damaged"),
        (b"[" * 100_000, "not JSON"),
    ):
        with pytest.raises(ValueError, match=reason):
            parse_trace(data)
    monkeypatch.setattr("trainium_contract.views.trace._MAX_BYTES", 100)
    assert zlib.decompress(compressed, wbits=31)
    with pytest.raises(ValueError, match="more than 0 MiB"):
        parse_trace(compressed)
