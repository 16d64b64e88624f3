"""Every recipe is possible at every scale, is the paper's model at `paper`, and trains at `smoke`."""

from pathlib import Path

import pytest
import timm
import torch

from wellcond.train.loop import train
from wellcond.train.recipes import RECIPES, SCALES, bearable, recipe
from wellcond.train.tasks import create

OF_IMAGES = [name for name in sorted(RECIPES) if recipe(name).task != "sequence"]  # test_sequence.py has the others
NEEDS_CHECKPOINT = {name for name in RECIPES if name.endswith(("finetune", "probe"))}
PAPER = {
    # What timm's own model of that name has, with 1000 classes; a masked autoencoder is counted with its encoder.
    "vit_tiny": "vit_tiny_patch16_224",
    "vit_small": "vit_small_patch16_224",
    "vit_base": "vit_base_patch16_224",
    "swin_small": "swin_small_patch4_window7_224",
    "cait_s24": "cait_s24_224",
    "pvt_v2_b3": "pvt_v2_b3",
    "mae_base": "vit_base_patch16_224",
    "mae_base_finetune": "vit_base_patch16_224",
}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", sorted(RECIPES))
def test_every_recipe_is_possible(name: str, scale: str, tmp_path: Path) -> None:
    config = recipe(name, scale=scale)
    assert config.recipe == name
    assert config.given == frozenset()
    (tmp_path / "weights.safetensors").touch()
    weights = {"checkpoint": str(tmp_path / "weights.safetensors")}
    (config.changed(weights) if name in NEEDS_CHECKPOINT else config).check()


def test_the_settings_of_a_recipe_can_be_changed() -> None:
    assert recipe("digits", lr=0.5).lr == 0.5
    assert recipe("digits", lr=0.5).given == {"lr"}
    with pytest.raises(ValueError, match="did you mean vit_tiny"):
        recipe("vit_tinny")
    with pytest.raises(ValueError, match="the scales are"):
        recipe("digits", scale="huge")


def timms_parameters(name: str) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in timm.create_model(name).parameters())


@pytest.mark.parametrize("name", [name for name in OF_IMAGES if name != "digits"])
def test_a_paper_model_has_the_parameters_of_timms(name: str) -> None:
    config = recipe(name, scale="paper")
    with torch.device("meta"):
        built = sum(p.numel() for p in create(config, num_classes=1000, channels=3).parameters())
    if name == "convmixer":
        # timm has no such size: the patches' projection, 8 × (depthwise 5 × 5, pointwise), norms and biases, the head.
        dim, depth, kernel, patch = 256, 8, 5, 14
        block = dim * kernel**2 + dim + 2 * dim + dim * dim + dim + 2 * dim
        assert built == 3 * patch**2 * dim + dim + 2 * dim + depth * block + dim * 1000 + 1000
    else:
        assert name in PAPER or name in NEEDS_CHECKPOINT, f"{name} is not checked yet"
        assert built == timms_parameters(PAPER.get(name, "vit_base_patch16_224"))


@pytest.mark.parametrize("name", OF_IMAGES)
def test_a_recipe_trains_a_few_steps(name: str, tmp_path: Path) -> None:
    changes = {"epochs": 1, "batch_size": 64 * 8, "warmup_epochs": 0, "log_every": 1}
    config = recipe(name, scale="smoke", **changes)
    if name in NEEDS_CHECKPOINT:
        before = recipe("mae_base", scale="smoke", **changes)
        train(before, tmp_path / "before", device="cpu", quiet=True)
        config = config.changed({"checkpoint": str(tmp_path / "before/checkpoints/step-00000002/model.safetensors")})
    outcome = train(config, tmp_path / "run", device="cpu", quiet=True)
    assert outcome.steps == 2
    assert outcome.metrics["loss"] > 0


def test_a_cpu_gets_what_it_can_bear_unless_it_was_asked_for() -> None:
    lab = recipe("vit_tiny", scale="lab")
    assert (lab.compile, lab.amp_dtype) == (True, "bfloat16")
    plain = bearable(lab, "cpu")
    assert (plain.compile, plain.amp_dtype) == (False, "float32")
    assert plain.given == frozenset()
    asked = lab.changed({"compile": True, "amp_dtype": "bfloat16"})  # the values that they have
    assert bearable(asked, "cpu") == lab
    assert bearable(lab, "cuda") == lab


def test_who_gives_epochs_takes_a_recipe_s_steps_away():
    usual = recipe("lra_text")
    assert (usual.steps, usual.eval_steps, usual.warmup_steps) == (50_000, 500, 80)
    asked = usual.changed({"epochs": 2, "eval_every": 3, "warmup_epochs": 1})
    assert (asked.steps, asked.eval_steps, asked.warmup_steps) == (0, 0, 0)
    assert usual.changed({"epochs": 2, "steps": 7}).steps == 7
    assert usual.changed({"steps": 7}).changed({"epochs": 2}).steps == 7
    assert usual.changed({"epochs": 2}, given=False).steps == 50_000
    assert recipe("vit_tiny").changed({"epochs": 2}).epochs == 2


def test_options_of_a_recipe_s_data_go_with_it():
    usual = recipe("lra_text")
    assert usual.data_kwargs == {"mask": "fixed"}
    assert usual.changed({"data": "lra_listops"}).data_kwargs == {"mask": "fixed"}
    assert usual.changed({"data": "digits"}).data_kwargs == {}
    assert usual.changed({"data": "digits", "data_kwargs": {"noise": 1}}).data_kwargs == {"noise": 1}
    assert usual.changed({"data_kwargs": {"mask": "published"}}).changed({"data": "digits"}).data_kwargs == {
        "mask": "published"  # which was asked for, and is refused
    }
