"""Every setting of a training, checked before anything starts.

    config = Config(model="vit_tiny_patch16_224", data="digits", epochs=10)
    config = config.changed(["lr=3e-4", "remove_skips=sa", "gray=dct"])      # as --set gives them
    config.check()                                                           # ValueError names what cannot be

A recipe (recipes.py) is a function that returns one. `config.json` in a run's folder holds all of it, enough to repeat
the run.
"""

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

from wellcond.train.settings import as_type, assignment, nearest

__all__ = ["AMP_DTYPES", "COMPILE_MODES", "TASKS", "Config"]

Task = Literal["classify", "mae", "linear_probe"]
AmpDtype = Literal["float32", "bfloat16", "float16"]
TASKS: tuple[str, ...] = get_args(Task)
AMP_DTYPES: tuple[str, ...] = get_args(AmpDtype)
COMPILE_MODES = ("", "default", "max-autotune-no-cudagraphs")  # torch's
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # torch's, too, which make CUDA graphs of their own
SCHEDULES = ("cosine", "tanh", "poly", "step", "multistep")  # those of timm's that know their step by its number alone


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
    batch_size: int = 256
    """Images in one step of the optimiser, over all processes and accumulated parts."""
    accumulate: int = 1
    opt: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    opt_betas: tuple[float, ...] = ()
    layer_decay: float | None = None
    clip_grad: float | None = None
    sched: str = "cosine"
    warmup_epochs: int = 0
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

    probe_every: int = 0
    """Steps from one measurement to the next; 0 for none."""
    probe_samples: int = 64
    probe_sites: tuple[str, ...] = ()
    eval_every: int = 1
    """Epochs from one validation to the next."""
    log_every: int = 20
    save_every: int = 0
    """Steps from one saved state to the next; 0 for once an epoch."""
    keep: int = 2
    """How many saved states are kept."""
    on_divergence: Literal["stop", "rollback"] = "stop"
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
        for problem in self._problems(world):
            raise ValueError(problem)

    def _problems(self, world: int) -> Iterable[str]:
        yield from _choices("task", self.task, TASKS)
        yield from _choices("amp_dtype", self.amp_dtype, AMP_DTYPES)
        yield from _choices("on_divergence", self.on_divergence, ("stop", "rollback"))
        yield from _choices("gray", self.gray, ("", "svd", "dct"))
        yield from _choices("gray_masked", self.gray_masked, ("visible", "all"))
        yield from _choices("sched", self.sched, SCHEDULES)
        if self.compile_mode in GRAPH_MODES:
            yield (
                f"compile_mode={self.compile_mode} makes CUDA graphs, as step_graph does already, and of a whole pass; "
                "leave it out, or take max-autotune-no-cudagraphs"
            )
        yield from _choices("compile_mode", self.compile_mode, COMPILE_MODES)
        yield from _choices("tracker", self.tracker, ("", "tensorboard", "wandb", "trackio"))
        for skip in self.remove_skips:
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
            if getattr(self, name) < 1:
                yield f"{name} must be at least 1, got {getattr(self, name)}"
        for name in (
            "lr",
            "weight_decay",
            "warmup_epochs",
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
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                yield f"{name} must not be negative, got {getattr(self, name)}"
        for name in ("flip", "erasing", "label_smoothing", "drop_path", "mask_ratio", "holdout"):
            if not 0 <= getattr(self, name) < (1.0001 if name in ("flip", "erasing") else 1):
                yield f"{name} is a share from 0 to 1, got {getattr(self, name)}"
        if not 0 < self.epsilon <= 1:
            yield f"epsilon must be in (0, 1], got {self.epsilon}; 1 changes nothing, 0.95 is usual"
        if not 0 < self.scale_min <= 1:
            yield f"scale_min must be in (0, 1], got {self.scale_min}"
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            yield f"ema_decay must be between 0 and 1, got {self.ema_decay}"
        if self.warmup_epochs > self.epochs:
            yield f"warmup_epochs={self.warmup_epochs} is longer than the training of epochs={self.epochs}"
        if self.clip_grad is not None and not self.clip_grad > 0:
            yield f"clip_grad must be above 0, got {self.clip_grad}; none does not clip"
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            yield f"layer_decay must be in (0, 1], got {self.layer_decay}"
        if not all(0 <= beta < 1 for beta in self.opt_betas):
            yield f"opt_betas are from 0 to below 1, got {self.opt_betas}"
        yield from self._combinations(world)
        yield from self._unknown_optimizer()
        yield from self._unknown_model()

    def _combinations(self, world: int) -> Iterable[str]:
        """Settings that are possible alone and not together, or that would be ignored in silence."""
        parts = world * self.accumulate
        if self.batch_size % parts:
            yield (
                f"batch_size={self.batch_size} is the number of images in a step over all processes; it must be a "
                f"multiple of {world} processes × accumulate={self.accumulate}"
            )
        if self.task == "mae" and (self.mixup or self.cutmix or self.label_smoothing):
            yield "masked autoencoding has no labels: leave mixup, cutmix and label_smoothing at 0"
        if self.task == "linear_probe" and not (self.checkpoint or self.pretrained):
            yield "a linear probe needs trained features: give checkpoint=… or pretrained=true"
        if self.shard and self.ema_decay is not None:
            yield "an average of weights (ema_decay) of a sharded model is not supported; leave one of them"
        if self.shard and self.amp_dtype == "float16":
            yield "float16 with a scaler is not supported for a sharded model; amp_dtype=bfloat16 needs none"
        if self.shard and world == 1:
            yield "shard=true spreads parameters over processes, and there is one; torchrun starts more"
        if (self.mixup or self.cutmix) and self.batch_size // parts % 2:
            yield f"mixup and cutmix mix pairs, but a process's part of a batch is {self.batch_size // parts} images"
        if self.compile_mode and not self.compile:
            yield f"compile_mode={self.compile_mode} is for a compiled model; set compile=true, too"
        if self.padding and self.scale_min < 1:
            yield "padding and scale_min are two ways to crop; set one of them"
        if self.task == "mae" and not self.mask_ratio > 0:
            yield f"masked autoencoding needs masked patches: mask_ratio is {self.mask_ratio}"
        if self.attention_kwargs and not self.attention:
            yield "attention_kwargs are for another attention; name it with attention=…"
        if self.layer_scale is not None and not self.remove_skips:
            yield "layer_scale is where LayerScale starts without a skip; name the skip with remove_skips=…"

    def _unknown_optimizer(self) -> Iterable[str]:
        from timm.optim import list_optimizers  # pyright: ignore[reportPrivateImportUsage]

        known = [str(name) for name in list_optimizers()]
        name = self.opt.lower().rpartition("_")[2]  # lookahead_adamw is adamw, wrapped
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
            yield f"timm knows no optimiser {self.opt!r}{'; did you mean ' + ', '.join(near) + '?' if near else ''}"

    def _unknown_model(self) -> Iterable[str]:
        if self.model.startswith(("hf-hub:", "local-dir:")):
            return
        import timm

        name = self.model.partition(".")[0]
        if not timm.is_model(name):
            known = timm.list_models()
            near = (
                difflib.get_close_matches(name, known, n=3, cutoff=0.5)
                or [m for m in known if m.startswith(name[:5])][:3]
            )
            yield f"timm knows no model {self.model!r}{'; did you mean ' + ', '.join(near) + '?' if near else ''}"


def _choices(name: str, value: str, allowed: Iterable[str]) -> Iterable[str]:
    allowed = tuple(allowed)
    if value not in allowed:
        yield f"{name} can be {', '.join(repr(a) for a in allowed)}, not {value!r}"
