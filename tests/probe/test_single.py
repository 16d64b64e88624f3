"""One token has no condition number: it is told apart, counted, and left out of every mean."""

import math
from typing import Any

import pytest
import timm
import torch
from torch import Tensor

from wellcond.probe import Probe
from wellcond.probe.places import Place
from wellcond.probe.statistics import Sums
from wellcond.probe.steps import summary

SITES = ("sa", "+sa", "mlp", "+mlp")


@pytest.fixture
def cait() -> Any:
    size = {"img_size": 64, "depth": 2, "depth_token_only": 2, "num_classes": 3}
    return timm.create_model("cait_xxs24_224", **size).eval()


@torch.no_grad()
def patches_by_hand(model: Any, images: Tensor) -> dict[tuple[str, str], Tensor]:
    """The tokens of the blocks that see them all, written out; not those of the class token's blocks."""
    x, found = model.patch_embed(images) + model.pos_embed, {}
    for index, block in enumerate(model.blocks):
        attended = block.gamma_1 * block.attn(block.norm1(x))
        added = x + attended
        mlp = block.gamma_2 * block.mlp(block.norm2(added))
        x = added + mlp
        values = (attended, added, mlp, x)
        found |= {(f"blocks.{index}", site): value for site, value in zip(SITES, values, strict=True)}
    return found


@pytest.mark.parametrize("training", [False, True])
def test_the_class_blocks_of_cait_do_not_pull_the_means_down(
    cait: Any, truth: Any, rows_of: Any, training: bool
) -> None:
    images = torch.randn(3, 3, 64, 64)
    with Probe(cait.train(training)) as probe:
        cait(images)
    expected = patches_by_hand(cait.eval().double(), images.double())
    found, status, counts = (rows_of(probe.rows(), field) for field in ("value", "status", "count"))
    told = summary(probe.rows())
    for site in SITES:
        for block in ("blocks.0", "blocks.1"):
            assert found[block, site]["log_kappa"] == pytest.approx(truth(expected[block, site])["log_kappa"], rel=2e-3)
            assert found[block, site]["excluded"] == 0
        for block in ("blocks_token_only.0", "blocks_token_only.1"):
            place = block, site
            for name in ("log_kappa", "log_kappa_max", "sigma_max", "sigma_min", "stable_rank", "effective_rank"):
                assert math.isnan(found[place][name])
                assert (status[place][name], counts[place][name]) == ("single", 0)
            assert (found[place]["excluded"], counts[place]["excluded"], found[place]["capped"]) == (3, 3, 0)
        by_block = [truth(expected[block, site])["log_kappa"] for block in ("blocks.0", "blocks.1")]
        name = f"probe/{site.replace('+', 'plus_')}"
        assert told[f"{name}/mean_log_kappa"] == pytest.approx(sum(by_block) / 2, rel=2e-3)
        assert told[f"{name}/worst_log_kappa"] == pytest.approx(max(by_block), rel=2e-3)
        assert told[f"{name}/worst_block"] == by_block.index(max(by_block))
    assert told["probe/sa/mean_log_kappa"] > 8  # 4.4 with the class blocks


def test_the_attention_of_a_single_query_is_still_heard(cait: Any, rows_of: Any) -> None:
    with Probe(cait, sites="sa") as probe:
        cait(torch.randn(2, 3, 64, 64))
    found, status = rows_of(probe.rows()), rows_of(probe.rows(), "status")
    place = "blocks_token_only.1", "sa"
    assert found[place]["attention_entropy"] > 0
    assert status[place]["attention_entropy"] == "ok"


def test_the_table_says_so(cait: Any, rows_of: Any) -> None:
    with Probe(cait) as probe:
        cait(torch.randn(3, 3, 64, 64))
    values = rows_of(probe.rows())
    lines = {line.split()[0]: line.split()[1:] for line in probe.table().splitlines() if line}
    assert lines["blocks_token_only.0"] == ["single"] * 4
    for column, site in enumerate(SITES):
        mean = sum(values[f"blocks.{index}", site]["log_kappa"] for index in range(2)) / 2
        assert lines["mean"][column] == f"{mean:.2f}"
    assert "single: one token has no condition number, and is left out of the mean" in probe.table()
    assert "at step 0; 3 samples; float32" in probe.table()  # and not 0–3
    assert "!" not in probe.table()
    with Probe(cait, blocks="blocks_token_only.*") as alone:
        cait(torch.randn(3, 3, 64, 64))
    assert "at step 0; 0 samples" in alone.table()
    assert summary(alone.rows()) == {}


def test_samples_of_one_token_among_others(rows_of: Any, truth: Any) -> None:
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    model = transformers.BertModel(transformers.BertConfig(**small, vocab_size=50)).eval()
    lengths = torch.tensor([1, 6, 4, 1, 9])
    words, mask = torch.randint(2, 50, (5, 9)), torch.arange(9)[None] < lengths[:, None]
    with Probe(model, sites="+mlp") as probe:
        model(words, attention_mask=mask.long())
    with torch.no_grad():
        layers = model.double()(words, attention_mask=mask.long(), output_hidden_states=True).hidden_states[1:]
    found, status, counts = (rows_of(probe.rows(), field) for field in ("value", "status", "count"))
    for index, tokens in enumerate(layers):
        place = f"encoder.layer.{index}", "+mlp"
        kappas = [truth(tokens[i, : lengths[i]][None])["log_kappa"] for i in (1, 2, 4)]
        assert found[place]["log_kappa"] == pytest.approx(sum(kappas) / 3, rel=2e-3)
        assert (counts[place]["log_kappa"], found[place]["excluded"], counts[place]["excluded"]) == (3, 2, 5)
        assert status[place]["log_kappa"] == "ok"
    assert "single" not in probe.table()

    model.float()
    with Probe(model, sites="+mlp") as probe:
        model(words[:, :1])
    assert {(row["status"], row["count"]) for row in probe.rows() if row["name"] == "log_kappa"} == {("single", 0)}
    assert {row["value"] for row in probe.rows() if row["name"] == "excluded"} == {5.0}


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        ([[1.0, 2.0]], "single"),
        ([[1.0, 2.0], [0.0, 0.0]], "zero"),
        ([[1.0, 2.0], [math.nan, 0.0]], "non_finite"),
    ],
)
def test_the_worst_sample_names_the_status(samples: list[list[float]], expected: str) -> None:
    place = Place("blocks.0", 0, "sa")
    x = torch.tensor(samples)[:, None, :]  # (b, 1, 2)
    for low_precision in (False, True):
        rows = Sums.measure([place], {place: x}, {}, low_precision=low_precision, spectrum=True).rows(run="", step=0)
        found = {row["name"]: row for row in rows}
        assert found["log_kappa"]["status"] == expected
        assert math.isnan(found["log_kappa"]["value"])
        assert found["excluded"]["value"] == len(samples)
        assert not any(name.startswith("sigma.") for name in found)
