"""A configuration says what is wrong with it before anything starts, and survives JSON."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch._inductor

from wellcond.train.config import COMPILE_MODES, GRAPH_MODES, Config

Make = Callable[..., Config]


@pytest.mark.parametrize(
    ("setting", "nearest"),
    [("xyzzy=1", "there are"), ("epoch=3", "'epochs'"), ("batchsize=3", "'batch_size'"), ("lrr=1", "'lr'")],
)
def test_an_unknown_setting_names_the_nearest(setting: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=f"no setting.*({nearest})"):
        Config().changed([setting])


def test_a_setting_without_a_value_is_refused() -> None:
    for text in ("lr", "=3", ""):
        with pytest.raises(ValueError, match="name=value"):
            Config().changed([text])


@pytest.mark.parametrize(
    ("setting", "name", "value"),
    [
        ("lr=3e-4", "lr", 3e-4),
        ("epochs=7", "epochs", 7),
        ("batch-size=64", "batch_size", 64),
        ("compile=true", "compile", True),
        ("compile=no", "compile", False),
        ("compile_mode=default", "compile_mode", "default"),
        ("remove_skips=sa,mlp", "remove_skips", ("sa", "mlp")),
        ("remove_skips=", "remove_skips", ()),
        ("opt_betas=0.9,0.95", "opt_betas", (0.9, 0.95)),
        ("ema_decay=none", "ema_decay", None),
        ("ema_decay=0.99", "ema_decay", 0.99),
        ("model_kwargs=img_size=32,global_pool=avg", "model_kwargs", {"img_size": 32, "global_pool": "avg"}),
        ("model_kwargs={'depths': [1, 2]}", "model_kwargs", {"depths": [1, 2]}),
        ("gray=dct", "gray", "dct"),
        ("data=cifar10:a=b", "data", "cifar10:a=b"),
    ],
)
def test_text_becomes_the_type_of_its_field(setting: str, name: str, value: Any) -> None:
    found = getattr(Config().changed([setting]), name)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("epochs=1.5", "a whole number"),
        ("epochs=many", "a whole number"),
        ("lr=fast", "a number"),
        ("compile=maybe", "true or false"),
        ("model_kwargs=depth", "key=value"),
        ("opt_betas=a,b", "numbers"),
    ],
)
def test_text_of_another_type_is_refused(setting: str, word: str) -> None:
    with pytest.raises(ValueError, match=f"{setting.partition('=')[0]} must be {word}"):
        Config().changed([setting])


def test_numbers_of_json_are_checked_too() -> None:
    for wrong in (1.5, True):
        with pytest.raises(ValueError, match="epochs must be a whole number"):
            Config().changed({"epochs": wrong})
    assert type(Config().changed({"lr": 1}).lr) is float


def test_json_gives_back_the_same_configuration(make_config: Make) -> None:
    config = make_config(remove_skips=["sa"], opt_betas=[0.9, 0.95], ema_decay=0.99, layer_scale=1.0, gray="svd")
    again = Config.from_json(json.loads(json.dumps(config.as_json())))
    assert again == config
    assert again.differences(config) == {}


def test_differences_are_named_with_both_values(make_config: Make) -> None:
    one, other = make_config(lr=1e-3), make_config(lr=2e-3, remove_skips=["mlp"])
    assert one.differences(other) == {"lr": (1e-3, 2e-3), "remove_skips": ([], ["mlp"])}


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
        ({"remove_skips": ["sa", "ffn"]}, "remove_skips can be 'sa', 'mlp', not 'ffn'"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"keep": 0}, "keep must be at least 1"),
        ({"decoder_depth": 0}, "decoder_depth must be at least 1"),
        ({"lr": -1.0}, "lr must not be negative"),
        ({"lr": float("nan")}, "lr must not be negative"),
        ({"mixup": -0.1}, "mixup must not be negative"),
        ({"probe_every": -1}, "probe_every must not be negative"),
        ({"label_smoothing": 1.0}, "label_smoothing is a share"),
        ({"holdout": 1.0}, "holdout is a share"),
        ({"flip": 1.1}, "flip is a share"),
        ({"epsilon": 0.0}, "epsilon must be in"),
        ({"epsilon": 1.5}, "epsilon must be in"),
        ({"scale_min": 0.0}, "scale_min must be in"),
        ({"ema_decay": 1.0}, "ema_decay must be"),
        ({"clip_grad": 0.0}, "clip_grad must be above 0"),
        ({"layer_decay": 1.5}, "layer_decay must be"),
        ({"opt_betas": [0.9, 1.0]}, "opt_betas are"),
        ({"warmup_epochs": 3}, "warmup_epochs=3 is longer"),
        ({"accumulate": 3}, "multiple of 1 processes × accumulate=3"),
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
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused(make_config: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(**changes).check()


def test_a_batch_is_divided_among_processes(make_config: Make) -> None:
    with pytest.raises(ValueError, match="multiple of 3 processes"):
        make_config().check(world=3)
    make_config(shard=True).check(world=2)


def test_modes_of_the_compiler_are_torchs(make_config: Make) -> None:
    known = torch._inductor.list_mode_options()
    for mode in (*COMPILE_MODES[1:], *GRAPH_MODES):
        config = make_config(compile=True, compile_mode=mode)
        if known[mode].get("triton.cudagraphs", False):
            with pytest.raises(ValueError, match="makes CUDA graphs, as step_graph does"):
                config.check()
        else:
            config.check()
