"""Read the pulse of a process that works, waits and stalls, as the agent does."""

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from trainium_trainer.monitor.progress import ProgressWriter
from trainium_worker.progress_record import read_with_pulse
from trainium_worker.pulse import PULSE_BYTES, RING_STEPS, Activity, Pulse, PulseReading, Waiting, unpack_pulse


def read_pulse(path: Path) -> PulseReading:
    return read_with_pulse(path).pulse


def test_every_change_of_activity_is_a_sign_of_life(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "r0")
    readings = [read_pulse(tmp_path / "r0")]
    assert (readings[0].activity, readings[0].waiting) == (Activity.INIT, Waiting.NO)
    writer.pulse.enter(Activity.LOAD)
    readings.append(read_pulse(tmp_path / "r0"))
    writer.record_resume(0, tokens=0, samples=0)
    readings.append(read_pulse(tmp_path / "r0"))
    assert readings[-1].activity is Activity.COMPILE
    with writer.pulse.waiting_for_peers:
        readings.append(read_pulse(tmp_path / "r0"))
        assert readings[-1].waiting is Waiting.YES
    with writer.pulse.work_with_collectives:
        readings.append(read_pulse(tmp_path / "r0"))
        assert readings[-1].waiting is Waiting.MAYBE
    with writer.pulse.saving():
        readings.append(read_pulse(tmp_path / "r0"))
        assert readings[-1].activity is Activity.SAVE
    assert read_pulse(tmp_path / "r0").activity is Activity.COMPILE, "the first step has not ended"
    beats = [reading.beats for reading in readings]
    assert beats == sorted(set(beats))
    writer.close()


def test_the_first_step_is_recorded_separately_and_work_excludes_the_wait(tmp_path: Path) -> None:
    writer = ProgressWriter(tmp_path / "r0")
    pulse = writer.pulse
    pulse.begin_steps()
    pulse.complete_step(90.0)
    with pulse.waiting_for_peers:
        pass
    pulse.complete_step(2.0)
    reading = read_pulse(tmp_path / "r0")
    assert reading.first_step_seconds == 90.0
    ((length, work),) = reading.steps
    assert length == 2.0
    assert 1.9 < work < 2.0
    assert reading.activity is Activity.STEP
    writer.close()
    restarted = ProgressWriter(tmp_path / "r0", attempt=1)
    assert read_pulse(tmp_path / "r0").steps == reading.steps, "step times of the job survive a restart in place"
    assert read_pulse(tmp_path / "r0").first_step_seconds == 0
    restarted.close()


@given(st.lists(st.floats(0.001, 1e4), max_size=3 * RING_STEPS))
def test_the_ring_keeps_the_newest_steps_in_order(lengths: list[float]) -> None:
    memory = bytearray(PULSE_BYTES)
    pulse = Pulse(memoryview(memory))
    pulse.begin_steps()
    for length in [1.0, *lengths]:
        pulse.complete_step(length)
    reading = unpack_pulse(bytes(memory))
    assert [length for length, _ in reading.steps] == lengths[-RING_STEPS:]
    pulse.close()


@given(st.binary(min_size=PULSE_BYTES, max_size=PULSE_BYTES))
def test_any_bytes_are_read_without_an_error(data: bytes) -> None:
    reading = unpack_pulse(data)
    assert reading is None or all(min(pair) >= 0 for pair in reading.steps)


def test_a_validation_is_no_part_of_a_step_and_the_first_one_compiles() -> None:
    pulse = Pulse()
    pulse.begin_steps()
    pulse.complete_step(1.0)
    activities = []
    for _ in range(2):
        with pulse.waiting_for_peers:
            pass
        waited = pulse._waited_seconds
        with pulse.validating():
            activities.append(pulse.read().activity)
            pulse._waited_seconds += 100.0
        assert pulse._waited_seconds == waited
        assert pulse.read().activity is Activity.STEP
    assert activities == [Activity.COMPILE, Activity.STEP]
