"""Choose what the user has not set, to suit data and machine: image size, patch, batch, length, precision.

    config = recipe("vit_tiny", data="photos")
    config, said = choose(config, device="cpu", scale="lab")
    said      # ["image size: 128 pixels (the pictures have 360, …); to change it: --set image_size=N", …]

A `lab` recipe is made for CIFAR's 32 pixels. Image files can have any size, so their number and size are looked up
first. What the user gave (`Config.given`) is never overridden, and a resumed run keeps its own choices. Choices depend
only on the data and the kind of device, so that the same command means the same run.
"""

import math
from collections.abc import Mapping
from typing import Any

from wellcond.data.sources import Looked, look_at
from wellcond.train.config import IMAGE_TASKS, Config, model_size
from wellcond.train.folder import fixed_settings
from wellcond.train.recipes import bearable

__all__ = ["choose"]

SIZES: dict[str, tuple[int, ...]] = {"cpu": (32, 64, 128), "cuda": (32, 64, 96, 128, 160, 192, 224)}
"""The largest size that the pictures reach is taken. On a CPU all sizes give 64 patches and cost the same."""
PATCHES, IN_A_ROW = (16, 8, 4, 2, 1), 8  # the largest patch that leaves at least this many in a row is taken
PASSES = 10_000
"""Pictures that a CPU passes through the model over all epochs; a core manages some 30 a second in a ViT-Tiny."""
LEAST_STEPS, LEAST_BATCH = 10, 8  # steps per epoch, at least: a small set gets small batches
COMPILED_STEPS = 1000  # with fewer, compiling takes longer than it saves
FORM = ("img_size", "patch_size", "window_size")  # settings of a model that follow from the image size
NAMED = 6  # classes named to the user


def choose(
    config: Config, *, device: str, scale: str, world: int = 1, before: Mapping[str, Any] | None = None
) -> tuple[Config, list[str]]:
    """Adapt a configuration to its data and `device` ("cpu", "cuda"); return it and a line for the user per choice.

    `before` is the configuration of the run that this would resume, if there is one. Raises ValueError for what cannot
    be trained, before looking at the data, which may take long.
    """
    said: list[str] = []
    same = before if before and all(before.get(key) == getattr(config, key) for key in SAME) else {}
    if config.kind in IMAGE_TASKS and scale != "paper":
        config = _follow(config)
        if "data" in config.given:
            config.check(world=world, begun=before is not None)
            if looked := look_at(config.data, options=config.data_kwargs):
                choices = _Choices(config, looked, device, world, same)
                config, said = choices.made(whole=scale == "lab")
    suited = bearable(config, device)
    kept = {name: value for name, value in _machines_of(suited, before or {}).items() if name not in config.given}
    suited = suited.changed(kept, given=False)
    where = "on a CPU" if device == "cpu" else "here"
    if suited.amp_dtype != config.amp_dtype or "amp_dtype" in kept or (said and "amp_dtype" not in config.given):
        why = f"half precision is no faster {where}" if suited.amp_dtype == "float32" else f"the fastest {where}"
        why = AS_BEFORE if "amp_dtype" in kept else why
        said.append(_line("precision", suited.amp_dtype, why, "--amp-dtype float32, tf32, bfloat16 or float16"))
    if "compile" in kept:
        value, other = ("yes", "false") if suited.compile else ("no", "true")
        said.append(_line("compiled", value, AS_BEFORE, f"--set compile={other}"))
    elif suited.compile != config.compile:
        said.append(_line("compiled", "no", f"it does not pay {where}", "--set compile=true"))
    elif suited.compile and said and "compile" not in config.given:
        said.append(_line("compiled", "yes", "the first step takes up to a minute", "--set compile=false"))
    return suited, said


MACHINE = {"amp_dtype", "compile"}  # chosen for a machine


def _machines_of(config: Config, before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the choices of the machine that a run began on, if it differs from `config` in nothing else."""
    mine = fixed_settings(config.as_json())
    differ = {name for name, value in mine.items() if before.get(name, value) != value} - {"data"}  # it may be moved
    return {name: before[name] for name in differ} if differ <= MACHINE else {}


SAME = ("recipe", "data", "model")
AS_BEFORE = "as this run began"


class _Choices:
    """Makes the choices for a data set one after the other, and keeps a line about each."""

    def __init__(self, config: Config, looked: Looked, device: str, world: int, before: Mapping[str, Any]) -> None:
        self.config, self.looked, self.device, self.before = config, looked, device, before
        self.parts = world * config.accumulate
        self.count = max(1, round(looked.train * (1 - config.holdout)))
        self.said = [_about(looked)]

    def made(self, *, whole: bool) -> tuple[Config, list[str]]:
        """Make all choices; without `whole` only that of the batch size, which must not exceed the data set."""
        if whole:
            self._image_size()
        self._batches()
        if whole:
            self._length()
        return self.config, self.said

    def _put(self, field: str, value: Any, what: str, shown: str, why: str, how: str) -> None:
        if field in self.config.given:
            return
        if field in self.before and self.before[field] != value:
            value, shown, why = self.before[field], f"{self.before[field]}", AS_BEFORE
        self.config = self.config.changed({field: value}, given=False)
        self.said.append(_line(what, shown, why, how))

    def _image_size(self) -> None:
        config, side = self.config, self.looked.side
        if config.pretrained and "model_kwargs" not in config.given:  # pretrained: their own image and patch size
            kept = {key: value for key, value in config.model_kwargs.items() if key not in FORM}
            self.config = config = config.changed({"model_kwargs": kept}, given=False)
        sizes = SIZES.get(self.device, SIZES["cuda"])
        size, why = max((one for one in sizes if one <= side), default=sizes[0]), f"the pictures have {side}"
        if side >= 2 * size:
            why += ", and more would be slow on a CPU" if self.device == "cpu" else ", and more would be slow"
        if ("model_kwargs" in config.given or config.pretrained) and (own := model_size(config)):
            size, why = own[0], "what the model is for"
        self._put("image_size", size, "image size", f"{size} pixels", why, "--set image_size=N")
        form = _form(self.config)
        if form and not self.config.pretrained:
            patch, kept = form["patch_size"], {**self.config.model_kwargs, **form}
            how = "--model-kwargs " + ",".join(f"{key}={value}" for key, value in (kept | {"patch_size": "N"}).items())
            why = f"{(self.config.image_size // patch) ** 2} tokens a picture"
            self._put("model_kwargs", kept, "patch", f"{patch} × {patch} pixels", why, how)

    def _batches(self) -> None:
        before = self.config.batch_size
        batch = 2 ** int(math.log2(max(1, self.count // LEAST_STEPS)))
        batch = min(max(LEAST_BATCH, batch), self.count)
        batch -= batch % math.lcm(2, self.parts)  # mixup mixes pairs
        if not 0 < batch < before:
            return
        self._put("batch_size", batch, "batch size", f"{batch}", f"for {self.count:,} pictures", "--batch-size N")
        rate = float(f"{self.config.lr * math.sqrt(self.config.batch_size / before):.2g}")
        self._put("lr", rate, "learning rate", f"{rate:g}", f"for batches of {self.config.batch_size}", "--lr X")

    def _length(self) -> None:
        config, epochs = self.config, max(1, PASSES // self.count)
        if self.device == "cpu" and epochs < config.epochs and not config.steps:
            why = f"{epochs * self.count:,} pictures through the model; a core takes some 30 a second in a ViT-Tiny"
            self._put("epochs", epochs, "epochs", f"{epochs}", why, f"--epochs {config.epochs}")
        elif self.before.get("epochs", config.epochs) != config.epochs and not config.steps:
            self._put("epochs", config.epochs, "epochs", "", "", f"--epochs {config.epochs}")
        steps = self.config.steps or self.config.epochs * self.count // self.config.batch_size
        if self.device != "cpu" and config.compile and steps < COMPILED_STEPS:
            self._put("compile", False, "compiled", "no", "it takes longer than so few steps", "--set compile=true")


def _follow(config: Config) -> Config:
    """If the user gave only the image size or only the model's, set the other to match."""
    sizes = {"image_size", "model_kwargs"} & config.given
    if sizes == {"image_size"} and (form := _form(config)):
        return config.changed({"model_kwargs": {**config.model_kwargs, **form}}, given=False)
    size = config.model_kwargs.get("img_size")
    return config.changed({"image_size": size}, given=False) if sizes == {"model_kwargs"} and size else config


def _form(config: Config) -> dict[str, int]:
    """Return the size settings of the recipe's model for this image size: the ones it already has, with new values."""
    size, form = config.image_size, config.model_kwargs
    if "patch_size" not in form:
        return {}
    if "window_size" in form:  # a Swin
        patch = 4 if size >= 64 else 2
        return {"img_size": size, "patch_size": patch, "window_size": 7 if size // patch % 7 == 0 else 4}
    if "img_size" not in form:  # a ConvMixer, which takes images of any size
        return {"patch_size": max(1, size // 16)}
    patch = next((patch for patch in PATCHES if size % patch == 0 and size // patch >= IN_A_ROW), 1)
    return {"img_size": size, "patch_size": patch}


def _about(looked: Looked) -> str:
    named = ", ".join(looked.classes[:NAMED]) + (", …" if len(looked.classes) > NAMED else "")
    parts = f"{looked.train:,} pictures to train on and {looked.val:,} to validate"
    return f"data: {parts}, of {len(looked.classes)} classes ({named}){f'; {looked.note}' if looked.note else ''}"


def _line(what: str, value: str, why: str, how: str) -> str:
    return f"{what}: {value} ({why}); to change it: {how}"
