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


def test_it_is_the_machines_clock_as_long_as_nobody_sets_that() -> None:
    machine = Machine()
    assert machine.clock() == 1.7e9
    assert abs(machine.advance(3600) - 3600) < 1e-6
    assert abs(machine.clock() - machine.wall) < 1e-6


def test_an_hours_jump_either_way_is_not_seen_and_it_never_goes_back() -> None:
    for jump in (3600.0, -3600.0):
        machine = Machine()
        machine.advance(10)
        machine.wall += jump
        assert abs(machine.advance(0)) < 1e-6
        for _ in range(100):
            assert abs(machine.advance(1.0) - 1.0) <= 0.02 + 1e-6


def test_it_follows_a_clock_that_was_set_right_within_days() -> None:
    machine = Machine()
    machine.wall += 3600
    machine.advance(50 * 3600 + 60)
    assert abs(machine.clock() - machine.wall) < 1e-3


def test_the_clock_catches_up_slowly_after_a_machine_slept() -> None:
    machine = Machine()
    machine.wall += 600  # the monotonic clock stops during sleep
    assert machine.advance(1.0) <= 1.02 + 1e-6
