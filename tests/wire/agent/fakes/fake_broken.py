"""A user's program that cannot be imported."""

import no_such_module  # noqa: F401
