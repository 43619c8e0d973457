"""Numbers into Arrow's columns and out of them, without a copy.

In place of Arrow's own conversions, all of which import pandas where it is installed: half of what a rank would import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def column_of(numbers: NDArray[Any]) -> Any:
    """The Arrow array of some numbers, which must not be changed afterwards."""
    import pyarrow as pa  # noqa: PLC0415 - one of the slower imports

    numbers = np.ascontiguousarray(numbers)
    return pa.Array.from_buffers(pa.from_numpy_dtype(numbers.dtype), len(numbers), [None, pa.py_buffer(numbers)])


def numbers_of(column: Any) -> NDArray[Any]:
    """The numbers of an Arrow array without nulls: read-only, in the array's own memory."""
    return np.from_dlpack(column)
