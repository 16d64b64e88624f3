"""A dry run builds what a training would, and says what cannot be trained."""

import pytest
import timm
import torch
from typer.testing import CliRunner

from wellcond.cli import app
from wellcond.data import open_data
from wellcond.train.dry_run import dry_run
from wellcond.train.loop import train
from wellcond.train.recipes import recipe

TINY = {"img_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 32, "num_heads": 2}


def config(**changes):
    return recipe("digits", epochs=2, model_kwargs=TINY, batch_size=256).changed(changes)


def test_steps_and_parameters_are_the_trainings(tmp_path):
    found = dry_run(config(warmup_epochs=1, warmup_lr=1e-6, min_lr=1e-5, lr=1e-3))
    outcome = train(config(), tmp_path / "run", device="cpu", quiet=True)
    assert found.steps == outcome.steps
    model = timm.create_model("vit_tiny_patch16_224", in_chans=1, num_classes=10, **TINY)
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.inputs == [(1, 8, 8)]
    first, most, last = found.rates
    assert (first, last) == (1e-6, 1e-5)
    assert 1e-5 < most <= 1e-3
    assert "Nothing" not in " ".join(found.lines())


def test_operations_are_the_products_of_a_pass():
    found = dry_run(config())
    n, d, patch = 17, 32, 4
    block = 2 * n * d * 3 * d + 2 * 2 * n * n * d + 2 * n * d * d + 2 * 2 * n * d * 4 * d
    assert found.operations == 3 * (2 * 16 * patch * d + 2 * block + 2 * d * 10)


@pytest.mark.parametrize(
    "changes", [{"gray": "dct"}, {"gray": "svd"}, {"remove_skips": ["sa"]}, {"attention": "linear"}], ids=str
)
def test_surgery_is_rehearsed(changes):
    assert dry_run(config(**changes)).parameters == dry_run(config()).parameters


def test_sequences_and_frozen_features_are_rehearsed(tmp_path):
    listops = dry_run(recipe("lra_listops", scale="smoke"))
    assert listops.steps == 30
    assert listops.inputs[0] == (128,)
    (tmp_path / "weights.safetensors").touch()  # looked for, and not read
    found = dry_run(config(task="linear_probe", checkpoint=str(tmp_path / "weights.safetensors")))
    assert found.operations == dry_run(config()).operations / 3  # no backward pass


def test_many_samples_may_be_elsewhere():
    data = open_data("digits", image_size=8)
    assert dry_run(config(), data, samples=1_281_167).steps == 2 * (1_281_167 // 256)


def test_the_command_says_what_was_built_and_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["train", "digits", "--dry-run", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "20 epochs, 440 steps of 64 samples" in result.output
    assert "Nothing was trained." in result.output
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_trained_is_said():
    with pytest.raises(ValueError, match="multiple of 3 processes"):
        dry_run(config(), world=3)
    with pytest.raises(ValueError, match="more than the training samples"):
        dry_run(config(batch_size=4096))
    assert torch.get_default_device().type == "cpu"
