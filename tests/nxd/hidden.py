"""Which numbers dropout hides on torch_xla's lazy device and on the CPU: whether they are the same, in 64 bits or less.

Prints one JSON object.
"""

import json

import torch
import torch_xla

from trainium_trainer.models.dropout import dropout, sample_keys

device = torch_xla.device()
values = torch.randn(7, 3, 33)
same, wide = [], []
for number in range(4):
    given = {
        "module": (-1) ** number * 123_456_789,
        "drop_probability": 0.3,
        "first_feature": 4096 * number,
        "sequence_dimension": number % 2,
    }
    keys = sample_keys(torch.arange(values.shape[1 - given["sequence_dimension"]]) + number, seed=number)
    there = dropout(values.to(device), keys.to(device), **given)
    wide.append("s64" in torch_xla._XLAC._get_xla_tensors_hlo([there]))
    same.append(torch.equal(there.cpu(), dropout(values, keys, **given)))
print(json.dumps({"same": same, "wide": wide}))  # noqa: T201 - the answer
