"""Recipes: functions that return a configuration. A variant calls one and changes fields.

    config = recipe("vit_tiny", scale="lab", data="cifar10:data")       # or wellcond train vit_tiny --set …

`paper` is the papers' own setting: Always Skip Attention names no hyper-parameters for supervised training, so there it
is DeiT's recipe (300 epochs, batch 1024, AdamW at 5e-4 per 512 images, RandAugment, mixup, cutmix, erasing).
`lab` takes minutes on one GPU, at 32 or 64 pixels; `smoke` takes seconds on a CPU, with the embedded digits.

The recipes of the Long Range Arena use Skyformer's setting at both `lab` and `paper`, as one GPU trains it in minutes.
Two things differ: all tokens within a sequence's length count (`data_kwargs=mask=published` hides black pixels, as the
published code does), and half precision is bfloat16 (published: `amp_dtype=float16`). At `smoke`, models are small and
data are embedded or generated.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from wellcond.train.config import Config
from wellcond.words import meant

__all__ = ["RECIPES", "SCALES", "bearable", "recipe"]

SCALES = ("smoke", "lab", "paper")
Recipe = Callable[[str], Config]
RECIPES: dict[str, Recipe] = {}
"""Every recipe by its name: a function from a scale to a configuration."""


def recipe(name: str, *, scale: str = "lab", **changes: Any) -> Config:
    """Return the configuration of a recipe at a scale. Raises ValueError, with the known names, for unknown ones.

    What the recipe chooses counts as a default; only `changes` count as given.
    """
    if name not in RECIPES:
        raise ValueError(
            f"there is no recipe {name!r}{meant(name, RECIPES)} (the recipes are {', '.join(sorted(RECIPES))})"
        )
    if scale not in SCALES:
        raise ValueError(f"the scales are {', '.join(SCALES)}, not {scale!r}{meant(scale, SCALES)}")
    return RECIPES[name](scale).changed({"recipe": name}).as_defaults().changed(changes)


def bearable(config: Config, device: str) -> Config:
    """Adapt a recipe to a device: on a CPU, no compiling and no half precision, which cost time there, unless given.

    An old GPU uses float16 where a recipe has bfloat16; without Triton nothing is compiled.
    """
    usual: dict[str, Any] = {"compile": False, "amp_dtype": "float32"}
    if device != "cpu":
        usual = {} if not config.compile or _has_triton() else {"compile": False}
        usual |= {"amp_dtype": "float16"} if config.amp_dtype == "bfloat16" and not _has_bfloat16(device) else {}
    return config.changed({name: value for name, value in usual.items() if name not in config.given}, given=False)


def _has_triton() -> bool:
    return find_spec("triton") is not None


def _has_bfloat16(device: str) -> bool:
    import torch

    return not (device == "cuda" and torch.cuda.is_available()) or torch.cuda.is_bf16_supported(
        including_emulation=False
    )


def _recipe(function: Recipe) -> Recipe:
    RECIPES[function.__name__] = function
    return function


def _deit(model: str, **changes: Any) -> Config:
    """DeiT's training: 300 epochs on ImageNet-1K at 224 pixels; about 81 % for a ViT-B, after days on 8 GPUs."""
    settings = {
        "data": "folder:imagenet",
        "image_size": 224,
        "epochs": 300,
        "batch_size": 1024,
        "lr": 1e-3,
        "weight_decay": 0.05,
        "warmup_epochs": 5,
        "warmup_lr": 1e-6,
        "min_lr": 1e-5,
        "drop_path": 0.1,
        "scale_min": 0.08,
        "flip": 0.5,
        "auto_augment": "rand-m9-mstd0.5-inc1",
        "erasing": 0.25,
        "mixup": 0.8,
        "cutmix": 1.0,
        "label_smoothing": 0.1,
        "amp_dtype": "bfloat16",
        "compile": True,
        "workers": 10,
    }
    return Config(model=model).changed({**settings, **changes})


def _lab(model: str, model_kwargs: dict[str, Any], **changes: Any) -> Config:
    """Minutes on one GPU: small images from a cache on the GPU, light augmentation, 100 epochs."""
    settings = {
        "model_kwargs": model_kwargs,
        "data": "cifar10:data",
        "image_size": 32,
        "epochs": 100,
        "batch_size": 512,
        "lr": 1e-3,
        "warmup_epochs": 5,
        "padding": 4,
        "flip": 0.5,
        "amp_dtype": "bfloat16",
        "compile": True,
    }
    return Config(model=model).changed({**settings, **changes})


def _smoke(model: str, model_kwargs: dict[str, Any], **changes: Any) -> Config:
    """Seconds on a CPU: the 1,797 digits of scikit-learn, enough to see that it trains."""
    settings = {
        "model_kwargs": model_kwargs,
        "data": "digits",
        "image_size": 32,
        "epochs": 1,
        "batch_size": 128,
        "lr": 1e-3,
        "padding": 2,
        "log_every": 5,
    }
    return Config(model=model).changed({**settings, **changes})


TINY_VIT = {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 64, "num_heads": 2}


@_recipe
def digits(scale: str) -> Config:
    """A small ViT on the embedded digits at 8 × 8 pixels: 20 epochs on a CPU."""
    del scale  # the same at every scale
    return Config(
        model="vit_tiny_patch16_224",
        model_kwargs={"img_size": 8, "patch_size": 2, "depth": 4, "embed_dim": 64, "num_heads": 4},
        data="digits",
        image_size=8,
        epochs=20,
        batch_size=64,
        lr=3e-3,
        warmup_epochs=1,
        log_every=10,
    )


def _vit(name: str, scale: str) -> Config:
    if scale == "paper":
        return _deit(name)
    if scale == "smoke":
        return _smoke(name, TINY_VIT)
    return _lab(name, {"img_size": 32, "patch_size": 4})


@_recipe
def vit_tiny(scale: str) -> Config:
    return _vit("vit_tiny_patch16_224", scale)


@_recipe
def vit_small(scale: str) -> Config:
    return _vit("vit_small_patch16_224", scale)


@_recipe
def vit_base(scale: str) -> Config:
    return _vit("vit_base_patch16_224", scale)


@_recipe
def swin_small(scale: str) -> Config:
    if scale == "paper":
        return _deit("swin_small_patch4_window7_224", drop_path=0.3, warmup_epochs=20, clip_grad=5.0)
    if scale == "smoke":
        small = {
            "img_size": 32,
            "patch_size": 2,
            "window_size": 4,
            "embed_dim": 32,
            "depths": [2, 2],
            "num_heads": [2, 4],
        }
        return _smoke("swin_tiny_patch4_window7_224", small)
    return _lab("swin_small_patch4_window7_224", {"img_size": 32, "patch_size": 2, "window_size": 4})


@_recipe
def cait_s24(scale: str) -> Config:
    if scale == "paper":
        return _deit("cait_s24_224", epochs=400)
    if scale == "smoke":
        return _smoke("cait_xxs24_224", {"img_size": 32, "patch_size": 8, "depth": 2, "embed_dim": 64, "num_heads": 2})
    return _lab("cait_s24_224", {"img_size": 32, "patch_size": 4})


@_recipe
def pvt_v2_b3(scale: str) -> Config:
    if scale == "paper":
        return _deit("pvt_v2_b3", drop_path=0.3)
    if scale == "smoke":
        small = {"depths": [1, 1, 1, 1], "embed_dims": [32, 32, 64, 64], "num_heads": [1, 1, 2, 2]}
        return _smoke("pvt_v2_b0", small)
    return _lab("pvt_v2_b3", {})


@_recipe
def convmixer(scale: str) -> Config:
    """ConvMixer, 256 wide and 8 deep, kernel 5: the paper's "Tiny" is not specified further."""
    size = {"dim": 256, "depth": 8, "kernel_size": 5}
    if scale == "paper":
        return _deit(
            "convmixer_768_32", model_kwargs={**size, "patch_size": 14}, lr=1e-2, weight_decay=1e-2, drop_path=0.0
        )
    if scale == "smoke":
        return _smoke("convmixer_768_32", {"dim": 32, "depth": 2, "kernel_size": 5, "patch_size": 4})
    return _lab("convmixer_768_32", {**size, "patch_size": 2})


def _masked(scale: str) -> dict[str, Any]:
    if scale == "smoke":
        return {"decoder_dim": 32, "decoder_depth": 1, "decoder_heads": 2}
    return {"decoder_dim": 192, "decoder_depth": 4, "decoder_heads": 6}


@_recipe
def mae_base(scale: str) -> Config:
    """Masked autoencoding. At `paper` the setting of Table 5: batch 2048, base lr 1.5e-4 per 256 images, 400 epochs."""
    if scale == "paper":
        return _deit(
            "vit_base_patch16_224", task="mae", epochs=400, batch_size=2048, lr=1.5e-4 * 2048 / 256, warmup_epochs=40,
            opt_betas=(0.9, 0.95), scale_min=0.2, drop_path=0.0, auto_augment="", erasing=0.0, mixup=0.0, cutmix=0.0,
            label_smoothing=0.0,
        )  # fmt: skip
    return _vit("vit_tiny_patch16_224", scale).changed({"task": "mae", "opt_betas": [0.9, 0.95], **_masked(scale)})


@_recipe
def mae_base_finetune(scale: str) -> Config:
    """Fine-tuning from a masked autoencoder (checkpoint=…). At `paper`: batch 512, base lr 5e-4 per 256, 100 epochs."""
    if scale == "paper":
        return _deit(
            "vit_base_patch16_224", epochs=100, batch_size=512, lr=5e-4 * 512 / 256, layer_decay=0.65, warmup_epochs=5,
        )  # fmt: skip
    return _vit("vit_tiny_patch16_224", scale).changed({"layer_decay": 0.85})


@_recipe
def mae_base_probe(scale: str) -> Config:
    """A linear head on a masked autoencoder's frozen features (checkpoint=…). At `paper` MAE's own setting, as the
    paper gives none: LARS with base lr 0.1 per 256 images, batch 16384, 90 epochs."""
    usual = {"task": "linear_probe", "weight_decay": 0.0}
    if scale == "paper":
        return _deit(
            "vit_base_patch16_224", epochs=90, batch_size=16384, opt="lars", lr=0.1 * 16384 / 256, warmup_epochs=10,
            min_lr=0.0, drop_path=0.0, auto_augment="", erasing=0.0, mixup=0.0, cutmix=0.0, label_smoothing=0.0,
            **usual,
        )  # fmt: skip
    return _vit("vit_tiny_patch16_224", scale).changed(usual)


# ---- the Long Range Arena


def _arena(
    scale: str, model: str, data: str, *, batch: int, lr: float, warmup: int, every: int, batches: int, made_up: str,
    small: dict[str, Any] | None = None, few: int = 32,
) -> Config:  # fmt: skip
    """Skyformer's training of 50,000 steps, which every `every` steps validates on the next `batches` batches."""
    published: dict[str, Any] = {
        "task": "sequence",
        "model": model,
        "data": data,
        "data_kwargs": {"mask": "fixed"},
        "steps": 50_000,
        "batch_size": batch,
        "lr": lr,
        "weight_decay": 0.0,
        "opt_betas": (0.9, 0.999),
        "opt_eps": 1e-6,
        "clip_value": 1.0,
        "sched": "onecycle",
        "warmup_steps": warmup,
        "amp_dtype": "bfloat16",
        "compile": True,
        "eval_steps": every,
        "eval_batches": batches,
        "log_every": 100,
        "save_every": 5000,
        "keep_best": True,
        "keep_best_after": 0.2,
    }
    smoke = {
        "model_kwargs": {"dim": 32, "mlp_dim": 64, "attention_dropout": 0.0},
        "data": made_up,
        "data_kwargs": small or {},
        "steps": 30 if few == 32 else 10,
        "batch_size": few,
        "lr": 1e-3,
        "warmup_steps": 5,
        "amp_dtype": "float32",
        "compile": False,
        "eval_steps": 10,
        "eval_batches": 0,
        "log_every": 5,
        "save_every": 10,
    }
    config = Config().changed(published)
    return config.changed(smoke) if scale == "smoke" else config


@_recipe
def lra_listops(scale: str) -> Config:
    return _arena(
        scale, "lra_listops", "lra_listops", batch=32, lr=1e-4, warmup=1000, every=500, batches=62,
        made_up="lra_listops", small={"samples": 300, "length": 128},
    )  # fmt: skip


@_recipe
def lra_text(scale: str) -> Config:
    return _arena(
        scale, "lra_text", "lra_text:data", batch=16, lr=1e-4, warmup=80, every=500, batches=200,
        made_up="made_up_text",
    )  # fmt: skip


@_recipe
def lra_retrieval(scale: str) -> Config:
    return _arena(
        scale, "lra_retrieval", "lra_retrieval:data", batch=16, lr=2e-4, warmup=800, every=1000, batches=300,
        made_up="made_up_pairs",
    )  # fmt: skip


@_recipe
def lra_pathfinder(scale: str) -> Config:
    return _arena(
        scale, "lra_pathfinder", "lra_pathfinder", batch=128, lr=2e-4, warmup=312, every=500, batches=156,
        made_up="lra_pathfinder", small={"samples": 60}, few=4,
    )  # fmt: skip


@_recipe
def lra_image(scale: str) -> Config:
    return _arena(
        scale, "lra_image", "lra_image:data", batch=256, lr=1e-4, warmup=175, every=50, batches=20,
        made_up="digit_tokens",
    )  # fmt: skip


@_recipe
def imdb_pairs(scale: str) -> Config:
    """A stand-in for Retrieval, for when its texts are not available."""
    return lra_retrieval(scale).changed({} if scale == "smoke" else {"data": "imdb_pairs:data"})
