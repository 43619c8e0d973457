from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.testing.trainer import base_models

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture(scope="session")
def save_base() -> Callable[..., Any]:
    """Save a Llama of random weights into a folder: `save_base(folder, dtype=torch.bfloat16, num_hidden_layers=3)`."""
    return base_models.save_base
