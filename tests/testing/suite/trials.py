"""Number of examples of the property tests: a fixed few with all tests, many random ones with `make test-long`.

`TRAINIUM_TRIALS=20` is that many times as many, and random.
"""

import os

TRIALS = int(os.environ.get("TRAINIUM_TRIALS", "0"))
"""0: the fixed few."""


def trials(count: int) -> int:
    """Return this number of examples, multiplied by TRIALS."""
    return count * max(1, TRIALS)
