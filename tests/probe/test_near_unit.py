"""Rows `near_unit_share`: of each block's input and output, as a plain implementation finds it."""

import math
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor

import wellcond
from wellcond.probe import Probe


def plainly(x: Tensor, y: Tensor) -> float:
    """(…, d) tokens: both centred, whitened by the principal components of x, and the map between them fitted."""
    a, b = (t.detach().double().reshape(-1, t.shape[-1]).numpy() for t in (x, y))
    a, b = a - a.mean(0), b - b.mean(0)
    _, s, vh = np.linalg.svd(a, full_matrices=False)
    variance = s**2 / len(a)
    ridge = 1e-5 * variance.sum() / a.shape[1]
    kept = variance > ridge
    whiten = vh[kept].T / np.sqrt(variance[kept] + ridge)
    fit = np.linalg.lstsq(a @ whiten, b @ whiten, rcond=None)[0]
    size = np.abs(np.linalg.eigvals(fit))
    return float(np.mean((size >= 0.90) & (size <= 1.05)))


def shares(probe: Probe) -> dict[str, Any]:
    return {row["block"]: row for row in probe.rows() if row["name"] == "near_unit_share"}


@pytest.mark.parametrize("exact", [True, "float64", False])
@pytest.mark.parametrize("training", [True, False])
def test_a_vit(make_vit: Any, by_hand: Any, exact: Any, training: bool) -> None:
    model, images = make_vit(depth=3).train(training), torch.randn(8, 3, 32, 32)
    with Probe(model, near_unit=True, exact=exact, max_samples=6) as probe:
        model(images)
    tokens = by_hand(model.eval().double(), images.double()[:6])
    before, found = tokens["blocks.0", "embed"], shares(probe)
    assert len(found) == 3
    for index in range(3):
        after = tokens[f"blocks.{index}", "+mlp"]
        row = found[f"blocks.{index}"]
        # one of 48 eigenvalues may lie on the edge
        assert row["value"] == pytest.approx(plainly(before, after), abs=1.5 / 48)
        assert (row["site"], row["index"], row["count"], row["status"]) == ("+mlp", index, 6, "ok")
        before = after
    assert "near_unit_share at step 0" in probe.table("near_unit_share")


def test_only_where_asked(vit: Any, images: Tensor) -> None:
    with Probe(vit) as probe:
        vit(images)
    assert shares(probe) == {}
    with Probe(vit, near_unit=True, blocks=1, sites="sa") as probe:
        vit(images)
    assert {(block, row["site"]) for block, row in shares(probe).items()} == {("blocks.1", "sa")}
    assert {row["site"] for row in probe.rows()} == {"sa"}  # a block's ends are no sites


def test_skips_keep_eigenvalues_near_the_unit_circle() -> None:
    size = {"img_size": 32, "patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 3, "num_classes": 3}
    model, images = timm.create_model("vit_tiny_patch16_224", **size).eval(), torch.randn(8, 3, 32, 32)

    def mean() -> float:
        with Probe(model, near_unit=True) as probe:
            model(images)
        return sum(row["value"] for row in shares(probe).values()) / 3

    with_skips = mean()
    with wellcond.remove_skip(model, "sa"), wellcond.remove_skip(model, "mlp"):
        without = mean()
    assert with_skips > 0.2
    assert without < 0.1


def test_padding_is_left_out() -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    model = transformers.BertModel(transformers.BertConfig(**small, vocab_size=50)).eval()
    words, mask = torch.randint(2, 50, (12, 9)), torch.arange(9)[None] < torch.randint(1, 10, (12, 1))
    with Probe(model, near_unit=True) as probe:
        model(words, attention_mask=mask.long())
    with torch.no_grad():
        hidden = model.double()(words, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    found = shares(probe)
    for index in range(2):
        row, x, y = found[f"encoder.layer.{index}"], hidden[index], hidden[index + 1]
        assert row["value"] == pytest.approx(plainly(x[mask], y[mask]), abs=1e-9)
        assert row["count"] == 12


def test_blocks_that_change_the_shape_have_none() -> None:
    size = {"img_size": 32, "depth": 2, "depth_token_only": 1, "embed_dim": 16, "num_heads": 2, "num_classes": 3}
    model = timm.create_model("cait_xxs24_224", **size).eval()
    with Probe(model, near_unit=True) as probe:
        model(torch.randn(2, 3, 32, 32))
    assert set(shares(probe)) == {"blocks.0", "blocks.1"}  # and not the class token's, which reads all tokens


@pytest.mark.parametrize("channels_first", [True, False])
def test_grids_of_tokens(channels_first: bool) -> None:
    if channels_first:
        model: Any = timm.models.convmixer.ConvMixer(dim=12, depth=2, kernel_size=3, patch_size=4, num_classes=3)
        name, blocks = "blocks.{}", model.blocks
    else:
        small: dict[str, Any] = {"depths": (2,), "embed_dim": 16, "num_heads": (2,), "window_size": 4}
        model = timm.create_model("swin_tiny_patch4_window7_224", img_size=32, num_classes=3, **small)
        name, blocks = "layers.0.blocks.{}", model.layers[0].blocks
    model.eval()
    ends: list[tuple[Tensor, Tensor]] = []
    handles = [block.register_forward_hook(lambda _, args, out: ends.append((args[0], out))) for block in blocks]
    images = torch.randn(4, 3, 32, 32)
    model(images)
    for handle in handles:
        handle.remove()
    with Probe(model, near_unit=True) as probe:
        model(images)
    for index, pair in enumerate(ends):
        x, y = (t.movedim(1, -1) if channels_first else t for t in pair)
        assert shares(probe)[name.format(index)]["value"] == pytest.approx(plainly(x, y), abs=1.5 / x.shape[-1])


def test_what_is_not_finite_and_what_was_computed_in_less(make_vit: Any, images: Tensor) -> None:
    model = make_vit(init_values=1.0)  # LayerScale makes float32 of what autocast computed
    with Probe(model, near_unit=True, exact=False) as probe, torch.autocast("cpu", dtype=torch.bfloat16):
        model(images)
    assert {row["status"] for row in shares(probe).values()} == {"low_precision"}
    with torch.no_grad():
        model.blocks[1].attn.proj.bias.fill_(math.nan)
    with Probe(model, near_unit=True) as probe:
        model(images)
    found = shares(probe)
    assert (found["blocks.0"]["status"], found["blocks.1"]["status"]) == ("ok", "non_finite")
    assert math.isnan(found["blocks.1"]["value"])
