"""Measuring a trained model: weights that do not do what they are said to do are refused; what is written is true.

Here with random weights in files of the same form; with the trained ones in tests/trained/.
"""

import dataclasses
import io
import tarfile
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from sklearn.datasets import load_sample_images

from wellcond.measure.trained import (
    CIFAR10_VIT,
    GALILEO_NANO,
    accuracy,
    by_site,
    condition_of_weights,
    measure_trained,
)
from wellcond.measure.trained_models import Cifar10Vit, GalileoNano
from wellcond.models.build import build_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Random weights of the CIFAR-10 ViT, and parts of two photographs in folders of ten classes."""
    torch.save(Cifar10Vit().state_dict(), tmp_path / "vit_cifar10.pth")
    (tmp_path / "cifar10").mkdir()
    with tarfile.open(tmp_path / "cifar10" / "val.tar", "w") as archive:
        for index in range(20):
            pixels = load_sample_images().images[index % 2][10 * index : 10 * index + 32, 20 * index : 20 * index + 32]
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, format="PNG")
            member = tarfile.TarInfo(f"val/class-{index % 10}/{index}.png")
            member.size = len(file.getvalue())
            archive.addfile(member, io.BytesIO(file.getvalue()))
    return tmp_path


def test_weights_that_do_not_reach_their_accuracy_are_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar10_vit reaches .* but its authors report 73.72%"):
        measure_trained(CIFAR10_VIT, folder, page=folder / "page.html")
    assert not (folder / "page.html").exists()


@torch.no_grad()
def test_accuracy_counts_right_answers(folder: Path) -> None:
    built = build_model("cifar10_vit", checkpoint=folder / "vit_cifar10.pth")
    head = built.model.get_submodule("mlp_head.1")
    head.weight.zero_()
    for answer in (0, 7):
        head.bias.copy_(torch.eye(10)[answer])  # always the same answer: one class of ten
        assert accuracy(built, folder / "cifar10" / "val.tar") == pytest.approx(0.1)


def test_a_record_has_both_models_in_both_precisions(folder: Path) -> None:
    trained = dataclasses.replace(CIFAR10_VIT, accuracy=None)
    record = measure_trained(trained, folder, page=folder / "new" / "page.html", samples=2, seed=3)
    assert (folder / "new" / "page.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert record["accuracy"] is None
    for key in ("rows", "rows of the untrained model"):
        found = [row for row in record[key] if row["name"] == "log_kappa"]
        assert len(found) == 24
        assert {(row["dtype"], row["count"]) for row in found} == {("float32", 2)}
        assert not any(row["name"].startswith("sigma.") for row in record[key])
    for key in ("rows of a float64 copy", "rows of a float64 copy of the untrained model"):
        assert [row["dtype"] for row in record[key]] == ["float64"] * 24
    assert record["mean log_kappa"]["trained"] == by_site(record["rows"])
    assert record["mean log_kappa"]["trained"] != record["mean log_kappa"]["untrained"]
    # the float64 start is the one that was measured in float32
    assert record["largest distance of log_kappa from float64"] < 0.1
    assert record["compared with float64"] > 30


def test_other_names_of_weights_are_mapped_on_the_way(tmp_path: Path) -> None:
    def written(_: Path, scratch: Path) -> Path:
        save_file(GalileoNano().state_dict(), scratch / "weights.safetensors")
        return scratch / "weights.safetensors"

    record = measure_trained(dataclasses.replace(GALILEO_NANO, weights=written), tmp_path, samples=2)
    assert record["notes"][0] == "galileo_nano: weights of weights.safetensors."
    assert len({row["block"] for row in record["rows"]}) == 4


@pytest.mark.parametrize(("model_class", "block"), [(Cifar10Vit, "transformer.layers.5"), (GalileoNano, "blocks.3")])
@torch.no_grad()
def test_weights_are_those_of_query_key_value_and_output(model_class: type, block: str) -> None:
    model = model_class()
    attention = next(
        module for name, module in model.named_modules() if name in (f"{block}.attn", f"{block}.self_attn")
    )
    packed = attention.qkv.weight if hasattr(attention, "qkv") else attention.in_proj_weight
    packed[128:256] = torch.diag(torch.linspace(1, 3, 128))
    output = attention.proj if hasattr(attention, "proj") else attention.out_proj
    output.weight.copy_(torch.diag(torch.linspace(1, 7, 128)))
    found = condition_of_weights(model)
    assert len(found) == 4 * (6 if model_class is Cifar10Vit else 4)
    assert found[f"{block}.k"] == pytest.approx(3, rel=1e-6)
    assert found[f"{block}.o"] == pytest.approx(7, rel=1e-6)
    assert found[f"{block}.q"] > 10


def test_means_are_over_blocks() -> None:
    rows = [
        {"name": "log_kappa", "site": site, "value": value} for site, value in (("sa", 4.0), ("+sa", 1.0), ("sa", 6.0))
    ]
    assert by_site([*rows, {"name": "sigma_max", "site": "sa", "value": 99.0}]) == {"sa": 5.0, "+sa": 1.0}
