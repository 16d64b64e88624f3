"""Every setting of a training, checked before anything starts.

    config = Config(model="vit_tiny_patch16_224", data="digits", epochs=10)
    config = config.changed(["lr=3e-4", "remove_skips=sa", "gray=dct"])      # as --set gives them
    config.check()                                                           # ValueError names what cannot be

A recipe (recipes.py) is a function that returns one. `config.json` in a run's folder holds all of it, enough to repeat
the run.
"""

import ast
import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

__all__ = ["AMP_DTYPES", "COMPILE_MODES", "TASKS", "Config", "as_seconds"]

Task = Literal["classify", "mae", "linear_probe"]
AmpDtype = Literal["float32", "bfloat16", "float16"]
TASKS: tuple[str, ...] = get_args(Task)
AMP_DTYPES: tuple[str, ...] = get_args(AmpDtype)
COMPILE_MODES = ("", "default", "max-autotune-no-cudagraphs")  # torch's
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # torch's, too, which make CUDA graphs of their own
SCHEDULES = ("cosine", "tanh", "poly", "step", "multistep", "onecycle")  # each knows its step by the number


@dataclass(frozen=True, kw_only=True)
class Config:
    """One training. Words are timm's where timm has one."""

    recipe: str = ""
    """The recipe it came from."""
    task: Task = "classify"
    """`classify`, `mae` (masked autoencoding), or `linear_probe` (a fresh head on frozen features)."""

    model: str = "vit_tiny_patch16_224"
    """A name that timm knows, `hf-hub:` and `local-dir:` included."""
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    """Given to timm.create_model as they are."""
    pretrained: bool = False
    checkpoint: str = ""
    """Weights to start from: a file of wellcond's, timm's or a MaskedAutoencoder's."""
    remove_skips: tuple[str, ...] = ()
    """Skips to train without: `sa`, `mlp`."""
    layer_scale: float | None = None
    """What LayerScale starts from where a skip was removed; a small one would let the signal die."""
    attention: str = ""
    """Another attention, by name: `linear`, `kernelized`, `skyformer`, `nystrom`."""
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    gray: str = ""
    """Token Graying: `svd` or `dct`; empty for none."""
    epsilon: float = 0.95

    data: str = "digits"
    """`digits`, a folder, `wds:…`, `hf:…`, `cifar10:FOLDER`, `cifar100:FOLDER`."""
    image_size: int = 224
    cache_dir: str = ""
    """Where decoded images are kept; by default WELLCOND_CACHE, or the user's cache folder."""
    cache_limit: float = float(16 << 30)
    """Bytes of decoded pixels above which images are streamed from their files; 0 streams always."""
    holdout: float = 0.0
    """The share of the training set that is held out as validation set, the real one being left alone until the end."""
    padding: int = 0
    """Pixels of random shift: a crop from the image padded by so many."""
    scale_min: float = 1.0
    """The smallest share of the area that a random crop takes; 1 takes the whole image."""
    flip: float = 0.0
    color_jitter: float = 0.0
    erasing: float = 0.0
    auto_augment: str = ""
    mixup: float = 0.0
    cutmix: float = 0.0
    label_smoothing: float = 0.0

    epochs: int = 10
    steps: int = 0
    """How long the training is in steps, instead of epochs."""
    batch_size: int = 256
    """Images in one step of the optimiser, over all processes and accumulated parts."""
    accumulate: int = 1
    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    opt_betas: tuple[float, ...] = ()
    layer_decay: float | None = None
    clip_grad: float | None = None
    clip_value: float | None = None
    """Clips each value of the gradient, where clip_grad clips its norm."""
    sched: str = "cosine"
    """timm's `cosine`, `tanh`, `poly`, `step`, `multistep`, or torch's `onecycle`, which moves the momentum, too."""
    warmup_epochs: int = 0
    """Shortened to the training, where that is shorter; `warmup_steps` counts in steps instead."""
    warmup_steps: int = 0
    warmup_lr: float = 1e-6
    min_lr: float = 0.0
    drop_path: float = 0.0
    ema_decay: float | None = None

    mask_ratio: float = 0.75
    normalize_pixels: bool = False
    gray_masked: str = "visible"
    """Which tokens masked autoencoding grays: `visible`, or `all`, which leaks masked patches into visible ones."""
    decoder_dim: int = 512
    decoder_depth: int = 8
    decoder_heads: int = 16

    amp_dtype: AmpDtype = "float32"
    compile: bool = False
    compile_mode: str = ""
    """torch.compile's `mode`; empty for its default."""
    step_graph: bool = True
    """On one GPU, capture a step's forward and backward pass as a CUDA graph and replay it, which spares the CPU.

    Not with several processes, accumulated parts, or `deterministic`."""
    deterministic: bool = False
    """The same bits from run to run on a GPU too, at some cost."""
    shard: bool = False
    """Parameters sharded over the processes (FSDP2)."""
    workers: int = 2
    seed: int = 0

    probe_every: int | str = 0
    """Steps from one measurement of κ to the next; 0 for none, `auto` for as often as 1 % of the time allows."""
    probe_marks: bool = False
    """Also measure at 0, 5, 10, 20, … 100 % of the steps, the near-unit share of each block included."""
    probe_samples: int = 64
    """Images of the validation set that are measured, the same throughout."""
    probe_sites: tuple[str, ...] = ()
    probe_exact: Literal["float32", "float64", "no"] = "float32"
    """The precision of the measured pass; `no` looks at training's own pass, which in bfloat16 shows only a ceiling."""
    eval_every: int = 1
    """Epochs from one validation to the next."""
    eval_steps: int = 0
    """The same in steps; 0 counts in epochs."""
    log_every: int = 20
    save_every: int = 0
    """Steps from one saved state to the next; 0 for once an epoch."""
    save_format: Literal["auto", "whole", "sharded"] = "auto"
    """`whole`: one process writes all, and training waits. `sharded`: each writes its part while training goes on
    (torch.distributed.checkpoint), and any number of processes can read them; `auto` with `shard`."""
    keep: int = 2
    """How many saved states are kept."""
    keep_best: bool = False
    """Also the state with the best validation, whatever its age; checkpoints/best leads to it."""
    skip_limit: int = 10
    """A step whose gradient is not finite is left out; so many in a row, and the training is lost. 0 for never."""
    on_divergence: Literal["stop", "rollback"] = "stop"
    time_limit: str = ""
    """How long the process may run, from its start: 90s, 9m, 1h30m, or seconds. Then it saves and ends with 0."""
    resume: Literal["same", "force"] = "same"
    """`force` goes on with a run on other data than it began with."""
    tracker: str = ""
    """`tensorboard`, `wandb` or `trackio`, beside the JSON lines that are always written."""

    def changed(self, settings: Iterable[str] | Mapping[str, Any]) -> Self:
        """With these fields changed: `["lr=3e-4", …]` as a command line has them, or a mapping."""
        if not isinstance(settings, Mapping):
            settings = dict(assignment(text) for text in settings)
        fields = {f.name: f for f in dataclasses.fields(self)}
        changes = {}
        hints = typing.get_type_hints(type(self))
        for name, value in settings.items():
            if name not in fields:
                raise ValueError(f"there is no setting {name!r}{nearest(name, fields)}")
            changes[name] = as_type(name, value, hints[name])
        return dataclasses.replace(self, **changes)

    def as_json(self) -> dict[str, Any]:
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> Self:
        return cls().changed(payload)

    def differences(self, other: "Config") -> dict[str, tuple[Any, Any]]:
        """Field → (mine, theirs), where they differ."""
        mine, theirs = self.as_json(), other.as_json()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def check(self, *, world: int = 1) -> None:
        """ValueError for what cannot be trained, before anything is built."""
        from wellcond.train.checks import problems

        for problem in problems(self, world=world):
            raise ValueError(problem)


# ---- settings as a command line or JSON has them


def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"a setting is written name=value, got {text!r}")
    return name.strip().replace("-", "_"), value.strip()


def nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"


def as_seconds(text: str) -> float:
    """A duration: 90s, 9m, 1h30m, 2d, or plain seconds. ValueError for anything else, and for none at all."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(f"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text.strip().lower())
    parts = [float(part or 0) for part in found.groups()] if found else []
    seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not 0 < seconds < math.inf:
        raise ValueError(f"is a time such as 90s, 9m or 1h30m, or a number of seconds; got {text!r}")
    return seconds


def as_type(name: str, value: Any, hint: Any) -> Any:
    """`value`, a string of a command line or what JSON gives, as the field's type."""
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and (value is None or value in ("none", "None", "")):
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    if kinds == [int, str]:  # a number, or a word
        return int(value) if str(value).lstrip("-").isdigit() else str(value)
    kind = kinds[0]
    origin = typing.get_origin(kind)
    try:
        if origin is Literal or kind is str:
            return str(value)
        if kind is bool:
            return _boolean(value)
        if origin is tuple:
            items = value if isinstance(value, list | tuple) else [part for part in str(value).split(",") if part]
            return tuple(float(item) if get_args(kind)[0] is float else str(item).strip() for item in items)
        if origin is dict:
            return dict(value) if isinstance(value, Mapping) else _mapping(str(value))
        if kind is int and isinstance(value, str):
            return int(value)
        if kind is int and (isinstance(value, bool) or value != int(value)):
            raise ValueError
        return kind(value)
    except (ValueError, TypeError, SyntaxError):
        words = {int: "a whole number", float: "a number", bool: "true or false", tuple: "numbers such as 0.9,0.95"}
        word = words.get(origin or kind, "key=value pairs such as a=1,b='x'")
        raise ValueError(f"{name} must be {word}, got {value!r}") from None


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError(word)
    return word in ("true", "1", "yes")


def _mapping(text: str) -> dict[str, Any]:
    if text.startswith("{"):
        found = ast.literal_eval(text)
        if not isinstance(found, dict):
            raise ValueError(text)
        return found
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError(text)
    return {key.strip(): _literal(value.strip()) for key, _, value in pairs}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
