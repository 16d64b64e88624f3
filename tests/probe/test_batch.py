"""What a model was called with is read the same whether by position or by name."""

from typing import Any

import torch
from torch import Tensor, nn

from wellcond.probe.batch import argument, batch_size, first_samples


class Model(nn.Module):
    def forward(self, x: Tensor, attention_mask: Tensor | None = None, *rest: Any, **more: Any) -> None: ...


def test_the_first_tensor_tells_the_batch() -> None:
    assert batch_size((torch.zeros(5, 3),), {}) == 5
    assert batch_size((), {"flag": True, "x": torch.zeros(7, 2)}) == 7
    assert batch_size(({"images": [torch.zeros(4)]},), {}) == 4
    assert batch_size((torch.tensor(3.0), torch.zeros(6)), {}) == 6
    assert batch_size((), {"flag": True}) == 1


def test_the_first_samples_are_copies() -> None:
    x, mask, scale, table = torch.randn(5, 3), torch.ones(5, 2), torch.tensor(2.0), torch.zeros(9)
    (found_x, found_scale), found = first_samples(((x, scale), {"m": mask, "t": table, "n": None, "s": "text"}), 2)
    assert torch.equal(found_x, x[:2])
    assert torch.equal(found["m"], mask[:2])
    assert torch.equal(found["t"], table)  # not of the batch: whole
    assert (found["n"], found["s"]) == (None, "text")
    for tensor in (found_x, found_scale, found["m"], found["t"]):
        tensor.fill_(-1)
    assert float(x.min()) != -1 or float(x.max()) != -1
    assert (float(scale), float(mask.min()), float(table.max())) == (2.0, 1.0, 0.0)


def test_an_argument_by_position_or_by_name() -> None:
    x, mask = torch.zeros(2, 3), torch.ones(2, 3)
    model = Model()
    assert argument(model, "attention_mask", (x, mask), {}) is mask
    assert argument(model, "attention_mask", (x,), {"attention_mask": mask}) is mask
    assert argument(model, "attention_mask", (), {"x": x, "attention_mask": mask}) is mask
    assert argument(model, "attention_mask", (x,), {}) is None
    assert argument(model, "no_such_thing", (x, mask), {}) is None
