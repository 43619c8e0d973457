"""Number of examples of property tests: few and fixed in `make test`, many and random in `make test-long`.

`TRAINIUM_TRIALS=20` runs 20 times as many examples, chosen at random.
"""

import os

TRIALS = int(os.environ.get("TRAINIUM_TRIALS", "0"))
"""Factor of the number of examples; 0: fixed examples."""


def trials(count: int) -> int:
    """Return this number of examples, multiplied by TRIALS."""
    return count * max(1, TRIALS)
