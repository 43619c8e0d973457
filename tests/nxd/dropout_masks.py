"""Compare the dropout masks of torch_xla's lazy device and of the CPU, and look for 64-bit arithmetic.

The program prints one JSON object.
"""

import json

import torch
import torch_xla

from trainium_trainer.models.dropout import apply_dropout, compute_sample_keys

device = torch_xla.device()
values = torch.randn(7, 3, 33)
same, has_int64 = [], []
for number in range(4):
    options = {
        "module": (-1) ** number * 123_456_789,
        "drop_probability": 0.3,
        "first_feature": 4096 * number,
        "sequence_dimension": number % 2,
    }
    keys = compute_sample_keys(torch.arange(values.shape[1 - options["sequence_dimension"]]) + number, seed=number)
    on_device = apply_dropout(values.to(device), keys.to(device), **options)
    has_int64.append("s64" in torch_xla._XLAC._get_xla_tensors_hlo([on_device]))
    same.append(torch.equal(on_device.cpu(), apply_dropout(values, keys, **options)))
print(json.dumps({"same": same, "hasInt64": has_int64}))  # noqa: T201 - the answer
