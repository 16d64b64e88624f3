"""What of a configuration cannot be trained, or would be ignored in silence: found before anything starts.

    next(problems(config, world=8), None)         # a sentence that names the mistake and the way out, or None

What a recipe sets is not refused where another setting makes it idle: nobody asked for it.
"""

import difflib
import math
import re
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from wellcond.data.finding import is_utf8, printable
from wellcond.models.build import say_too_small
from wellcond.train.config import AMP_DTYPES, COMPILE_MODES, GRAPH_MODES, SCHEDULES, TASKS, Config, as_seconds

__all__ = ["problems"]


def problems(config: Config, *, world: int) -> Iterator[str]:
    """What is wrong with `config` for so many processes, one sentence each; the first may be the cause of others."""
    for name, value in vars(config).items():
        if isinstance(value, str) and not is_utf8(value):
            yield f"{name}={printable(value)} is not UTF-8, as config.json has to be; rename it, or name a link to it"
    yield from _choices("task", config.task, TASKS)
    yield from _choices("amp_dtype", config.amp_dtype, AMP_DTYPES)
    yield from _choices("on_divergence", config.on_divergence, ("stop", "rollback"))
    yield from _choices("save_format", config.save_format, ("auto", "whole", "sharded"))
    yield from _choices("resume", config.resume, ("same", "force"))
    if config.time_limit:
        try:
            as_seconds(config.time_limit)
        except ValueError as error:
            yield f"time_limit {error}"
    yield from _choices("gray", config.gray, ("", "svd", "dct"))
    yield from _choices("gray_masked", config.gray_masked, ("visible", "all"))
    yield from _choices("sched", config.sched, SCHEDULES)
    if config.compile_mode in GRAPH_MODES:
        yield (
            f"compile_mode={config.compile_mode} makes CUDA graphs, as step_graph does of a whole pass; "
            "leave it out, or take max-autotune-no-cudagraphs"
        )
    yield from _choices("compile_mode", config.compile_mode, COMPILE_MODES)
    yield from _choices("probe_exact", config.probe_exact, ("float32", "float64", "no"))
    if isinstance(config.probe_every, str) and config.probe_every != "auto":
        yield f"probe_every is a number of steps, 0 for none, or auto; got {config.probe_every!r}"
    if config.probe_exact == "no" and (config.probe_marks or config.probe_every == "auto"):
        yield "probe_exact=no looks at training's own pass: it takes a number of steps, probe_every=100, and no marks"
    yield from _choices("tracker", config.tracker, ("", "tensorboard", "wandb", "trackio"))
    for skip in config.remove_skips:
        yield from _choices("remove_skips", skip, ("sa", "mlp"))
    for name in (
        "epochs",
        "batch_size",
        "accumulate",
        "image_size",
        "log_every",
        "eval_every",
        "keep",
        "probe_samples",
        "decoder_dim",
        "decoder_depth",
        "decoder_heads",
    ):
        if getattr(config, name) < 1:
            yield f"{name} must be at least 1, got {getattr(config, name)}"
    for name in (
        "lr",
        "weight_decay",
        "warmup_epochs",
        "warmup_steps",
        "steps",
        "eval_steps",
        "skip_limit",
        "min_lr",
        "warmup_lr",
        "probe_every",
        "save_every",
        "workers",
        "cache_limit",
        "padding",
        "color_jitter",
        "mixup",
        "cutmix",
    ):
        if getattr(config, name) != "auto" and not (
            math.isfinite(getattr(config, name)) and getattr(config, name) >= 0
        ):
            yield f"{name} must not be negative, got {getattr(config, name)}"
    for name in ("flip", "erasing", "label_smoothing", "drop_path", "mask_ratio", "holdout"):
        if not 0 <= getattr(config, name) < (1.0001 if name in ("flip", "erasing") else 1):
            yield f"{name} is a share from 0 to 1, got {getattr(config, name)}"
    if not 0 < config.epsilon <= 1:
        yield f"epsilon must be in (0, 1], got {config.epsilon}; 1 changes nothing, 0.95 is usual"
    if not 0 < config.scale_min <= 1:
        yield f"scale_min must be in (0, 1], got {config.scale_min}"
    if config.ema_decay is not None and not 0 < config.ema_decay < 1:
        yield f"ema_decay must be between 0 and 1, got {config.ema_decay}"
    if config.warmup_epochs and config.warmup_steps:
        yield "warmup_epochs and warmup_steps are two spellings of one thing; give one of them"
    if config.clip_value is not None and not config.clip_value > 0:
        yield f"clip_value must be above 0, got {config.clip_value}; none does not clip"
    if config.clip_grad is not None and config.clip_value is not None:
        yield "clip_grad clips the gradient's norm and clip_value its values; give one of them"
    if config.clip_grad is not None and not config.clip_grad > 0:
        yield f"clip_grad must be above 0, got {config.clip_grad}; none does not clip"
    if config.layer_decay is not None and not 0 < config.layer_decay <= 1:
        yield f"layer_decay must be in (0, 1], got {config.layer_decay}"
    if not all(0 <= beta < 1 for beta in config.opt_betas):
        yield f"opt_betas are from 0 to below 1, got {config.opt_betas}"
    yield from _combinations(config, world)
    yield from _ignored(config)
    yield from _start(config)
    yield from _optimizer(config)
    yield from _model(config)


def _combinations(config: Config, world: int) -> Iterator[str]:
    """Settings that are possible alone and not together, or that would be ignored in silence."""
    parts = world * config.accumulate
    if config.batch_size % parts:
        yield (
            f"batch_size={config.batch_size} is the number of images in a step over all processes; it must be a "
            f"multiple of {world} processes × accumulate={config.accumulate}"
        )
    if config.task == "mae" and (config.mixup or config.cutmix or config.label_smoothing):
        yield "masked autoencoding has no labels: leave mixup, cutmix and label_smoothing at 0"
    if config.task == "linear_probe" and not (config.checkpoint or config.pretrained):
        yield "a linear probe needs trained features: give checkpoint=… or pretrained=true"
    if config.shard and config.ema_decay is not None:
        yield "an average of weights (ema_decay) of a sharded model is not supported; leave one of them"
    if config.shard and config.amp_dtype == "float16":
        yield "float16 with a scaler is not supported for a sharded model; amp_dtype=bfloat16 needs none"
    if config.shard and world == 1:
        yield "shard=true spreads parameters over processes, and there is one; torchrun starts more"
    if (config.mixup or config.cutmix) and config.batch_size // parts % 2:
        yield f"mixup and cutmix mix pairs, but a process's part of a batch is {config.batch_size // parts} images"
    if config.compile_mode and not config.compile:
        yield f"compile_mode={config.compile_mode} is for a compiled model; set compile=true, too"
    if config.padding and config.scale_min < 1:
        yield "padding and scale_min are two ways to crop; set one of them"
    if config.task == "mae" and not config.mask_ratio > 0:
        yield f"masked autoencoding needs masked patches: mask_ratio is {config.mask_ratio}"
    if config.attention:
        yield from _attention(config)
    if config.attention_kwargs and not config.attention:
        yield "attention_kwargs are for another attention; name it with attention=…"
    if config.layer_scale is not None and not config.remove_skips:
        yield "layer_scale is where LayerScale starts without a skip; name the skip with remove_skips=…"


def _ignored(config: Config) -> Iterator[str]:
    """Settings that nothing would look at."""
    if config.task != "mae":
        names = ("mask_ratio", "normalize_pixels", "gray_masked", "decoder_dim", "decoder_depth", "decoder_heads")
        for name in _asked_for(config, *names):
            yield f"{name} is a setting of masked autoencoding, and the task is {config.task}; leave {name} out"
    if not config.gray:
        for name in _asked_for(config, "epsilon", "gray_masked"):
            yield f"{name} is a setting of graying, and there is none; add gray=dct or gray=svd, or leave {name} out"
    if config.data == "digits":
        for name in _asked_for(config, "cache_limit"):
            yield f"{name} is for images in files; the digits are embedded and never streamed: leave {name} out"
        if config.auto_augment:
            yield (
                f"auto_augment={config.auto_augment} works on images that are streamed from files, and the digits are "
                "embedded: leave it empty (auto_augment=)"
            )


def _asked_for(config: Config, *names: str) -> Iterator[str]:
    """Those of the fields that somebody has set: to another value than the default and than the recipe's."""
    from wellcond.train.recipes import RECIPES, SCALES

    recipes = [RECIPES[config.recipe](scale) for scale in SCALES] if config.recipe in RECIPES else []
    for name in names:
        if all(getattr(config, name) != getattr(usual, name) for usual in (Config(), *recipes)):
            yield name


def _start(config: Config) -> Iterator[str]:
    if not config.checkpoint:
        return
    path = Path(config.checkpoint)
    if path.is_dir():
        yield f"the checkpoint {path} is a folder; name the file of weights in it"
    elif not path.exists():
        yield f"there is no checkpoint {path}; name the file of weights to start from"
    if config.pretrained:
        yield "pretrained and checkpoint are two sources of weights; choose one"


def _attention(config: Config) -> Iterator[str]:
    from wellcond.models.surgery.attention import check_settings

    try:
        check_settings(config.attention, config.attention_kwargs)
    except (ValueError, TypeError) as error:
        yield f"attention={config.attention}: {error}"


def _optimizer(config: Config) -> Iterator[str]:
    from timm.optim import get_optimizer_info, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

    known = [str(name) for name in list_optimizers()]
    name = config.opt.lower().rpartition("_")[2]  # lookahead_adamw is adamw, wrapped
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        yield f"timm knows no optimiser {config.opt!r}{'; did you mean ' + ', '.join(near) + '?' if near else ''}"
        return
    info = get_optimizer_info(name)
    if info.second_order:
        yield f"opt={config.opt} needs second derivatives, which the loop does not take; choose another, e.g. adamw"
        return
    betas = config.opt_betas
    if betas and not info.has_betas:
        for field in _asked_for(config, "opt_betas"):
            yield f"{field} would be ignored: timm gives opt={config.opt} none; leave {field} out"
    elif betas and len(betas) != info.num_betas:
        yield (
            f"opt={config.opt} takes {info.num_betas} numbers as opt_betas, got {len(betas)} "
            f"({', '.join(map(str, betas))}); leave it empty for the optimiser's own"
        )
        return
    yield from _cannot_build(config)


def _cannot_build(config: Config) -> Iterator[str]:
    """Some optimisers want a package or a device that is not there: tried on the smallest model there is."""
    from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
    from torch import nn

    more: dict[str, Any] = {"betas": config.opt_betas} if config.opt_betas else {}
    smallest = nn.utils.skip_init(nn.Linear, 2, 2)  # it draws no random numbers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # said when the training's own is built
            create_optimizer_v2(smallest, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, **more)
    except Exception as error:
        yield f"timm cannot build opt={config.opt}: {' '.join(str(error).split()) or type(error).__name__}"


def _model(config: Config) -> Iterator[str]:
    import timm

    if not config.model.startswith(("hf-hub:", "local-dir:")):
        name = config.model.partition(".")[0]
        if not timm.is_model(name):
            known = timm.list_models()
            near = (
                difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                or [m for m in known if m.startswith(name[:5])][:3]
            )
            yield f"timm knows no model {config.model!r}{'; did you mean ' + ', '.join(near) + '?' if near else ''}"
            return
    size = _size(config)
    if size is not None and size != (config.image_size, config.image_size):
        yield (
            f"image_size={config.image_size}, but {config.model} is built for images of {size[0]} × {size[1]}; give it "
            f"img_size={config.image_size} among its model_kwargs, or set image_size={size[0]}"
        )
    patch = _patch(config)
    if patch is not None and max(patch) > config.image_size and not config.model_kwargs.get("dynamic_img_pad"):
        yield say_too_small(config.model, (config.image_size, config.image_size), patch)


def _patch(config: Config) -> tuple[int, int] | None:
    """A patch's sides, if the settings or the name tell them; other models show theirs when they are built."""
    patch = config.model_kwargs.get("patch_size")
    if patch is None:
        named = re.search(r"_patch(\d+)(?:_|$)", config.model)
        patch = int(named[1]) if named else None
    return _sides(patch)


def _size(config: Config) -> tuple[int, int] | None:
    """The height and width that the model takes and no other; None if it takes any, or that is not known here."""
    import timm

    kwargs = config.model_kwargs
    if kwargs.get("dynamic_img_size") or not kwargs.get("strict_img_size", True):
        return None
    size = kwargs.get("img_size")
    if size is None and not config.model.startswith(("hf-hub:", "local-dir:")):
        known = timm.get_pretrained_cfg(config.model)
        size = known.input_size[-2:] if known is not None and known.fixed_input_size else None
    return _sides(size)


def _sides(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None


def _choices(name: str, value: str, allowed: Iterable[str]) -> Iterator[str]:
    allowed = tuple(allowed)
    if value not in allowed:
        yield f"{name} can be {', '.join(repr(a) for a in allowed)}, not {value!r}"
