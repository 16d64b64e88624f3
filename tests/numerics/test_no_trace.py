"""Whatever a module writes, buffers, tensors, counters and caches are afterwards what they were, and caches are made
anew."""

import collections
import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from wellcond.numerics.no_trace import no_trace


class Writes(nn.Module):
    """Writes wherever a module can."""

    count: Tensor
    ranges: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("ranges", torch.zeros(2), persistent=False)
        self.alias = self.count
        self.table: Tensor | None = None
        self.tensor = torch.zeros(2)
        self.calls, self.seen = 0, [torch.zeros(1)]
        self.nested: dict[str, Any] = {"inner": [1, {2}], "tensor": torch.zeros(1)}
        self.bias_cache: dict[str, Tensor] = {}
        self.pair = (torch.zeros(2), [torch.zeros(2)])
        self.sine_cache = {"made when built": torch.zeros(2)}

    def forward(self) -> Tensor:
        self.count += 1
        self.ranges = torch.ones(2)
        self.table = torch.ones(2)
        self.tensor.add_(1)
        self.seen[0].add_(1)
        self.pair[0].add_(1)
        self.pair[1][0].add_(1)
        self.sine_cache["made when built"].add_(1)
        self.calls += 1
        self.seen.append(torch.ones(1))
        self.nested["inner"][1].add(3)
        self.nested["inner"].append(4)
        self.new = True
        self.register_buffer("another", torch.ones(2), persistent=False)
        self.nested["tensor"] = self.nested["tensor"] + 1
        if "cpu" not in self.bias_cache:
            self.bias_cache["cpu"] = 2 * self.weight.detach()
        return self.bias_cache["cpu"]


def test_all_is_as_before() -> None:
    module = Writes()
    module()
    objects = {**vars(module), **module._buffers}
    contents = copy.deepcopy({name: value for name, value in objects.items() if not name.startswith("_")})
    with no_trace(module.modules()):
        assert module.alias is module.count
        module()
        assert module.alias is module.count
        assert (module.calls, float(module.count[0]), len(module.seen)) == (2, 2.0, 3)
    assert {**vars(module), **module._buffers}.keys() == objects.keys()
    for name, value in {**vars(module), **module._buffers}.items():
        assert value is objects[name], name
        if name in contents:
            assert repr(value) == repr(contents[name]), name


def test_a_cache_is_made_anew() -> None:
    module = Writes()
    stale = module()
    with torch.no_grad():
        module.weight.fill_(5.0)
    assert float(module()[0]) == 2.0
    with no_trace(module.modules()):
        assert float(module()[0]) == 10.0
    assert module() is stale


def test_what_is_not_a_cache_is_not_emptied() -> None:
    module = Writes()
    with no_trace(module.modules()):
        assert module.nested["inner"] == [1, {2}]
        assert torch.equal(module.seen[0], torch.zeros(1))


def test_after_an_exception() -> None:
    module = Writes()
    module.register_forward_hook(lambda *_: {}["no such key"])
    with pytest.raises(KeyError), no_trace(module.modules()):
        module()
    assert (module.calls, float(module.count[0]), float(module.tensor[0])) == (0, 0.0, 0.0)
    assert "new" not in vars(module)
    assert "another" not in module._buffers
    assert module._non_persistent_buffers_set == {"ranges"}


def test_modules_that_keep_things_in_another_way() -> None:
    """A lazy module, a list that holds itself, a parameter in a plain attribute."""
    norm, lazy, tied = nn.BatchNorm1d(3), nn.LazyBatchNorm1d(), nn.Identity()
    itself: list[Any] = []
    itself.append(itself)
    vars(tied)["list"], vars(tied)["weight"] = itself, norm.weight
    with no_trace([norm, lazy, tied]):
        assert vars(tied)["weight"] is norm.weight
        norm(torch.randn(4, 3))
    assert itself[0] is itself
    assert torch.equal(norm.get_buffer("running_mean"), torch.zeros(3))


class Remembers(nn.Module):
    """Its caches are no plain dicts: one makes what is missing, the other drops what is oldest."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.made_cache = collections.defaultdict(lambda: 2 * self.weight.detach())
        self.recent_cache: collections.OrderedDict[str, Tensor] = collections.OrderedDict()

    def forward(self) -> Tensor:
        if "last" in self.recent_cache:
            self.recent_cache.move_to_end("last")
        else:
            self.recent_cache["last"] = 3 * self.weight.detach()
        if len(self.recent_cache) > 1:
            self.recent_cache.popitem(last=False)
        return self.made_cache["twice"] + self.recent_cache["last"]


def test_caches_of_other_kinds_are_filled_anew() -> None:
    module = Remembers()
    assert module().tolist() == [5.0] * 3
    module.weight.data.mul_(10)
    with no_trace(module.modules()):
        assert module().tolist() == module().tolist() == [50.0] * 3
    assert module().tolist() == [5.0] * 3  # its own caches are as they were


def test_lazy_modules_keep_the_shape_that_a_pass_has_given_them() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.LazyBatchNorm1d()).eval()
    with no_trace(model.modules()):
        expected = model(torch.ones(2, 3))
    assert torch.equal(model(torch.ones(2, 3)), expected)
    assert "in_features=3" in repr(model)


def test_tiny_vits_biases() -> None:
    """timm keeps the biases of an evaluation by device, and frees them in train(), not when the weights change."""
    model: Any = timm.create_model("tiny_vit_5m_224").eval()
    block = model.stages[3].blocks[0]
    x = torch.randn(1, 7, 7, 320)
    with no_trace(block.modules()):
        block.double()(x.double())
    expected = copy.deepcopy(block).float()(x)
    assert torch.equal(block.float()(x), expected)
