"""Two truly trained models: their weights are in the right places, and what the probe says of them holds in float64."""

import functools
import math
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from wellcond import Probe, records, register_blocks, remove_skip
from wellcond.data import read_images
from wellcond.measure.trained import CIFAR10_VIT, MODELS, measure_trained
from wellcond.measure.trained_models import galileo_weights
from wellcond.models.build import build_model
from wellcond.models.weights import read_weights
from wellcond.records import Row

EVIDENCE = Path(__file__).parents[2] / "evidence" / "trained"
TOKENS = {"cifar10-vit": 65, "galileo-nano": 144}
BOTH = pytest.mark.parametrize("name", MODELS)


@pytest.fixture(scope="module")
def measured(folder: Path) -> dict[str, dict[str, Any]]:
    """Half a minute: the CIFAR-10 ViT first has to reach its accuracy on 10,000 images."""
    return {name: measure_trained(trained, folder) for name, trained in MODELS.items()}


def kappas(rows: list[Row]) -> dict[tuple[int, str], Row]:
    return {(row["index"], row["site"]): row for row in rows if row["name"] == "log_kappa"}


@pytest.mark.slow
def test_the_published_accuracy_is_reached(measured: dict[str, dict[str, Any]]) -> None:
    assert measured["cifar10-vit"]["accuracy"] == pytest.approx(CIFAR10_VIT.accuracy, abs=2e-4)


@BOTH
def test_every_block_and_site_has_a_sensible_number(name: str, measured: dict[str, dict[str, Any]]) -> None:
    for rows in (measured[name]["rows"], measured[name]["rows of the untrained model"]):
        found = kappas(rows)
        blocks = {index for index, _ in found}
        assert found.keys() == {(index, site) for index in blocks for site in ("sa", "+sa", "mlp", "+mlp")}
        assert all(math.isfinite(row["value"]) for row in rows)
        assert all(1 < row["value"] <= -math.log(torch.finfo(torch.float32).eps) + 1e-6 for row in found.values())
        entropies = [row["value"] for row in rows if row["name"] == "attention_entropy"]
        assert len(entropies) == len(blocks)
        assert all(0 < value <= math.log(TOKENS[name]) for value in entropies)


@BOTH
def test_attention_is_worse_than_the_stream_it_joins(name: str, measured: dict[str, dict[str, Any]]) -> None:
    for key in ("rows of a float64 copy", "rows of a float64 copy of the untrained model"):
        found = kappas(measured[name][key])
        for index in {index for index, _ in found}:
            assert found[index, "sa"]["value"] > found[index, "+sa"]["value"] + 1


@BOTH
def test_training_shows(name: str, measured: dict[str, dict[str, Any]]) -> None:
    trained, start = (kappas(measured[name][f"rows of a float64 copy{of}"]) for of in ("", " of the untrained model"))
    assert all(abs(trained[place]["value"] - start[place]["value"]) > 0.02 for place in trained)
    entropy = measured[name]["mean attention_entropy"]
    assert entropy["trained"] < entropy["untrained"] - 0.3  # attention has learnt where to look


@BOTH
def test_float32_sees_what_float64_sees_or_says_that_it_cannot(name: str, measured: dict[str, dict[str, Any]]) -> None:
    for of in ("", " of the untrained model"):
        single = kappas(measured[name]["rows of the untrained model" if of else "rows"])
        double = kappas(measured[name][f"rows of a float64 copy{of}"])
        assert {row["dtype"] for row in double.values()} == {"float64"}
        for place, row in single.items():
            if row["status"] == "ok":
                assert row["value"] == pytest.approx(double[place]["value"], abs=2e-3)
            else:  # a mean over samples, some of them at the ceiling, is a lower bound
                assert row["status"] == "ceiling"
                assert row["value"] < double[place]["value"] + 2e-3


@BOTH
def test_the_committed_evidence_is_what_comes_out(name: str, measured: dict[str, dict[str, Any]]) -> None:
    committed = records.read_json(EVIDENCE / f"{name}.json")
    for which, means in committed["mean log_kappa"].items():
        assert means == pytest.approx(measured[name]["mean log_kappa"][which], abs=5e-3)


# ---- the same CIFAR-10 ViT as a timm model


class PostNormBlock(Block):
    """timm's parts, in the order of torch's encoder layer."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        x = self.norm1(x + self.attn(x))
        return self.norm2(x + self.mlp(x))


def timm_twin(folder: Path) -> nn.Module:
    register_blocks(
        PostNormBlock,
        attention="attn",
        taps={"in": ":input", "sa": "attn:output", "+sa": "norm1:input", "mlp": "mlp:output", "+mlp": "norm2:input"},
    )
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=4, embed_dim=128, depth=6, num_heads=8, mlp_ratio=2.0,
        num_classes=10, block_fn=PostNormBlock, act_layer=nn.ReLU, norm_layer=functools.partial(nn.LayerNorm, eps=1e-5),
    )  # fmt: skip
    names = {
        "transformer.layers": "blocks", "self_attn.in_proj_": "attn.qkv.", "self_attn.out_proj": "attn.proj",
        "linear1": "mlp.fc1", "linear2": "mlp.fc2", "mlp_head.0": "norm", "mlp_head.1": "head",
    }  # fmt: skip
    renamed = {}
    for name, value in read_weights(folder / "vit_cifar10.pth")[0].items():
        for theirs, timms in names.items():
            name = name.replace(theirs, timms)
        renamed[name] = value
    model.load_state_dict(renamed)
    return model.eval()


@torch.no_grad()
def test_timms_blocks_and_torchs_layers_agree_on_the_same_weights(folder: Path) -> None:
    built = build_model("cifar10_vit", checkpoint=folder / "vit_cifar10.pth")
    images = read_images(folder / "cifar10/val.tar", built.transform(), limit=16).images.double()
    one, other = built.model.double(), timm_twin(folder).double()
    torch.testing.assert_close(one(images), other(images), rtol=1e-9, atol=1e-9)
    rows = []
    for model in (one, other):
        with Probe(model) as probe:
            model(images)
        rows.append({key: row["value"] for row in probe.rows() if (key := (row["index"], row["site"], row["name"]))})
    assert rows[0] == pytest.approx(rows[1], rel=1e-6)


@torch.no_grad()
def test_without_its_skip_the_stream_is_as_bad_as_the_attention(folder: Path) -> None:
    built = build_model("cifar10_vit", checkpoint=folder / "vit_cifar10.pth")
    images = read_images(folder / "cifar10/val.tar", built.transform(), limit=16).images
    values = []
    with Probe(built.model, sites="+sa", blocks=0) as probe:
        built.model(images)
    values.append(kappas(probe.rows())[0, "+sa"]["value"])
    with remove_skip(built.model, "sa"), Probe(built.model, sites="*sa", blocks=0) as probe:
        built.model(images)
    values += [kappas(probe.rows())[0, site]["value"] for site in ("sa", "+sa")]
    assert values[1] == values[2] > values[0] + 3


# ---- Galileo's weights in timm's blocks


@torch.no_grad()
def test_query_key_and_value_are_packed_in_timms_order(folder: Path) -> None:
    theirs, _ = read_weights(folder / "encoder.pt")
    block = build_model("galileo_nano").model.blocks[2]
    block.load_state_dict(
        {
            name[9:]: value
            for name, value in galileo_weights(folder / "encoder.pt").items()
            if name.startswith("blocks.2.")
        }
    )
    x = torch.randn(2, 10, 128, dtype=torch.float64)
    linear = lambda part, x: nn.functional.linear(  # noqa: E731
        x, *(theirs[f"blocks.2.attn.{part}.{kind}"].double() for kind in ("weight", "bias"))
    )
    query, key, value = (linear(part, x).unflatten(-1, (8, 16)).transpose(1, 2) for part in "qkv")
    heads = (query @ key.mT / 4).softmax(-1) @ value
    torch.testing.assert_close(block.attn.double()(x), linear("proj", heads.transpose(1, 2).flatten(2)))
