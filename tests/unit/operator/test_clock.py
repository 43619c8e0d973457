"""The steady clock of the operator hides jumps of the wall clock and converges to it."""

from trainium_operator.clock import SteadyClock


class Machine:
    """A machine's two clocks."""

    def __init__(self) -> None:
        self.wall = 1.7e9
        self.monotonic = 50.0
        self.clock = SteadyClock(lambda: self.wall, lambda: self.monotonic)

    def advance(self, seconds: float) -> float:
        """Advance both clocks and return the seconds that the steady clock counts."""
        before = self.clock()
        self.wall += seconds
        self.monotonic += seconds
        return self.clock() - before


def test_the_steady_clock_follows_the_wall_clock() -> None:
    machine = Machine()
    assert machine.clock() == 1.7e9
    assert abs(machine.advance(3600) - 3600) < 1e-6
    assert abs(machine.clock() - machine.wall) < 1e-6


def test_a_jump_of_the_wall_clock_is_hidden() -> None:
    for jump in (3600.0, -3600.0):
        machine = Machine()
        machine.advance(10)
        machine.wall += jump
        assert abs(machine.advance(0)) < 1e-6
        for _ in range(100):
            assert abs(machine.advance(1.0) - 1.0) <= 0.02 + 1e-6


def test_the_steady_clock_converges_to_a_corrected_clock() -> None:
    machine = Machine()
    machine.wall += 3600
    machine.advance(50 * 3600 + 60)
    assert abs(machine.clock() - machine.wall) < 1e-3


def test_the_clock_catches_up_slowly_after_a_machine_slept() -> None:
    machine = Machine()
    machine.wall += 600  # the monotonic clock stops during sleep
    assert machine.advance(1.0) <= 1.02 + 1e-6
