"""A configuration says what is wrong with it before anything starts."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor
from timm.optim import create_optimizer_v2, list_optimizers

from wellcond.train.config import COMPILE_MODES, GRAPH_MODES, TASK_KINDS, Config
from wellcond.train.recipes import recipe
from wellcond.train.settings import fields_of, groups, own_fields

Make = Callable[..., Config]


def test_the_small_configuration_is_possible(make_config: Make) -> None:
    make_config().check()
    make_config().check(world=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "regress"}, "task can be"),
        ({"amp_dtype": "int8"}, "amp_dtype can be"),
        ({"on_divergence": "hope"}, "on_divergence can be"),
        ({"gray": "fft"}, "gray can be"),
        ({"gray_masked": "some"}, "gray_masked can be"),
        ({"tracker": "paper"}, "tracker can be"),
        ({"compile": True, "compile_mode": "fast"}, "compile_mode can be '', 'default'"),
        ({"compile_mode": "default"}, "set compile=true, too"),
        ({"sched": "plateau"}, "sched can be"),
        ({"sched": "cosin"}, "sched can be .* did you mean cosine"),
        ({"sched": "step"}, "sched can be 'cosine', 'tanh', 'poly', 'onecycle', not 'step'"),
        ({"remove_skips": ["sa", "mpl"]}, "remove_skips can be 'sa', 'mlp', not 'mpl'; did you mean mlp"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"decoder_depth": 0}, "decoder_depth must be at least 1"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": float("nan")}, "lr must be finite, got nan"),
        ({"weight_decay": float("inf")}, "weight_decay must be finite, got inf"),
        ({"mixup": -0.1}, "mixup must not be negative"),
        ({"probe_every": -1}, "probe_every must not be negative"),
        ({"label_smoothing": 1.0}, "label_smoothing must be at least 0 and below 1, got 1"),
        ({"holdout": 1.0}, "holdout must be at least 0 and below 1, got 1"),
        ({"flip": 1.1}, "flip must be at least 0 and at most 1, got 1.1"),
        ({"epsilon": 0.0}, "epsilon must be above 0 and at most 1, got 0.0"),
        ({"epsilon": 1.5}, "epsilon must be above 0 and at most 1, got 1.5"),
        ({"scale_min": 0.0}, "scale_min must be above 0 and at most 1, got 0"),
        ({"ema_decay": 1.0}, "ema_decay must be above 0 and below 1, got 1"),
        ({"clip_grad": 0.0}, "clip_grad must be above 0, got 0"),
        ({"layer_decay": 1.5}, "layer_decay must be above 0 and at most 1, got 1.5"),
        ({"opt_betas": [0.9, 1.0]}, "opt_betas are"),
        ({"warmup_epochs": 3, "warmup_steps": 5}, "two spellings of one thing"),
        ({"clip_grad": 1.0, "clip_value": 1.0}, "give one of them"),
        ({"clip_value": 0.0}, "clip_value must be above 0, got 0"),
        ({"attention": "foo"}, "there is no attention 'foo'"),
        ({"attention": "skyform"}, "did you mean skyformer"),
        ({"attention": "skyformer", "attention_kwargs": {"landmark": 3}}, "attention has no setting 'landmark'"),
        ({"steps": -1}, "steps must not be negative"),
        ({"accumulate": 3}, "multiple of accumulate=3"),
        ({"task": "mae", "mixup": 0.8}, "has no labels"),
        ({"task": "mae", "mask_ratio": 0.0}, "needs masked patches"),
        ({"task": "linear_probe"}, "needs trained features"),
        ({"shard": True}, "torchrun starts more"),
        ({"shard": True, "ema_decay": 0.9}, "of a sharded model is not supported"),
        ({"shard": True, "amp_dtype": "float16"}, "float16 with a scaler"),
        ({"mixup": 0.8, "accumulate": 256}, "mix pairs"),
        ({"scale_min": 0.5}, "two ways to crop"),
        ({"attention_kwargs": {"num_landmarks": 4}}, "name it with attention"),
        ({"layer_scale": 1.0}, "name the skip with remove_skips"),
        ({"opt": "adamww"}, "timm knows no optimiser 'adamww'; did you mean.*adamw"),
        ({"model": "vit_tiny_patch16_225"}, "timm knows no model.*vit_tiny_patch16_224"),
        ({"opt_betas": [0.9]}, r"opt=adamw takes 2 numbers as opt_betas, got 1 \(0.9\)"),
        ({"opt": "adan", "opt_betas": [0.9, 0.95]}, "opt=adan takes 3 numbers"),
        ({"opt": "lookahead_sgd", "opt_betas": [0.9, 0.95]}, "opt_betas would be ignored"),
        ({"opt": "adahessian"}, "needs second derivatives"),
        ({"opt": "lookahead_adahessian"}, "needs second derivatives"),
        ({"image_size": 16}, "image_size=16, but .* images of 8 × 8; give it img_size=16 .* or set image_size=8"),
        ({"image_size": 16, "model_kwargs": {}}, "image_size=16, but .* images of 224 × 224"),
        ({"model_kwargs": {"img_size": [8, 16]}}, "images of 8 × 16"),
        ({"model_kwargs": {"img_size": 8}}, "images of 8 × 8 pixels are smaller than a patch of vit_tiny.*, 16 × 16"),
        ({"model_kwargs": {"img_size": 8, "patch_size": [4, 16]}}, "images of 8 × 8 pixels are smaller than .* 4 × 16"),
        ({"data": "caf\udce9"}, r"data=caf\\xe9 is not UTF-8.* name a link to it"),
        ({"mask_ratio": 0.5}, "mask_ratio is a setting of task=mae, and the task is classify; leave mask_ratio out"),
        ({"decoder_dim": 16}, "decoder_dim is a setting of task=mae"),
        ({"decoder_depth": 2}, "decoder_depth is a setting of task=mae"),
        ({"decoder_heads": 2}, "decoder_heads is a setting of task=mae"),
        ({"normalize_pixels": True}, "normalize_pixels is a setting of task=mae"),
        ({"gray": "dct", "gray_masked": "all"}, "gray_masked is a setting of task=mae"),
        ({"task": "mae", "gray_masked": "all"}, "gray_masked is a setting of graying"),
        ({"epsilon": 0.5}, "epsilon is a setting of graying.*add gray=dct"),
        ({"restore_scale": False}, "restore_scale is a setting of graying"),
        ({"gray_autocast": True}, "gray_autocast is a setting of graying"),
        ({"gray": "svd", "gray_autocast": True}, "gray_autocast is for gray=dct"),
        ({"data": "digit"}, "data=digit: there is no such folder; did you mean digits"),
        ({"data": "cifar1:photos"}, "data=cifar1:photos: there is no source 'cifar1'; did you mean cifar10"),
        ({"data": "no/such/folder"}, "data=no/such/folder: there is no such folder .*or one of cifar10:PATH"),
        ({"cache_limit": 0}, "digits are embedded and never streamed"),
        ({"auto_augment": "rand-m9"}, "digits are embedded: leave it empty"),
        ({"model": "local-dir:no/such", "model_kwargs": {}}, "local-dir:no/such: there is no no/such/config.json"),
        ({"model": "convmixer_768_32", "model_kwargs": {"dim": 8}, "pretrained": True}, "are of its own size"),
        ({"sched": "onecycle", "min_lr": 1e-5}, "min_lr would be ignored: sched=onecycle"),
        ({"probe_sites": ["sa", "+mpl"], "probe_every": 5}, "no site is called '.mpl'; did you mean .mlp"),
        ({"probe_exact": "float64"}, "probe_exact is a setting of the probe, which is off; add probe_every=100"),
        ({"checkpoint": "no/such.safetensors"}, "there is no checkpoint no/such.safetensors"),
        ({"checkpoint": "/"}, "the checkpoint / is a folder; name the file"),
        ({"checkpoint": __file__, "pretrained": True}, "two sources of weights"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(make_config: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes).check()


@pytest.mark.parametrize(
    "changes",
    [
        {"image_size": 16, "model_kwargs": {"dynamic_img_size": True, "img_size": 8}},
        {"image_size": 48, "model": "swin_tiny_patch4_window7_224", "model_kwargs": {"strict_img_size": False}},
        {"image_size": 40, "model": "pvt_v2_b0", "model_kwargs": {}},
        {"model_kwargs": {"img_size": 224, "dynamic_img_size": True, "dynamic_img_pad": True}},
        {"image_size": 16, "model_kwargs": {"img_size": [16, 16]}},
        {"task": "mae", "mask_ratio": 0.5, "decoder_dim": 16, "normalize_pixels": True, "gray": "svd", "epsilon": 0.5},
        {"task": "mae", "gray": "dct", "gray_masked": "all"},
        {"opt": "adan", "opt_betas": [0.9, 0.95, 0.99]},
        {"layer_decay": 0.7},
        {"data": "folder:photos", "cache_limit": 0, "auto_augment": "rand-m9"},
        {"checkpoint": __file__},
        {"probe_sites": ["*mlp", "embed"], "probe_every": 5},
        {"attention": "", "attention_kwargs": {}, "remove_skips": [], "layer_scale": None, "opt_betas": []},
    ],
)
def test_what_can_be_trained_is_not_refused(make_config: Make, changes: dict[str, Any]) -> None:
    make_config(**changes).check()


def test_what_a_recipe_sets_may_lie_idle_and_what_was_given_may_not() -> None:
    """Its decoder and its betas came with it; nobody who probes its features, or takes another optimiser, gave them."""
    config = recipe("mae_base", scale="smoke", task="linear_probe", checkpoint=__file__, opt="sgd")
    assert config.decoder_dim != Config().decoder_dim
    config.check()
    for value in (48, config.decoder_dim, Config().decoder_dim):  # whatever the value is
        with pytest.raises(ValueError, match="decoder_dim is a setting of task=mae"):
            config.changed({"decoder_dim": value}).check()
    with pytest.raises(ValueError, match="opt_betas would be ignored"):
        config.changed({"opt_betas": [0.9, 0.95]}).check()


@pytest.mark.parametrize("name", ["mae_base", "mae_base_probe", "lra_text"])
def test_layers_decay_where_there_are_layers_to_tell_apart(name: str) -> None:
    config = recipe(name, scale="smoke", **({"checkpoint": __file__} if name == "mae_base_probe" else {}))
    config.changed({"layer_decay": 0.7}, given=False).check()  # as of mae_base_finetune, with another task
    with pytest.raises(ValueError, match=f"layer_decay would be ignored: task={config.task} has one rate for all"):
        config.changed({"layer_decay": 0.7}).check()


def test_a_warm_up_in_steps_takes_the_place_of_a_recipes_epochs() -> None:
    config = recipe("vit_tiny", scale="lab", warmup_steps=100)
    assert config.warmup_epochs
    config.check()


@pytest.mark.parametrize(("epochs", "steps"), list(Config.takes_the_place_of.items()))
def test_a_length_in_epochs_and_in_steps_is_refused_not_ignored(epochs: str, steps: str) -> None:
    config = recipe("vit_tiny", scale="smoke", **{steps: 5})
    config.check()
    with pytest.raises(ValueError, match=f"{epochs} and {steps} are two spellings"):
        config.changed({epochs: 3}).check()


def test_every_field_stands_in_one_group_and_has_a_value_that_is_allowed() -> None:
    names = [name for group in groups(Config) for name in own_fields(group)]
    assert len(names) == len(set(names)) == len(dataclasses.fields(Config))
    assert list(Config().as_json()) == names
    assert [group.__name__ for group in groups(Config)][:3] == ["Config", "ModelSettings", "DataSettings"]
    for field in fields_of(Config):
        assert list(field.broken_by(field.default)) == [], field.name


def test_the_tasks_of_a_configuration_are_those_that_can_be_built() -> None:
    from wellcond.train import tasks

    assert TASK_KINDS.keys() == tasks.TASKS.keys()
    for group in groups(Config):
        assert set(group.tasks) <= set(TASK_KINDS)


def test_a_configuration_is_read_without_torch() -> None:
    """Completion in a shell, and --settings, answer at once."""
    program = "import sys; import wellcond.train.config, wellcond.train.recipes; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_checking_draws_no_random_numbers(make_config: Make) -> None:
    before = torch.get_rng_state()
    make_config().check()
    assert torch.equal(torch.get_rng_state(), before)


WANT_PACKAGES = ("bnb", "fused", "kron")


@pytest.mark.parametrize("name", [name for name in list_optimizers() if not name.startswith(WANT_PACKAGES)])
def test_an_optimiser_that_is_not_refused_can_step(make_config: Make, name: str) -> None:
    """Those that need more than gradients of the first order say so beforehand, whichever timm adds."""
    try:
        make_config(opt=name).check()
    except ValueError as error:
        assert "second derivatives" in str(error)  # noqa: PT017
        return
    model = torch.nn.Linear(4, 4)
    optimizer = create_optimizer_v2(model, opt=name, lr=1e-3, weight_decay=0.05)
    model(torch.ones(3, 4)).square().sum().backward()
    optimizer.step()


def test_a_batch_is_divided_among_processes(make_config: Make) -> None:
    with pytest.raises(ValueError, match="multiple of 3 processes"):
        make_config().check(world=3)
    make_config(shard=True).check(world=2)


def test_modes_of_the_compiler_are_torchs(make_config: Make) -> None:
    known = torch._inductor.list_mode_options()
    for mode in (*COMPILE_MODES[1:], *GRAPH_MODES):
        config = make_config(compile=True, compile_mode=mode)
        if known[mode].get("triton.cudagraphs", False):
            with pytest.raises(ValueError, match=f"compile_mode can be .* not '{mode}' .*step_graph"):
                config.check()
        else:
            config.check()
