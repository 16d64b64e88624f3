"""Tasks: the model that a configuration asks for, its loss, the sums for its metrics, and validation, which adds them.

    task = make_task(config, data)
    loss = task.loss(model, batch)                           # a scalar, for one part of a batch
    task.count(model, batch)                                 # sums over samples: batches and ranks merge by adding
    Validation(config, task, data.val, here).of(model)       # {"loss": …, "top1": …, "top5": …}

To add a task, write its class and register it under a name; its keyword-only arguments are its settings:

    @register_task("similarity", like="classify")
    class Similarity(Classify): …

The surgery (removed skips, another attention, graying) is done here, before the model is compiled or wrapped.
"""

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol, TypeVar, cast

import torch
from timm.layers.drop import DropPath
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from wellcond.data import Batch, DataSet, eval_batches
from wellcond.data.sequences import SequenceSet
from wellcond.models import gray, remove_skip
from wellcond.models.build import check_patches, create_model
from wellcond.models.mae import MaskedAutoencoder, MaskedOutput, linear_probe
from wellcond.models.sequence import build as build_sequence
from wellcond.models.sequence import find_task
from wellcond.models.surgery import GrayingSettings
from wellcond.numerics.linearize import evaluation_mode
from wellcond.train.computing import autocast, seed_by
from wellcond.train.config import IMAGE_TASKS, TASK_KINDS, Config
from wellcond.train.processes import Processes
from wellcond.train.starting import notes_on_pretrained, start_from, start_masked_from

__all__ = [
    "TASKS",
    "Classify",
    "LinearProbe",
    "Masked",
    "Sequence",
    "Task",
    "Validation",
    "make_task",
    "options_of",
    "register_task",
]

Class = TypeVar("Class", bound=type)

TOKENS_AT_ONCE = 1 << 18  # per validation batch on a GPU: as many as in a batch of the largest task


class Task(Protocol):
    metric: str
    """The name of the metric whose best value is kept: the larger, the better."""
    chance: float
    """The loss of guessing, having learned nothing: a training that ends above it has diverged."""
    notes: list[str]
    """What the user should know about the built model, one sentence each, e.g. what was not loaded from a file."""

    def build(self) -> nn.Module:
        """Return the model, on the CPU, with its surgery and its starting weights."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor: ...

    def count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Return sums over the samples of a batch, including "count", their number, and what `metric` names."""
        ...


class Classify:
    """Classification of images."""

    metric = "top1"

    def __init__(self, config: Config, data: DataSet):
        self.config: Config = config
        self.data: DataSet = data
        self.notes: list[str] = []
        self.chance: float = math.log(len(data.classes))  # of mixed and smoothed labels, too

    def build(self) -> nn.Module:
        config = self.config
        model = create(config, num_classes=len(self.data.classes), channels=self.data.train.channels)
        operate(model, config)
        if config.checkpoint:
            self.notes = start_from(model, config.checkpoint)
        elif config.pretrained:
            self.notes = notes_on_pretrained(model, config.model)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        # Labels are class numbers, or shares of classes if images were mixed or labels smoothed: torch takes both.
        # Given half precision, cross_entropy on a GPU rounds each log-probability to it, with or without autocast.
        return nn.functional.cross_entropy(model(*batch.inputs).float(), batch.targets)

    def count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        logits, labels = model(*batch.inputs).float(), batch.targets
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
        counted = {
            "loss": nn.functional.cross_entropy(logits, labels, reduction="sum").double(),
            "top1": top[:, 0].sum().double(),
            "top5": top.any(1).sum().double(),
            "count": _number(len(labels), logits.device),
        }
        return {name: value for name, value in counted.items() if name != "top5" or logits.shape[1] > 5}


class LinearProbe(Classify):
    """Trains only a fresh head, on frozen features."""

    def build(self) -> nn.Module:
        return linear_probe(cast(VisionTransformer, super().build()))


class Sequence(Classify):
    """Classification of token sequences, or of pairs of them, with the encoders of the Long Range Arena.

    The numbers of positions, embedding rows and classes come from the data; for the published tasks they are the
    published ones. Without padding, batches have no masks, and the model takes its paths without masks.
    """

    def build(self) -> nn.Module:
        config, train = self.config, self.data.train
        sizes: dict[str, Any] = {
            "length": train.length,
            "vocab_size": train.vocab,
            "num_classes": len(self.data.classes),
        }
        documents = find_task(config.model).documents
        if documents != 1 + train.pairs:
            kinds = ("single sequences", "pairs")
            raise ValueError(
                f"model={config.model} is for {kinds[documents - 1]}, and {config.data} has {kinds[train.pairs]}"
            )
        sizes |= config.model_kwargs
        torch.manual_seed(config.seed)
        model = build_sequence(config.model, config.attention or "softmax", **sizes, **config.attention_kwargs)
        operate(model, config.changed({"attention": ""}))  # it was built with its attention
        if config.checkpoint:
            self.notes: list[str] = start_from(model, config.checkpoint)
        return model


class Masked:
    """Masked autoencoding: no labels; best is the smallest error on the validation images."""

    metric = "score"  # minus the loss: the larger the better, as with an accuracy
    chance: float = 1.0  # predicting the mean for every pixel, of images with a standard deviation of 1

    def __init__(self, config: Config, data: DataSet):
        self.config: Config = config
        self.data: DataSet = data
        self.notes: list[str] = []

    def build(self) -> nn.Module:
        config = self.config
        encoder = create(config, num_classes=0, channels=self.data.train.channels)
        operate(encoder, config.changed({"gray": ""}))  # the autoencoder does its own graying
        model = MaskedAutoencoder(
            cast(VisionTransformer, encoder),
            decoder_dim=config.decoder_dim,
            decoder_depth=config.decoder_depth,
            decoder_heads=config.decoder_heads,
            mask_ratio=config.mask_ratio,
            normalize_pixels=config.normalize_pixels,
            gray="all" if config.gray_masked == "all" and config.gray else "visible" if config.gray else None,
            graying=_graying(config),
            keep_positions=config.pretrained,  # pretrained positions are learned ones
        )
        if config.checkpoint:
            self.notes = start_masked_from(model, config.checkpoint)
        elif config.pretrained:
            self.notes = notes_on_pretrained(model.encoder, config.model)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return MaskedOutput(*model(*batch.inputs)).loss

    def count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        number = _number(len(batch.targets), batch.targets.device)
        loss = MaskedOutput(*model(*batch.inputs)).loss.double() * number
        return {"loss": loss, "score": -loss, "count": number}


def _number(count: int, device: torch.device) -> Tensor:
    """Return a scalar that the device fills in; one copied from the CPU would wait for all pending work of a GPU."""
    return torch.full((), float(count), dtype=torch.float64, device=device)


TASKS: dict[str, Callable[..., Task]] = {
    "classify": Classify,
    "mae": Masked,
    "linear_probe": LinearProbe,
    "sequence": Sequence,
}
"""Every task by its name; `register_task` adds to it."""


def register_task(name: str, *, like: str = "") -> Callable[[Class], Class]:
    """Register a class with the attributes of `Task` as the task `name`, for `task=name` in a configuration.

    It is built as `cls(config, data, **task_kwargs)`: its keyword-only arguments are its settings, and those of its
    parents, too, if it passes on `**kwargs`. Without `chance`, no loss but that of the first batch tells what an
    untrained model has; without `notes`, there are none.

    Args:
        like: the built-in task whose settings and data it takes: `classify` for images with their augmentation,
            `sequence` for the encoders of the Long Range Arena. By default none: its `build` returns any model, and
            nothing is augmented.

    Raises ValueError for a name that is taken or an unknown `like`, TypeError for a class that lacks something.
    """
    if name in TASKS:
        raise ValueError(f"there is a task called {name!r} already; the tasks are {', '.join(TASKS)}")
    if like and TASK_KINDS.get(like) != like:
        built_in = [task for task, kind in TASK_KINDS.items() if task == kind]
        raise ValueError(f"like={like!r} is no built-in task; those are {', '.join(built_in)}")

    def register(cls: Class) -> Class:
        found = {method: getattr(cls, method, None) for method in ("build", "loss", "count")}
        missing = [name for name, own in found.items() if not callable(own) or own is getattr(Task, name)]
        missing += [] if isinstance(getattr(cls, "metric", None), str) else ["metric"]
        if missing:
            raise TypeError(
                f"task {name!r}: {cls.__name__} has no {', '.join(missing)}; a task has build(), loss(model, batch), "
                "count(model, batch), and metric, the name of the count whose mean is to be as large as possible"
            )
        for left_out, usual in (("chance", -math.inf), ("notes", ())):
            if not hasattr(cls, left_out):
                setattr(cls, left_out, usual)
        TASKS[name], TASK_KINDS[name] = cast(Callable[..., Task], cls), like
        return cls

    return register


def options_of(task: str) -> dict[str, bool]:
    """Return a task's own settings, and whether each has to be given: the keyword-only arguments of its class, and of
    its parents where these get `**kwargs`; but a parent's need not be given, since the class may do so."""
    found: dict[str, bool] = {}
    makers = [vars(cls)["__init__"] for cls in inspect.getmro(cast(type, TASKS[task])) if "__init__" in vars(cls)]
    for maker in makers:
        parameters = list(inspect.signature(maker).parameters.values())
        for one in parameters:
            if one.kind is one.KEYWORD_ONLY:
                found.setdefault(one.name, maker is makers[0] and one.default is one.empty)
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    return found


def make_task(config: Config, data: DataSet) -> Task:
    sequences = isinstance(data.train, SequenceSet)
    if sequences and config.kind in IMAGE_TASKS:
        raise ValueError(f"task={config.task} trains on images, and {config.data} gives sequences: set task=sequence")
    if config.kind == "sequence" and not sequences:
        raise ValueError(f"task={config.task} trains on sequences of tokens, and {config.data} gives something else")
    return TASKS[config.task](config, data, **config.task_kwargs)


# ---- the model


def create(config: Config, *, num_classes: int, channels: int) -> nn.Module:
    """Build the timm model, with random weights drawn from the seed."""
    settings: dict[str, Any] = {"num_classes": num_classes, **config.model_kwargs}
    if channels != 3:
        settings.setdefault("in_chans", channels)
    if config.drop_path and config.model.startswith("convmixer"):
        raise ValueError(f"a ConvMixer has no drop path: leave drop_path={config.drop_path} out")
    if config.drop_path:
        settings.setdefault("drop_path_rate", config.drop_path)
    torch.manual_seed(config.seed)
    model = create_model(config.model, settings, pretrained=config.pretrained)
    if not config.drop_path and "drop_path_rate" not in settings:
        for module in model.modules():
            if isinstance(module, DropPath):
                module.drop_prob = 0.0  # some of timm's models, e.g. Swin, have one by default
    check_patches(model, config.model, (config.image_size, config.image_size))
    return model


def operate(model: nn.Module, config: Config) -> None:
    """Apply graying, removed skips and another attention, in place."""
    if config.attention:
        from wellcond.models import replace_attention  # pyright: ignore[reportAttributeAccessIssue]

        replace_attention(model, config.attention, **config.attention_kwargs)
    for skip in config.remove_skips:
        with warnings.catch_warnings():
            if config.layer_scale is not None:
                warnings.simplefilter("ignore")
            remove_skip(model, skip, layer_scale=config.layer_scale)
    if (graying := _graying(config)) is not None:
        gray(model, **asdict(graying))


def _graying(config: Config) -> GrayingSettings | None:
    if not config.gray:
        return None
    scale, autocast = config.restore_scale, config.gray_autocast
    return GrayingSettings(method=config.gray, epsilon=config.epsilon, restore_scale=scale, autocast=autocast)


# ---- validation


class Validation:
    """Validates on every sample exactly once over all processes, including the last partial batch; with `eval_batches`,
    on every sample of the next stretch of the set."""

    def __init__(self, config: Config, task: Task, part: Any, here: Processes):
        self.config: Config = config
        self.task: Task = task
        self.here: Processes = here
        self.part: Any = part.to(here.device)  # moved once, not at every validation
        self.skipped: list[tuple[str, str]] = []
        """Streamed images that this process could not read in the last validation, and why."""

    def samples(self, count: int) -> tuple[Tensor, ...]:
        """Return inputs of this process's share of `count` samples, spread evenly, as a set may be sorted by class."""
        chosen = torch.linspace(0, len(self.part) - 1, min(count, len(self.part))).round().long()
        mine = chosen[self.here.rank :: self.here.world]
        part = self.part.part((mine if len(mine) else chosen[:1]).to(self.part.device))
        batches = eval_batches(part, batch_size=count, device=self.here.device, workers=self.config.workers)
        return tuple(map(torch.cat, zip(*(batch.inputs for batch in batches if batch.count), strict=True)))

    def _stretch(self, number: int) -> Any:
        """Return the samples of the `number`-th validation: it goes on where the last one stopped, and wraps around."""
        count, part = self.config.eval_batches * self.config.batch_size, self.part
        if 0 < count < len(part):
            part = part.part((torch.arange(count) + number * count).remainder(len(part)).to(part.device))
        return part.by_length() if self._free_to_batch() else part

    def _free_to_batch(self) -> bool:
        """Whether samples may be batched in any order and number: sequences, unless samples of a batch depend on each
        other, as in the published Skyformer."""
        return isinstance(self.part, SequenceSet) and not self.config.attention_kwargs.get("compat")

    def _batch_size(self) -> int:
        """Return the batch size of one process. On a GPU, small batches of sequences are merged: launching each one
        from Python would take longer than running the merged batch."""
        size = max(1, self.config.batch_size // self.here.world)
        if self.here.device.type != "cuda" or not self._free_to_batch():
            return size
        return size * max(1, TOKENS_AT_ONCE // (size * self.part.length * (1 + self.part.pairs)))

    @torch.no_grad()
    def of(self, model: nn.Module, number: int = 0) -> dict[str, float]:
        here = self.here
        sums: dict[str, Tensor] = {}
        batches = eval_batches(
            self._stretch(number), batch_size=self._batch_size(), rank=here.rank, world=here.world, device=here.device,
            workers=self.config.workers,
        )  # fmt: skip
        with evaluation_mode(model):
            for batch in batches:
                for name, value in self._count(model, batch).items():
                    value = value if batch.count else torch.zeros_like(value)
                    sums[name] = sums[name] + value if name in sums else value
        self.skipped = getattr(batches, "skipped", [])
        names = sorted(sums)
        values = here.total(torch.stack([sums[name] for name in names])).tolist()
        found = dict(zip(names, values, strict=True))
        count = found.pop("count")
        if not count:
            raise ValueError(f"none of the {len(self.part)} validation samples can be read")
        return {name: value / count for name, value in found.items()}

    def _count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        seed_by(self.here.device, self.config.seed, 0, self.here.rank)
        with autocast(self.config, self.here.device):
            counted = self.task.count(model, batch)
        for name in ("count", self.task.metric):
            if name not in counted:
                found = ", ".join(counted) or "nothing"
                raise ValueError(f"task={self.config.task}: count() has to return {name!r}, too; it returned {found}")
        return {name: value.to(self.here.device) for name, value in counted.items()}
