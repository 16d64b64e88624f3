"""The data sets of the experiments, fixed before the runs: image sets, and the tasks of the Long Range Arena.

    given = parse_data(["cifar10=/data/cifar10"])          # where they are: NAME=PATH; a folder, shards, CIFAR's files
    given[0].set.respectable                               # 0.85: below it a comparison of arms decides nothing
    SETS["lra_listops"].generated                          # True: it needs no folder

Every kind states the same facts: the length of a training and its unit, the settings of a training at each scale, which
metrics count, and where its data may be.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from wellcond.train.config import Config
from wellcond.train.recipes import recipe
from wellcond.words import BLOCK_SITES, meant

__all__ = [
    "IMAGE_SETS",
    "PHOTOGRAPHS",
    "SETS",
    "TASK_SETS",
    "ClaimSet",
    "GivenData",
    "ImageSet",
    "TaskSet",
    "parse_data",
    "smoke_data",
    "unplaced",
    "with_generated",
]

CIFAR_FILES = ("cifar-10-batches-py", "cifar-100-python", "data_batch_1", "meta")  # of the Python version
SMOKE: dict[str, Any] = {
    "epochs": 2, "batch_size": 64, "warmup_epochs": 0, "padding": 0, "clip_grad": 1.0, "log_every": 5, "image_size": 8,
    "model_kwargs": {
        "img_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 32, "num_heads": 2, "class_token": False,
        "global_pool": "avg", "weight_init": "jax",
    },
}  # fmt: skip
# Mixup, cutmix and label smoothing: without them a ViT this small memorises 50,000 images long before epoch 100.
# κ in float64: without the attention skip, κ at a ViT's `sa` reaches float32's ceiling.
LAB: dict[str, Any] = {
    "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "log_every": 100, "save_every": 2000, "probe_marks": True,
    "probe_exact": "float64", "probe_sites": ["embed", *BLOCK_SITES],
}  # fmt: skip
FORWARD = 1 / 3  # a forward pass's share of the cost of a training step


@dataclass(frozen=True, kw_only=True)
class ClaimSet(ABC):
    """What every data set states about itself."""

    name: str
    title: str
    classes: int
    train_samples: int
    respectable: float = 0.0
    """Top-1 that the plain arm has to reach at `lab` scale; below it a verdict is undecided."""
    generated: bool = False
    """Whether its data are generated, so that it needs no folder."""

    unit: ClassVar[str]
    """The unit of a training's length, which is a field of its configuration: epochs or steps."""

    @property
    @abstractmethod
    def length(self) -> int:
        """Length of a `lab` training, in that unit."""

    @property
    def recipe(self) -> str:
        """The recipe of its trainings; empty if the claim chooses it."""
        return ""

    @property
    def smoke(self) -> "GivenData":
        """The data that stand in for it in a smoke run."""
        return GivenData(set=self, spec=self.name)

    @abstractmethod
    def settings(self, scale: str) -> dict[str, Any]:
        """Return the settings of every training at `smoke` or `lab` scale that differ from the recipe."""

    @abstractmethod
    def final(self, config: Config) -> dict[str, Any]:
        """Return the settings of a compared training that differ from those of one that chooses a learning rate."""

    @abstractmethod
    def samples(self, config: Config) -> int:
        """Return how long a training takes, as the number of training samples that would take the same time."""

    def check_trained(self, run: Mapping[str, Any], spec: str) -> None:  # noqa: B027 (most need no check)
        """Raise ValueError if a run shows that its data were not this set's."""

    @abstractmethod
    def metrics(self, run: Mapping[str, Any]) -> Mapping[str, float] | None:
        """Return what a run reached on the test set, from its result; None if it diverged."""

    def spec(self, where: str) -> str:
        """Return the spec for `wellcond.data.open_data`, given the value of `--data-dir NAME=`.

        Raises ValueError if there is no such folder.
        """
        path = Path(where).expanduser()  # a shell does not expand ~ in NAME=~/folder if NAME has a hyphen
        if self.generated and where == self.name:
            return where
        if path.exists():
            return self._of_folder(path)
        if ":" in where:
            return self._of_source(where)
        raise ValueError(f"--data-dir {self.name}={where}: there is no folder {where}; nothing was started")

    @abstractmethod
    def _of_folder(self, path: Path) -> str: ...

    def _of_source(self, named: str) -> str:
        return named


@dataclass(frozen=True, kw_only=True)
class GivenData:
    """A data set and the spec that says where it is, for `wellcond.data.open_data`."""

    set: ClaimSet
    spec: str


@dataclass(frozen=True, kw_only=True)
class ImageSet(ClaimSet):
    image_size: int
    patch_size: int
    epochs: int = 100
    batch_size: int = 256
    """Epochs and batch size of a `lab` training, fixed before the runs."""

    unit = "epochs"

    @property
    def length(self) -> int:
        return self.epochs

    @property
    def smoke(self) -> GivenData:
        return GivenData(set=SETS["digits"], spec="digits")

    def settings(self, scale: str) -> dict[str, Any]:
        """Return settings that give 64 tokens and a class token; 196 tokens for Imagenette, 16 for the digits."""
        if scale == "smoke":
            return SMOKE
        return {
            "image_size": self.image_size,
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "model_kwargs": {"img_size": self.image_size, "patch_size": self.patch_size},
            **LAB,
        }

    def final(self, config: Config) -> dict[str, Any]:
        return {"eval_every": config.epochs}  # the validation set is the test set

    def samples(self, config: Config) -> int:
        return self.train_samples * config.epochs

    def metrics(self, run: Mapping[str, Any]) -> Mapping[str, float] | None:
        return run["metrics"]

    def check_trained(self, run: Mapping[str, Any], spec: str) -> None:
        """Raise ValueError if a run's steps say that it was trained on another number of images than the set has."""
        config = run["config"]
        if run["status"] != "finished" or config.get("steps") or not run.get("steps"):
            return
        images = run["steps"] / config["epochs"] * config["batch_size"] / (1 - config["holdout"])
        if not 0.98 * self.train_samples - config["batch_size"] <= images <= 1.02 * self.train_samples:
            raise ValueError(
                f"{spec} is not {self.title}: it has about {images:,.0f} images to train on, not {self.train_samples:,}"
            )

    def _of_folder(self, path: Path) -> str:
        if self.name.startswith("cifar") and any((path / part).exists() for part in CIFAR_FILES):
            return f"{self.name}:{path}"
        return f"wds:{path}" if _holds_shards(path) else f"folder:{path}"


class PhotographSet(ImageSet):
    """Crops of scikit-learn's two photographs: real pictures when no set is at hand. For measuring, not training."""

    @property
    def smoke(self) -> GivenData:
        return GivenData(set=self, spec=self.name)


@dataclass(frozen=True, kw_only=True)
class TaskSet(ClaimSet):
    """A task of the Long Range Arena. It has a recipe and a data source of its own name, and a development part."""

    steps: int = 50_000
    holdout: float = 0.0
    """Share of the training part held out for development, if the task has only a test set beside it."""
    eval_steps: int = 500
    """Steps between evaluations on the development part."""
    stands_for: str = ""
    """The task that this one replaces, if it is not one of the arena's."""
    chosen_by: ClassVar[str] = "test_accuracy"
    """The measurement that uses the test set, once, at the end of a run."""

    unit = "steps"

    @property
    def length(self) -> int:
        return self.steps

    @property
    def recipe(self) -> str:
        return self.name

    @property
    def smoke(self) -> GivenData:
        return GivenData(set=self, spec=recipe(self.recipe, scale="smoke").data)

    def settings(self, scale: str) -> dict[str, Any]:
        """Return the published settings; the state to be tested is the best on the development part, however early."""
        if scale == "smoke":
            return {"keep_best": True}
        holdout = {"holdout": self.holdout} if self.holdout else {}
        return {
            "eval_steps": self.eval_steps, "keep_best": True, "keep_best_after": 0.0, "log_every": 100,
            "save_every": 5000, "probe_marks": True, "probe_samples": 16, "probe_sites": ["embed", *BLOCK_SITES],
            **holdout,
        }  # fmt: skip

    def final(self, config: Config) -> dict[str, Any]:
        return {}

    def samples(self, config: Config) -> int:
        validations = config.steps // config.eval_steps if config.eval_steps else 0
        return round(config.batch_size * (config.steps + FORWARD * validations * config.eval_batches))

    def metrics(self, run: Mapping[str, Any]) -> Mapping[str, float] | None:
        return run[self.chosen_by]["best"] if run.get(self.chosen_by) else None

    def _of_folder(self, path: Path) -> str:
        return f"{self.name}:wds:{path}" if _holds_shards(path) else f"{self.name}:{path}"

    def _of_source(self, named: str) -> str:
        return named if named.startswith(f"{self.name}:") else f"{self.name}:{named}"


def _sets(*found: Any) -> dict[str, Any]:
    return {one.name: one for one in found}


IMAGE_SETS: dict[str, ImageSet] = _sets(
    ImageSet(
        name="digits", title="Digits", classes=10, train_samples=1437, image_size=8, patch_size=2, generated=True
    ),
    ImageSet(
        name="cifar10", title="CIFAR-10", classes=10, train_samples=50_000, image_size=32, patch_size=4,
        respectable=0.85,
    ),
    ImageSet(
        name="cifar100", title="CIFAR-100", classes=100, train_samples=50_000, image_size=32, patch_size=4,
        respectable=0.58,
    ),
    ImageSet(
        name="tiny-imagenet", title="Tiny-ImageNet", classes=200, train_samples=100_000, image_size=64, patch_size=8,
        epochs=50, batch_size=512, respectable=0.43,
    ),
    ImageSet(
        name="imagenette", title="Imagenette", classes=10, train_samples=9_469, image_size=224, patch_size=16,
        epochs=50, batch_size=64, respectable=0.75,
    ),
)  # fmt: skip
TASK_SETS: dict[str, TaskSet] = _sets(
    TaskSet(name="lra_text", title="Text", classes=2, train_samples=22_500, holdout=0.1),
    TaskSet(name="lra_listops", title="ListOps", classes=10, train_samples=96_000, generated=True),
    TaskSet(
        name="imdb_pairs", title="Pairs of reviews", classes=2, train_samples=22_500, stands_for="Retrieval",
        eval_steps=1000,
    ),
    TaskSet(name="lra_pathfinder", title="Pathfinder", classes=2, train_samples=160_000, generated=True),
    TaskSet(name="lra_image", title="Image", classes=10, train_samples=45_000),
)  # fmt: skip
"""In the order of the paper's tables."""
PHOTOGRAPHS = PhotographSet(
    name="photographs", title="Photographs", classes=2, train_samples=0, image_size=224, patch_size=16, generated=True
)
SETS: dict[str, ClaimSet] = {**IMAGE_SETS, PHOTOGRAPHS.name: PHOTOGRAPHS, **TASK_SETS}


def parse_data(given: Iterable[str]) -> list[GivenData]:
    """Parse the values of `--data-dir`, `NAME=PATH` each. A ValueError names the sets and the form of a value."""
    found = []
    for text in given:
        name, equals, where = text.partition("=")
        if not equals and text in SETS:
            name, where = text, text if SETS[text].generated else ""
        elif not equals:
            name, where = _name_in(text), text
        if name not in SETS or not where:
            raise ValueError(
                f"--data-dir {text!r} does not say which set lies where{meant(name, SETS) if name not in SETS else ''} "
                f"(write NAME=PATH with a name of {', '.join(SETS)}, e.g. cifar10=data/cifar10)"
            )
        found.append(GivenData(set=SETS[name], spec=SETS[name].spec(where)))
    names = [one.set.name for one in found]
    if len(set(names)) < len(names):
        raise ValueError(f"--data-dir names a set twice: {', '.join(names)}")
    return found


def with_generated(given: Sequence[GivenData], wanted: Iterable[str]) -> list[GivenData]:
    """Return `given` plus all generated sets among those `wanted`, unless it has one of these already."""
    names = [one.set.name for one in given]
    generated = [SETS[name] for name in dict.fromkeys(wanted) if SETS[name].generated]
    if any(one.name in names for one in generated):
        return list(given)
    order = list(SETS)
    found = [*given, *(GivenData(set=one, spec=one.name) for one in generated)]
    return sorted(found, key=lambda one: order.index(one.set.name)) if generated else found


def unplaced(wanted: Iterable[str]) -> list[GivenData]:
    """Return sets whose runs are only read, with a placeholder for data that will never be opened."""
    sets = [SETS[name] for name in dict.fromkeys(wanted)]
    return [GivenData(set=one, spec=one.name if one.generated else one._of_source("folder:nowhere")) for one in sets]


def smoke_data(wanted: Iterable[str]) -> tuple[GivenData, ...]:
    """Return the data that a smoke run of a claim on these sets uses."""
    return tuple({SETS[name].smoke.set.name: SETS[name].smoke for name in wanted}.values())


def _holds_shards(path: Path) -> bool:
    return path.is_dir() and any(path.glob("train-*.tar*"))


def _name_in(text: str) -> str:
    """Return the set's name in cifar10:PATH, or else the name of the folder."""
    kind, colon, _ = text.partition(":")
    return kind if colon and kind in SETS else Path(text).name
