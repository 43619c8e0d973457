"""Explore the small models: `python -m tests.unit.plan.explorer --depth N`."""

import argparse
import sys

from tests.unit.plan.explorer.models import MODELS
from tests.unit.plan.explorer.search import Explorer
from tests.unit.plan.explorer.transitions import CRASH_POINTS, all_transitions


def main() -> int:
    """Explore each model; return 1 if one has a violation."""
    parser = argparse.ArgumentParser(prog="explorer", description=__doc__)
    parser.add_argument("--depth", type=int, default=3, help="length of the histories (default 3)")
    parser.add_argument("--model", choices=sorted(MODELS), help="one model only")
    parser.add_argument("--no-deaths", action="store_true", help="without crashes of the operator between its writes")
    options = parser.parse_args()
    transitions = all_transitions(() if options.no_deaths else CRASH_POINTS)
    for name in [options.model] if options.model else sorted(MODELS):
        report = Explorer(transitions).run([make() for make in MODELS[name]], options.depth)
        sys.stdout.write(
            f"{name}: {report.states} states, {report.transitions} transitions, depth {report.depth}, "
            f"{report.by_depth}, {report.seconds:.1f} s\n"
        )
        if report.violation is not None:
            sys.stdout.write(f"{report.violation}\n")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
