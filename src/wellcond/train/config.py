"""Every setting of a training, in groups, checked before anything starts.

    config = Config(model="vit_tiny_patch16_224", data="digits", epochs=10)
    config = config.changed(["lr=3e-4", "remove_skips=sa", "gray=dct"])      # as --set takes them
    config.given                                                             # {"model", "data", "epochs", "lr", …}
    config.check()                                                           # ValueError names what cannot work

A recipe (recipes.py) is a function that returns a Config. `config.json` in a run's folder holds all fields in one flat
dict, enough to repeat the run. `wellcond train --settings` lists them.

A group is a class of fields with their rules (settings.py) and a check of combinations (`problems`); checks that belong
to no single group are in `Config`. To add a group, write the class and add it to the bases of `Config`; if it is for
certain tasks, name them in `tasks`. Importing this file imports neither torch nor timm, for the command line's sake.
"""

import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args

from wellcond.train.settings import Settings, ignored, setting
from wellcond.train.stopping import as_seconds
from wellcond.words import SITES, SKIPS, meant, our_word

__all__ = ["AMP_DTYPES", "COMPILE_MODES", "TASK_KINDS", "Config", "as_seconds", "model_size"]

AmpDtype = Literal["float32", "tf32", "bfloat16", "float16"]
IMAGE_TASKS = ("classify", "mae", "linear_probe")
TASK_KINDS: dict[str, str] = {name: name for name in (*IMAGE_TASKS, "sequence")}
"""Every task, with the built-in one whose settings and data it takes; `tasks.register_task` adds to it."""
ONE_RATE = ("mae", "linear_probe", "sequence")  # tasks whose trained layers timm cannot tell apart, or that train one
AMP_DTYPES: tuple[str, ...] = get_args(AmpDtype)
COMPILE_MODES = ("", "default", "max-autotune-no-cudagraphs")  # torch's modes
GRAPH_MODES = ("reduce-overhead", "max-autotune")  # torch's modes that make CUDA graphs of their own
SCHEDULES = ("cosine", "tanh", "poly", "onecycle")  # each a function of the step number
ELSEWHERE = ("hf-hub:", "local-dir:")  # prefixes of models that timm builds without listing their names


@dataclass(frozen=True, kw_only=True)
class ModelSettings(Settings):
    """The model and its surgery"""

    model: str = "vit_tiny_patch16_224"
    """A name that timm knows, `hf-hub:` and `local-dir:` included; for sequences, `lra_listops`, `lra_text`, …."""
    model_kwargs: dict[str, Any] = field(default_factory=dict)
    """Passed unchanged to timm.create_model, or for task=sequence to models.sequence.build."""
    pretrained: bool = False
    """Start from the model's pretrained weights."""
    checkpoint: str = ""
    """Weights to start from: a file from wellcond, timm or a MaskedAutoencoder."""
    drop_path: float = setting(0.0, at_least=0, below=1)
    """Stochastic depth: the probability that a sample skips the last block's branches; smaller for earlier blocks."""
    remove_skips: tuple[str, ...] = setting((), choices=SKIPS)
    """Skips to train without: `sa`, `mlp`."""
    layer_scale: float | None = None
    """Initial value of LayerScale where a skip was removed; with a small one the signal would vanish."""
    attention: str = ""
    """Replace the model's attention by this one: `linear`, `kernelized`, `skyformer`, `nystrom`."""
    attention_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of that attention."""
    gray: Literal["", "svd", "dct"] = ""
    """Token Graying: `svd` or `dct`; empty for none."""
    epsilon: float = setting(0.95, above=0, at_most=1, hint="1 changes nothing, 0.95 is usual")
    """The exponent of graying."""
    restore_scale: bool = True
    """Keep the size of the largest singular value or coefficient; otherwise graying makes it 1."""
    gray_autocast: bool = False
    """Compute the DCT of graying in `amp_dtype`, as a plain implementation would; for comparison."""

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        if config.attention:
            yield from _attention_problems(config)
        elif config.attention_kwargs:
            yield "attention_kwargs are for another attention; name it with attention=…"
        if config.layer_scale is not None and not config.remove_skips:
            yield "layer_scale is where LayerScale starts without a skip; name the skip with remove_skips=…"
        if not config.gray:
            why = "is a setting of graying, and there is none; add gray=dct or gray=svd, or"
            names = ("epsilon", "restore_scale", "gray_autocast", "gray_masked")
            yield from (f"{name} {why} leave {name} out" for name in names if name in config.given)
        if config.gray_autocast and config.gray != "dct":
            yield "gray_autocast is for gray=dct: an SVD is never computed in half precision"
        if config.checkpoint and config.pretrained:
            yield "pretrained and checkpoint are two sources of weights; choose one"
        if config.checkpoint and Path(config.checkpoint).is_dir():
            yield f"the checkpoint {config.checkpoint} is a folder; name the file of weights in it"


@dataclass(frozen=True, kw_only=True)
class DataSettings(Settings):
    """Data"""

    added_to: ClassVar[tuple[str, ...]] = ("data_kwargs",)

    data: str = "digits"
    """`digits`, a folder, `wds:…`, `hf:…`, `cifar10:FOLDER`, `cifar100:FOLDER`, `lra_listops`, `lra_text:FOLDER`, …."""
    data_kwargs: dict[str, Any] = field(default_factory=dict)
    """Options of the source: `mask=published,samples=300`. A recipe's others stay; `samples=None` removes one."""
    cache_dir: str = ""
    """Where decoded images are cached; by default WELLCOND_CACHE, or the user's cache folder."""
    cache_limit: float = setting(float(16 << 30), at_least=0)
    """Bytes of decoded pixels above which images are streamed from their files; 0 always streams."""
    holdout: float = setting(0.0, at_least=0, below=1)
    """The share of the training set held out for validation; the set's own validation part is then not used."""
    workers: int = setting(2, at_least=0)
    """Workers that decode streamed images, per training process."""

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        from wellcond.data.sources import SOURCES

        word, colon, _ = config.data.partition(":")
        if word not in SOURCES and not Path(config.data).expanduser().exists():
            known = [f"{name}:{source.takes}" if source.takes else name for name, source in sorted(SOURCES.items())]
            near = "" if "/" in word else meant(word, SOURCES)
            what = f"source {word!r}{near}" if colon else f"such folder{near}"
            yield f"data={config.data}: there is no {what} (write a path, or one of {', '.join(known)})"
        elif config.data_kwargs:
            known = SOURCES[word].options if word in SOURCES else []
            for name in config.data_kwargs:
                if name not in known:
                    theirs = f"its options: {', '.join(known)}" if known else "it has none"
                    yield f"data_kwargs: {config.data} has no option {name!r}{meant(name, known)} ({theirs})"
        if config.data == "digits":
            yield from ignored(
                config, ["cache_limit"], "is for images in files; the digits are embedded and never streamed"
            )


@dataclass(frozen=True, kw_only=True)
class ImageSettings(Settings):
    """Images and their augmentation"""

    tasks: ClassVar[tuple[str, ...]] = IMAGE_TASKS

    image_size: int = setting(224, at_least=1)
    """Height and width of the images, in pixels."""
    padding: int = setting(0, at_least=0)
    """Random shift: the image is padded by this many pixels and cropped back to its size."""
    scale_min: float = setting(1.0, above=0, at_most=1)
    """The smallest share of the image's area in a random crop; 1 takes the whole image."""
    flip: float = setting(0.0, at_least=0, at_most=1)
    """The probability that an image is mirrored."""
    color_jitter: float = setting(0.0, at_least=0)
    """Brightness, contrast and saturation are each multiplied by a random factor within this distance of 1."""
    erasing: float = setting(0.0, at_least=0, at_most=1)
    """The probability that a box of the image is erased."""
    auto_augment: str = ""
    """timm's name of a policy, e.g. rand-m9-mstd0.5-inc1; for streamed images only."""
    mixup: float = setting(0.0, at_least=0)
    """Alpha of mixup's Beta distribution; 0 is off."""
    cutmix: float = setting(0.0, at_least=0)
    """Alpha of CutMix's Beta distribution; 0 is off."""
    label_smoothing: float = setting(0.0, at_least=0, below=1)
    """The share of the label that is spread over all classes."""

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        yield from _model_problems(config)
        if config.padding and config.scale_min < 1:
            yield "padding and scale_min are two ways to crop; set one of them"
        if config.data == "digits" and config.auto_augment:
            yield (
                f"auto_augment={config.auto_augment} works on images that are streamed from files, and the digits are "
                "embedded: leave it empty (auto_augment=)"
            )
        part = config.batch_size // (world * config.accumulate)
        if (config.mixup or config.cutmix) and part % 2:
            yield f"mixup and cutmix mix pairs, but a process's part of a batch is {part} images"


@dataclass(frozen=True, kw_only=True)
class OptimiserSettings(Settings):
    """Length, optimiser and schedule"""

    epochs: int = setting(10, at_least=1)
    """Length of the training in epochs."""
    steps: int = setting(0, at_least=0)
    """Length of the training in steps; 0 uses `epochs`."""
    batch_size: int = setting(256, at_least=1)
    """Samples per optimiser step, over all processes and accumulated micro-batches."""
    accumulate: int = setting(1, at_least=1)
    """Micro-batches per step, which go through the model one after the other."""
    opt: str = "adamw"
    """timm's name of an optimiser."""
    lr: float = setting(1e-3, at_least=0)
    """The peak learning rate."""
    weight_decay: float = setting(0.05, at_least=0)
    """Weight decay of matrices; biases and norms have none."""
    opt_betas: tuple[float, ...] = ()
    """Betas of the optimiser; empty for its own defaults."""
    opt_eps: float | None = setting(None, above=0)
    """Epsilon of optimisers that divide by a root; empty for the optimiser's own default."""
    layer_decay: float | None = setting(None, above=0, at_most=1)
    """Layer-wise decay: the learning rate of a layer as a multiple of that of the layer after it (task=classify)."""
    clip_grad: float | None = setting(None, above=0, hint="none does not clip")
    """Clip the norm of the gradient to this."""
    clip_value: float | None = setting(None, above=0, hint="none does not clip")
    """Clip each value of the gradient to this, rather than its norm as clip_grad does."""
    sched: str = setting("cosine", choices=SCHEDULES)
    """timm's `cosine`, `tanh`, `poly`, or torch's `onecycle`, which also changes the momentum."""
    warmup_epochs: int = setting(0, at_least=0)
    """Length of the warm-up, at most that of the training; `warmup_steps` gives it in steps instead."""
    warmup_steps: int = setting(0, at_least=0)
    """Length of the warm-up in steps; overrides a recipe's warmup_epochs."""
    warmup_lr: float = setting(1e-6, at_least=0)
    """Learning rate at the start of the warm-up."""
    min_lr: float = setting(0.0, at_least=0)
    """Learning rate at the end of the schedule."""
    ema_decay: float | None = setting(None, above=0, below=1)
    """Keep an exponential moving average of the weights, with this decay per step, and validate that."""

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        if config.batch_size % (world * config.accumulate):
            processes = f"{world} processes × " if world > 1 else ""
            yield (
                f"batch_size={config.batch_size} is the number of samples in a step over all processes; it must be a "
                f"multiple of {processes}accumulate={config.accumulate}"
            )
        if config.clip_grad is not None and config.clip_value is not None:
            yield "clip_grad clips the gradient's norm and clip_value its values; give one of them"
        if config.sched == "onecycle":
            yield from ignored(config, ["warmup_lr", "min_lr"], "would be ignored: sched=onecycle has ends of its own")
        if config.task in ONE_RATE:
            yield from ignored(config, ["layer_decay"], f"would be ignored: task={config.task} has one rate for all")
        if not all(0 <= beta < 1 for beta in config.opt_betas):
            yield f"opt_betas are from 0 to below 1, got {config.opt_betas}"
        yield from _optimiser_problems(config)


@dataclass(frozen=True, kw_only=True)
class MaskedSettings(Settings):
    """Masked autoencoding (task=mae)"""

    tasks: ClassVar[tuple[str, ...]] = ("mae",)

    mask_ratio: float = setting(0.75, at_least=0, below=1)
    """The share of patches hidden from the encoder."""
    normalize_pixels: bool = False
    """Predict normalised pixels: minus the patch's mean, divided by its standard deviation."""
    gray_masked: Literal["visible", "all"] = "visible"
    """Which tokens masked autoencoding grays: `visible`, or `all`, which leaks masked patches into visible ones."""
    decoder_dim: int = setting(512, at_least=1)
    """The decoder's width."""
    decoder_depth: int = setting(8, at_least=1)
    """The decoder's number of blocks."""
    decoder_heads: int = setting(16, at_least=1)
    """The decoder's number of attention heads."""

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        if config.mixup or config.cutmix or config.label_smoothing:
            yield "masked autoencoding has no labels: leave mixup, cutmix and label_smoothing at 0"
        if not config.mask_ratio > 0:
            yield f"masked autoencoding needs masked patches: mask_ratio is {config.mask_ratio}"


@dataclass(frozen=True, kw_only=True)
class ComputingSettings(Settings):
    """Computation: precision, compiling, determinism, sharding"""

    amp_dtype: AmpDtype = "float32"
    """Precision of the forward and backward pass; tf32 is float32 with products rounded to ten bits on a GPU."""
    compile: bool = False
    """Compile the model with torch.compile."""
    compile_mode: str = setting(
        "",
        choices=COMPILE_MODES,
        hint=f"{' and '.join(GRAPH_MODES)} make CUDA graphs, as step_graph does of a whole pass",
    )
    """torch.compile's `mode`; empty for its default."""
    step_graph: bool = True
    """On one GPU, capture a step's forward and backward pass as a CUDA graph and replay it, to spare the CPU.

    No effect with several processes, accumulated micro-batches, sharding or `deterministic`."""
    deterministic: bool = False
    """Compute the same bits from run to run, on a GPU too; somewhat slower."""
    shard: bool = False
    """Shard the parameters over the processes (FSDP2)."""
    seed: int = 0
    """Seed of the initial weights, data order, augmentation and the model's own random numbers."""

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        if config.compile_mode and not config.compile:
            yield f"compile_mode={config.compile_mode} is for a compiled model; set compile=true, too"
        if config.shard and config.ema_decay is not None:
            yield "an average of weights (ema_decay) of a sharded model is not supported; leave one of them"
        if config.shard and config.amp_dtype == "float16":
            yield "float16 with a scaler is not supported for a sharded model; amp_dtype=bfloat16 needs none"
        if config.shard and world == 1:
            yield "shard=true spreads parameters over processes, and there is one; torchrun starts more"


@dataclass(frozen=True, kw_only=True)
class ProbeSettings(Settings):
    """κ during training"""

    probe_every: int | str = setting(0, at_least=0)
    """Steps between measurements of κ; 0 for none, `auto` for as often as 1 % of the time allows."""
    probe_marks: bool = False
    """Also measure at 0, 5, 10, 20, … 100 % of the steps, including the near-unit share of each block."""
    probe_samples: int = setting(64, at_least=1)
    """Validation samples to measure, the same ones each time."""
    probe_sites: tuple[str, ...] = ()
    """Sites to measure, or patterns of them; empty for `sa`, `+sa`, `mlp` and `+mlp`."""
    probe_exact: Literal["float32", "float64", "no"] = "float32"
    """Precision of the measured pass; `no` measures training's own pass, which in bfloat16 shows only a ceiling."""

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        if isinstance(config.probe_every, str) and config.probe_every != "auto":
            yield f"probe_every is a number of steps, 0 for none, or auto; got {config.probe_every!r}"
        if config.probe_exact == "no" and (config.probe_marks or config.probe_every == "auto"):
            yield "probe_exact=no looks at training's own pass: it takes a number of steps, probe_every=100, no marks"
        for pattern in config.probe_sites:
            if not any(fnmatch(site, our_word(pattern)) for site in SITES):
                near = meant(pattern, SITES)
                yield f"probe_sites: no site is called {pattern!r}{near} (the sites are {', '.join(SITES)})"
        if not config.probe_every and not config.probe_marks:
            why = "is a setting of the probe, which is off; add probe_every=100, or"
            names = ("probe_samples", "probe_sites", "probe_exact")
            yield from (f"{name} {why} leave {name} out" for name in names if name in config.given)


@dataclass(frozen=True, kw_only=True)
class RunSettings(Settings):
    """The run: validating, logging, saving, stopping"""

    eval_every: int = setting(1, at_least=1)
    """Epochs between validations."""
    eval_steps: int = setting(0, at_least=0)
    """Steps between validations; 0 uses `eval_every`."""
    eval_batches: int = setting(0, at_least=0)
    """Batches per validation, each time the next ones of the set, starting over at its end; 0 for the whole set."""
    log_every: int = setting(20, at_least=1)
    """Steps between training rows in metrics.jsonl."""
    save_every: int = setting(0, at_least=0)
    """Steps between saved states; 0 saves once per epoch."""
    save_format: Literal["auto", "whole", "sharded"] = "auto"
    """`whole`: one process writes everything while training waits. `sharded`: each writes its part while training goes
    on (torch.distributed.checkpoint), readable by any number of processes. `auto`: sharded if `shard`, else whole."""
    keep: int = setting(2, at_least=1)
    """Number of saved states to keep."""
    keep_best: bool = False
    """Also keep the state with the best validation, whatever its age; checkpoints/best links to it."""
    keep_best_after: float = setting(0.0, at_least=0, below=1)
    """A best validation within this first share of the steps is noted, but neither its state nor a later, worse one
    is kept."""
    skip_limit: int = setting(10, at_least=0)
    """Steps with a non-finite gradient are skipped; this many in a row count as divergence. 0 never skips."""
    on_divergence: Literal["stop", "rollback"] = "stop"
    """If the training diverges: stop, or go back to a good state with half the learning rate."""
    time_limit: str = ""
    """How long the process may run, from its start: 90s, 9m, 1h30m, or seconds. Then it saves and exits with 0."""
    resume: Literal["same", "force"] = "same"
    """`force` resumes a run on other data than it began with."""
    tracker: Literal["", "tensorboard", "wandb", "trackio"] = ""
    """`tensorboard`, `wandb` or `trackio`, in addition to the JSON lines, which are always written."""

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        if config.time_limit:
            try:
                as_seconds(config.time_limit)
            except ValueError as error:
                yield f"time_limit {error}"
        if not config.keep_best:
            yield from ignored(config, ["keep_best_after"], "is for keep_best=true")
        if config.tracker and config.tracker not in sys.modules and find_spec(config.tracker) is None:
            yield (
                f"the tracker {config.tracker!r} needs a package that is not installed; pip install {config.tracker}"
            )


@dataclass(frozen=True, kw_only=True)
class Config(
    ModelSettings,
    DataSettings,
    ImageSettings,
    OptimiserSettings,
    MaskedSettings,
    ComputingSettings,
    ProbeSettings,
    RunSettings,
):
    """What is trained

    All settings of one training. Names are timm's where timm has one.
    """

    takes_the_place_of: ClassVar[Mapping[str, str]] = {
        "epochs": "steps", "eval_every": "eval_steps", "warmup_epochs": "warmup_steps",
    }  # fmt: skip

    recipe: str = ""
    """The recipe that the configuration came from."""
    task: str = setting("classify", choices=TASK_KINDS, hint="import the module that registers another one")
    """`classify`, `mae` (masked autoencoding), `linear_probe` (a fresh head on frozen features), `sequence` (classify
    token sequences, or pairs of them), or a registered one."""
    task_kwargs: dict[str, Any] = field(default_factory=dict)
    """Settings of a registered task."""

    @property
    def kind(self) -> str:
        """The built-in task whose settings and data the task takes; empty for one that takes none of theirs."""
        return TASK_KINDS.get(self.task, "")

    def check(self, *, world: int = 1, begun: bool = False) -> None:
        """As `Settings.check`. A run that has `begun`, and saved a state, needs the file it started from no longer."""
        super().check(world=world)
        if self.checkpoint and not begun and not Path(self.checkpoint).exists():
            raise ValueError(f"there is no checkpoint {self.checkpoint}; name the file of weights to start from")

    def changed(self, settings: Iterable[str] | Mapping[str, Any], *, given: bool = True) -> Self:
        """As `Settings.changed`; if `data` changes, only those of a recipe's options that the new source has stay."""
        new = super().changed(settings, given=given)
        if new.data == self.data or "data_kwargs" in self.given or not self.data_kwargs:
            return new
        from wellcond.data.sources import SOURCES

        word = new.data.partition(":")[0]
        known = SOURCES[word].options if word in SOURCES else []
        kept = {name: value for name, value in self.data_kwargs.items() if name in known}
        return super(Config, self._with({"data_kwargs": kept}, given=self.given)).changed(settings, given=given)

    @staticmethod
    def problems(config: "Config", world: int) -> Iterator[str]:
        for name, other in config.takes_the_place_of.items():
            if name in config.given and getattr(config, name) and getattr(config, other):  # given too, or it would be 0
                yield f"{name} and {other} are two spellings of one thing; give one of them"
        if config.kind == "linear_probe" and not (config.checkpoint or config.pretrained):
            yield "a linear probe needs trained features: give checkpoint=… or pretrained=true"
        if config.kind == "sequence":
            yield from _sequence_problems(config)
        if config.task_kwargs or config.task != config.kind:  # built-in tasks have none of their own
            from wellcond.train.tasks import options_of

            known = options_of(config.task)
            for name in config.task_kwargs:
                if name not in known:
                    theirs = f"its settings: {', '.join(known)}" if known else "it has none of its own"
                    yield f"task_kwargs: task={config.task} has no setting {name!r}{meant(name, known)} ({theirs})"
            for name, needed in known.items():
                if needed and name not in config.task_kwargs:
                    yield f"task={config.task} needs its setting {name!r}; add task_kwargs={name}=…"


# ---- checks that ask timm, the attentions and the sequence models


def _attention_problems(config: Config) -> Iterator[str]:
    from wellcond.models.surgery.attention import check_settings

    try:
        check_settings(config.attention, config.attention_kwargs)
    except (ValueError, TypeError) as error:
        yield f"attention={config.attention}: {error}"


def _sequence_problems(config: Config) -> Iterator[str]:
    import inspect

    from wellcond.models.sequence import POOLINGS, build, find_task

    try:
        find_task(config.model)
    except ValueError as error:
        yield f"model={config.model}: {error}"
        return
    known = [p.name for p in inspect.signature(build).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for name in config.model_kwargs:
        if name not in known:
            near = meant(name, known)
            yield f"model_kwargs: {config.model} has no setting {name!r}{near} (its settings: {', '.join(known)})"
    if config.model_kwargs.get("pooling", POOLINGS[0]) not in POOLINGS:
        yield f"model_kwargs: pooling is {' or '.join(POOLINGS)}, not {config.model_kwargs['pooling']!r}"
    yield from ignored(
        config, ["pretrained", "drop_path"], "is for timm's models, and those of sequences start from random weights"
    )
    yield from ignored(config, ["cache_limit"], "is for images in files; sequences are kept in memory")


def _optimiser_problems(config: Config) -> Iterator[str]:
    from timm.optim import get_optimizer_info, list_optimizers  # pyright: ignore[reportPrivateImportUsage]

    known = [str(name) for name in list_optimizers()]
    name = config.opt.lower().rpartition("_")[2]  # lookahead_adamw is adamw, wrapped
    if name not in known:
        yield f"timm knows no optimiser {config.opt!r}{meant(name, known, most=3)}"
        return
    info = get_optimizer_info(name)
    if info.second_order:
        yield f"opt={config.opt} needs second derivatives, which the loop does not take; choose another, e.g. adamw"
        return
    betas = config.opt_betas
    if betas and not info.has_betas:
        yield from ignored(config, ["opt_betas"], f"would be ignored: timm gives opt={config.opt} none")
    elif betas and len(betas) != info.num_betas:
        yield (
            f"opt={config.opt} takes {info.num_betas} numbers as opt_betas, got {len(betas)} "
            f"({', '.join(map(str, betas))}); leave it empty for the optimiser's own"
        )
        return
    yield from _cannot_build(config)


def _cannot_build(config: Config) -> Iterator[str]:
    """Try the optimiser on a tiny model: some need a package or a device that is missing."""
    from timm.optim import create_optimizer_v2  # pyright: ignore[reportPrivateImportUsage]
    from torch import nn

    more: dict[str, Any] = {"betas": config.opt_betas} if config.opt_betas else {}
    more |= {"eps": config.opt_eps} if config.opt_eps is not None else {}
    smallest = nn.utils.skip_init(nn.Linear, 2, 2)  # it draws no random numbers
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # repeated when the training's own is built
            create_optimizer_v2(smallest, opt=config.opt, lr=config.lr, weight_decay=config.weight_decay, **more)
    except Exception as error:
        yield f"timm cannot build opt={config.opt}: {' '.join(str(error).split()) or type(error).__name__}"


def _model_problems(config: Config) -> Iterator[str]:
    import timm

    from wellcond.models.build import CONVMIXER_SIZE, say_too_small
    from wellcond.models.huggingface import HUGGINGFACE

    folder = Path(config.model.removeprefix("local-dir:"))
    if config.model.startswith("local-dir:") and not (folder / "config.json").exists():
        yield f"model={config.model}: there is no {folder / 'config.json'}, which timm's save_for_hf writes"
        return
    if not config.model.startswith(ELSEWHERE):
        name = config.model.partition(".")[0]
        if config.model.startswith(HUGGINGFACE):
            what = (
                "training builds timm's models; transformers has a Trainer for its own, and we a callback for that one"
            )
            yield f"model={config.model}: {what} (wellcond.probe.transformers)"
            return
        if not timm.is_model(name):
            known = timm.list_models()
            yield f"timm knows no model {config.model!r}{meant(name, known, most=3)}"
            return
    if config.pretrained and config.model.startswith("convmixer") and config.model_kwargs.keys() & CONVMIXER_SIZE:
        yield f"the weights of {config.model} are of its own size; leave pretrained or model_kwargs out"
    size = model_size(config)
    if size is not None and size != (config.image_size, config.image_size):
        yield (
            f"image_size={config.image_size}, but {config.model} is built for images of {size[0]} × {size[1]}; give it "
            f"img_size={config.image_size} among its model_kwargs, or set image_size={size[0]}"
        )
    patch = _patch(config)
    if patch is not None and max(patch) > config.image_size and not config.model_kwargs.get("dynamic_img_pad"):
        yield say_too_small(config.model, (config.image_size, config.image_size), patch)


def _patch(config: Config) -> tuple[int, int] | None:
    """Return a patch's sides if the settings or the name tell them; of other models they are known once built."""
    patch = config.model_kwargs.get("patch_size")
    if patch is None:
        named = re.search(r"_patch(\d+)(?:_|$)", config.model)
        patch = int(named[1]) if named else None
    return _sides(patch)


def model_size(config: Config) -> tuple[int, int] | None:
    """Return the only height and width that the model takes; None if it takes any, or if this is not known here."""
    import timm

    kwargs = config.model_kwargs
    if kwargs.get("dynamic_img_size") or not kwargs.get("strict_img_size", True):
        return None
    size = kwargs.get("img_size")
    if size is None and not config.model.startswith(ELSEWHERE):
        known = timm.get_pretrained_cfg(config.model)
        size = known.input_size[-2:] if known is not None and known.fixed_input_size else None
    return _sides(size)


def _sides(size: Any) -> tuple[int, int] | None:
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(side, int) for side in size):
        return size[0], size[1]
    return None
