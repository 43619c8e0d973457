"""Merge rows of a finished model in several threads at once."""

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from trainium_trainer.artifacts.merged_parameters import MergedParameters
from trainium_trainer.exits import UserError

MODULES = ("q_proj", "k_proj", "v_proj")
SIZE, RANK = 4, 2


class DictParameters:
    """Parameters in a dictionary."""

    def __init__(self, parameters: dict[str, torch.Tensor]) -> None:
        self.parameters = parameters
        self.names = tuple(parameters)

    def find_size(self, name: str) -> torch.Size:
        return self.parameters[name].shape

    def fill(self, name: str, offsets: tuple[int, ...], target: torch.Tensor) -> None:
        target.copy_(self.parameters[name][offsets[0] : offsets[0] + target.shape[0]])


@pytest.fixture
def frequent_thread_switches() -> Iterator[None]:
    """Switch threads as often as the interpreter allows."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-7)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_values_that_the_type_cannot_hold_are_refused(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    beyond = torch.tensor([1.0, largest * 1.003]).view(1, 2)
    for merged, name in ((False, "norm.weight"), (True, "q.weight")):
        trained = {"norm.weight": beyond, "q.lora_A.weight": beyond, "q.lora_B.weight": torch.ones(1, 1)}
        frozen = {"q.weight": torch.zeros(1, 2)}
        result = MergedParameters(DictParameters(trained), DictParameters(frozen), lambda _: 1.0)
        if merged or dtype is torch.float16:
            with pytest.raises(UserError, match=f"{name} has values up to .* {dtype} ends at .*: write bfloat16 or"):
                result.read_rows(name, 0, 1, dtype)
        assert torch.equal(result.read_rows(name, 0, 1, torch.float32), beyond)
    held = DictParameters({"norm.weight": torch.tensor([[largest, float("inf")]])})
    rows = MergedParameters(held, None, lambda _: 1.0).read_rows("norm.weight", 0, 1, dtype)
    assert rows.tolist() == [[largest, float("inf")]], "an infinite value of the base stays"


@pytest.mark.usefixtures("frequent_thread_switches")
def test_threads_that_merge_different_weights_each_take_their_own_adapter() -> None:
    frozen = {f"{name}.weight": torch.zeros(SIZE, SIZE) for name in MODULES}
    trained = {f"{name}.lora_A.weight": torch.full((RANK, SIZE), 1.0 + index) for index, name in enumerate(MODULES)}
    trained |= {f"{name}.lora_B.weight": torch.ones(SIZE, RANK) for name in MODULES}
    result = MergedParameters(DictParameters(trained), DictParameters(frozen), lambda _: 1.0)
    modules = [index for _ in range(2000) for index in range(len(MODULES))]

    def first_value(index: int) -> float:
        return float(result.read_rows(f"{MODULES[index]}.weight", 0, SIZE, torch.float32)[0, 0])

    with ThreadPoolExecutor(3) as pool:
        values = list(pool.map(first_value, modules))

    assert values == [RANK * (1.0 + index) for index in modules]
