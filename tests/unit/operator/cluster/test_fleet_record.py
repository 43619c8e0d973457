"""The memory of bad machines as a ConfigMap."""

import string
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.testing.fuzz.objects import MACHINE
from tests.testing.suite.any_json import ANYTHING, SLOW_ALLOWED, as_json, mutated_values
from trainium_contract.faults.causes import Cause
from trainium_operator.cluster.fleet.fleet_record import ACCOUNTED, decode, encode
from trainium_operator.plan.fleet.memory import Machine, MachineState, Memory, Strike

AT = 1_800_000_000.0
ENTRY = Machine(
    machine="aws:///us-west-2a/i-0abc",
    node="ip-10-0-0-1",
    state=MachineState.QUARANTINED,
    until=AT + 3600,
    quarantines=1,
    strikes=(Strike(AT, Cause.DEVICE, "team/llama"), Strike(AT + 700, Cause.NODE_LOST, "team/other one")),
    judged=AT + 700,
    reported=True,
)


def test_an_entry_is_readable_yaml() -> None:
    data = encode(Memory(machines={ENTRY.machine: ENTRY}, accounted={"uid-1": AT + 0.8574047}))
    assert data["aws.us-west-2a.i-0abc"].splitlines() == [
        "machine: aws:///us-west-2a/i-0abc",
        "node: ip-10-0-0-1",
        "state: Quarantined",
        "until: '2027-01-15T09:00:00Z'",
        "quarantines: 1",
        "strikes:",
        "- 2027-01-15T08:00:00Z Device team/llama",
        "- 2027-01-15T08:11:40Z NodeLost team/other one",
        "judged: '2027-01-15T08:11:40Z'",
        "reported: true",
    ]
    accounted = yaml.safe_load(data["accounted"])
    assert accounted == {"uid-1": AT + 0.8574047}, "rounded down, a machine that was released would be blamed again"


def test_a_memory_round_trips() -> None:
    memory = Memory(machines={ENTRY.machine: ENTRY}, accounted={"uid-1": AT})
    assert decode(encode(memory)) == memory
    assert decode(encode(Memory())) == Memory()


def test_machines_with_colliding_keys_keep_separate_entries() -> None:
    machines = {name: Machine(machine=name, node="n") for name in ("aws:///i-1", "aws/i-1", "aws.i-1", "about")}
    assert decode(encode(Memory(machines=machines))).machines == machines


def test_a_hand_written_entry_may_be_short() -> None:
    memory = decode({"node-3": "state: Permanent\n"})
    assert memory.machines == {"node-3": Machine(machine="node-3", node="", state=MachineState.PERMANENT)}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "- 1",
        "state: Jailed",
        "state: Quarantined",
        "state: Quarantined\nuntil: soon",
        "strikes: [x]",
        "strikes: 7",
        "quarantines: many",
        "strikes: ['yesterday Device x']",
        "strikes: ['2027-01-15T08:00:00Z Bad x']",
        "!!python/object/apply:os.system [true]",
        f"machine: {'m' * 254}",
        f"node: {'n' * 254}",
    ],
)
def test_an_entry_that_cannot_be_read_is_left_out_with_a_warning(text: str, caplog: pytest.LogCaptureFixture) -> None:
    good = encode(Memory(machines={ENTRY.machine: ENTRY}))
    assert decode({**good, "bad": text}).machines == {ENTRY.machine: ENTRY}
    assert "entry bad" in caplog.text


def test_a_time_without_quotes_is_a_time() -> None:
    memory = decode({"n": "state: Quarantined\nuntil: 2027-01-15T09:00:00Z\n"})
    assert memory.machines["n"].until == AT + 3600


NAMES = st.text(string.ascii_letters + string.digits + ":/-. é", min_size=1, max_size=12)
STRIKES = st.builds(Strike, st.integers(0, 4_000_000_000).map(float), st.sampled_from(Cause), st.just("team/llama"))
MACHINES = st.builds(
    lambda name, state, strikes: Machine(
        machine=name, node=name, state=state, until=None if state in ("Permanent", "Watched") else AT, strikes=strikes
    ),
    NAMES,
    st.sampled_from(MachineState),
    st.lists(STRIKES, max_size=3).map(tuple),
)


@given(st.lists(MACHINES, max_size=4))
def test_any_memory_round_trips(entries: list[Machine]) -> None:
    memory = Memory(machines={entry.machine: entry for entry in entries})
    assert decode(encode(memory)) == memory


@SLOW_ALLOWED
@given(
    st.dictionaries(
        st.sampled_from(["node-1", "aws.us-west-2a.i-0abc", ACCOUNTED]), mutated_values(MACHINE) | ANYTHING
    ),
    st.dictionaries(st.sampled_from(["about", ACCOUNTED, "a", "b"]), st.text() | st.text("{}[]:-'\"!&*?|> \nax0")),
)
def test_any_config_map_is_read_and_rewritten_stably(notes: dict[str, Any], texts: dict[str, str]) -> None:
    written = encode(decode({**{key: yaml.safe_dump(as_json(note)) for key, note in notes.items()}, **texts}))
    assert encode(decode(written)) == written


def test_infinite_and_nan_numbers_are_left_out() -> None:
    memory = decode({"node": "quarantines: .inf", ACCOUNTED: "uid: .nan", "node-3": "state: Permanent\n"})
    assert set(memory.machines) == {"node-3"}
    assert memory.accounted == {}


@pytest.mark.parametrize(
    "text",
    ["a: &x [1]\nb: *x", "[" * 5000, "- " * 5000, f"strikes: [{'a, ' * 20_000}]"],
    ids=["an alias", "nested", "nested in blocks", "too many values"],
)
def test_an_expensive_entry_is_left_out_alone(text: str, caplog: pytest.LogCaptureFixture) -> None:
    kept = encode(Memory(machines={"good": Machine(machine="good", node="n", state=MachineState.PERMANENT)}))
    decoded = decode({**kept, "bad": text})
    assert list(decoded.machines) == ["good"]
    assert caplog.text.count("entry bad of the fleet's memory cannot be read") == 1
