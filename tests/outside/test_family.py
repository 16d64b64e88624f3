"""A stranger's model, taught to wellcond from outside: this file imports what is public, and nothing else."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import wellcond
from wellcond.models import AttentionKind, BlockKind, Replaced, Skipless, WeightPaths, split_heads

DIM, HEADS, PATCH = 24, 3, 8


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = HEADS
        self.to_q, self.to_kv, self.back = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        key, value = self.to_kv(x).chunk(2, dim=-1)
        q, k, v = (split_heads(t, self.parts) for t in (self.to_q(x), key, value))
        return self.back(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.mixing, self.second = nn.LayerNorm(DIM), Mixing(), nn.LayerNorm(DIM)
        self.wide = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixing(self.first(x))
        return x + self.wide(self.second(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.layers = nn.Sequential(Layer(), Layer(), Layer())

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(self.cut(images).flatten(2).mT).mean(1)


class SkiplessLayer(Skipless):
    def forward(self, x: Tensor) -> Tensor:
        x = self.add_skip("sa", x, self.mixing(self.first(x)))
        return self.add_skip("mlp", x, self.wide(self.second(x)))


class ReplacedMixing(Replaced):
    def forward(self, x: Tensor) -> Tensor:
        key, value = self.to_kv(x).chunk(2, dim=-1)
        return self.back(self.attend(*(split_heads(t, self.parts) for t in (self.to_q(x), key, value))))


TAPS = {"in": "first:output", "sa": "mixing:output", "+sa": "second:input", "mlp": "wide:output", "+mlp": ":output"}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    wellcond.register_family(
        Net,
        "cut",
        blocks={Layer: BlockKind(taps=TAPS, attention="mixing")},
        skipless={Layer: SkiplessLayer},
        attention={
            Mixing: AttentionKind(
                weights=WeightPaths(query="to_q", key="to_kv:0/2", value="to_kv:1/2", output="back", heads="parts"),
                replaced=ReplacedMixing,
            )
        },
    )


@pytest.fixture
def net() -> Any:
    return Net().double().eval()


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 32, 32, dtype=torch.float64)


def test_it_is_grayed_inside_as_outside(net: Any, images: Tensor) -> None:
    expected = net(wellcond.TokenGraying("dct", 0.7, patch_size=PATCH)(images))
    assert torch.equal(wellcond.gray(net, "dct", epsilon=0.7)(images), expected)


def test_its_sites_are_measured(net: Any, images: Tensor) -> None:
    assert len(wellcond.sites(net)) == 15
    with wellcond.Probe(net, sites=["tokens", "embed", "in", "*sa", "*mlp"]) as probe:
        net(images)
    found = {(row["block"], row["site"]): row["value"] for row in probe.rows() if row["name"] == "log_kappa"}
    x = net.cut(images).flatten(2).mT
    branch = net.layers[0].mixing(net.layers[0].first(x))
    for site, tokens in {"sa": branch, "+sa": x + branch}.items():
        expected = wellcond.condition_number(tokens.detach()).log().mean()
        assert found["layers.0", site] == pytest.approx(float(expected), rel=1e-6)
    assert {site for _, site in found} == {"tokens", "embed", *TAPS}


@pytest.mark.parametrize("skip", ["sa", "mlp"])
def test_its_skips_go_and_come_back(net: Any, images: Tensor, skip: str) -> None:
    before, x = net(images), torch.randn(2, 16, DIM, dtype=torch.float64)
    layer = net.layers[0]
    x_sa = layer.mixing(layer.first(x)) if skip == "sa" else x + layer.mixing(layer.first(x))
    mlp = layer.wide(layer.second(x_sa))
    with wellcond.remove_skip(net, skip):
        assert torch.equal(layer(x), x_sa + mlp if skip == "sa" else mlp)
        assert wellcond.skips_of(net) == {f"layers.{i}": (skip,) for i in range(3)}
        for duplicate in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
            assert torch.equal(duplicate(net)(images), net(images))
    assert torch.equal(net(images), before)


@pytest.mark.parametrize("name", ["linear", "kernelized", "skyformer", "nystrom"])
def test_its_attention_is_replaced(net: Any, images: Tensor, name: str) -> None:
    before = net(images)
    wellcond.replace_attention(net, "softmax")
    torch.testing.assert_close(net(images), before)
    wellcond.replace_attention(net, name, **({"num_landmarks": 4} if name in ("skyformer", "nystrom") else {}))
    assert not torch.allclose(net(images), before)
    assert torch.equal(pickle.loads(pickle.dumps(net))(images), net(images))
    wellcond.restore_attention(net)
    assert torch.equal(net(images), before)


def test_its_weights_are_read_and_set(net: Any) -> None:
    layer, x = net.layers[0], torch.randn(2, 5, DIM, dtype=torch.float64)
    weights = wellcond.attention_weights(layer)
    assert weights.num_heads == HEADS
    assert torch.equal(weights.value, layer.mixing.to_kv.weight[DIM:])
    for name in ("query", "query_bias", "value_bias", "output_bias"):
        getattr(weights, name).zero_()  # a copy: nothing happens until it is set
    weights.value.copy_(torch.eye(DIM))
    weights.output.copy_(torch.eye(DIM))
    wellcond.set_attention_weights(layer, weights)
    torch.testing.assert_close(layer.mixing(x), x.mean(1, keepdim=True).expand_as(x))


def test_its_file_remembers_the_surgery(net: Any, images: Tensor, tmp_path: Path) -> None:
    wellcond.gray(net, "dct", epsilon=0.7)
    wellcond.remove_skip(net, "sa", blocks=1)
    wellcond.replace_attention(net, "kernelized", blocks=2)
    wellcond.save(net, tmp_path / "net.safetensors")
    fresh = Net().double().eval()
    wellcond.load(fresh, tmp_path / "net.safetensors")
    assert torch.equal(fresh(images), net(images))


class Sub(Net):
    """Belongs to the family."""


def test_subclasses_belong_to_the_family(images: Tensor) -> None:
    model = Sub().double()
    wellcond.remove_skip(wellcond.gray(model, "dct"), "mlp")
    assert wellcond.is_grayed(model)
    assert len(wellcond.skips_of(model)) == 3


class Unknown(nn.Module):
    pass


@pytest.mark.parametrize(
    ("said", "error", "message"),
    [
        ({}, ValueError, "nothing is said about"),
        ({"blocks": {Unknown: BlockKind(taps={})}}, ValueError, "nothing to measure"),
        ({"skipless": {Unknown: Unknown}}, TypeError, "derives from wellcond.models.Skipless"),
        ({"attention": {Unknown: AttentionKind(replaced=Unknown)}}, TypeError, "wellcond.models.Replaced"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_mistakes_are_named(said: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wellcond.register_family(Unknown, **said)


def test_sites_and_shares_check_themselves() -> None:
    with pytest.raises(ValueError, match="a block has no sites"):
        BlockKind(taps={"attention": "attn:output"})
    with pytest.raises(ValueError, match="a block has no skips"):
        BlockKind(taps=TAPS, skips={"attn": ""})
    with pytest.raises(ValueError, match='is written "qkv:0/3"'):
        WeightPaths(query="qkv:3/3")
    with pytest.raises(ValueError, match="no bias of keys"):
        WeightPaths(biases={"keys": None})
