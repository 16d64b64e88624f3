"""A task from outside the package, registered as docs/training.md says and by nothing else."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellcond
from wellcond.bench.photographs import write_photographs
from wellcond.data import Augmentation, Batch, DataSet
from wellcond.records import read_json
from wellcond.train import Config, recipe
from wellcond.train.checkpoint import latest
from wellcond.train.config import TASK_KINDS
from wellcond.train.loop import augmentation_of, train
from wellcond.train.setup import data_of
from wellcond.train.tasks import TASKS, Classify, Task, options_of


class OneVersusRest(Classify):
    def __init__(self, config: Config, data: DataSet, *, weight: float = 1.0):
        super().__init__(config, data)
        self.weight, self.chance = weight, math.log(2)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(*batch.inputs).float()
        wanted = batch.targets
        if not wanted.is_floating_point():
            wanted = nn.functional.one_hot(wanted, logits.shape[1]).float()
        weight = torch.full_like(logits[0], self.weight)
        return nn.functional.binary_cross_entropy_with_logits(logits, wanted, pos_weight=weight)


class Brightness:
    """Predicts the mean of an image, with a model that no configuration describes."""

    metric = "score"

    def __init__(self, config: Config, data: DataSet):
        self.config = config

    def build(self) -> nn.Module:
        torch.manual_seed(self.config.seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 1))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return nn.functional.mse_loss(model(*batch.inputs)[:, 0], batch.inputs[0].mean((1, 2, 3)))

    def count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        loss = self.loss(model, batch).double() * batch.count
        return {"loss": loss, "score": -loss, "count": torch.tensor(float(batch.count), dtype=torch.float64)}


@pytest.fixture(autouse=True)
def _registered():
    before = dict(TASKS), dict(TASK_KINDS)
    assert wellcond.register_task("one-vs-rest", like="classify")(OneVersusRest) is OneVersusRest
    wellcond.register_task("brightness")(Brightness)
    yield
    for registry, kept in zip((TASKS, TASK_KINDS), before, strict=True):
        registry.clear()
        registry.update(kept)


def test_a_task_like_a_built_in_one_takes_its_settings_and_its_own(tmp_path: Path) -> None:
    config = recipe("digits", scale="smoke", epochs=1, task="one-vs-rest", padding=1, gray="dct")
    for weight in (1, 9):
        own = config.changed([f"task_kwargs=weight={weight}"])
        assert train(own, tmp_path / str(weight), device="cpu", quiet=True).metrics["top1"] > 0
    assert read_json(tmp_path / "9" / "config.json")["config"]["task_kwargs"] == {"weight": 9}
    first, other = (latest(tmp_path / name / "checkpoints") for name in ("1", "9"))
    assert first is not None
    assert other is not None
    assert any(not torch.equal(value, other.model[name]) for name, value in first.model.items())


def test_a_task_like_an_image_task_gets_shares_of_classes(tmp_path: Path) -> None:
    varied = {"label_smoothing": 0.1, "mixup": 0.8, "probe_every": 1000}
    config = recipe("digits", scale="smoke", epochs=1, task="one-vs-rest", **varied)
    assert train(config, tmp_path / "run", device="cpu", quiet=True).metrics["top1"] > 0
    assert read_json(tmp_path / "run" / "config.json")["kind"] == "classify"  # for its page


VARIED = {"padding": 2, "flip": 0.5, "mixup": 0.8, "label_smoothing": 0.1, "auto_augment": "rand-m9"}


def test_a_task_like_none_gets_its_data_as_they_are(tmp_path: Path) -> None:
    """Whatever a recipe has chosen for images, which the user could not switch off."""
    config = recipe("digits", scale="smoke", epochs=1, task="brightness").changed(VARIED, given=False)
    assert augmentation_of(config) == Augmentation()
    assert augmentation_of(config.changed({"task": "one-vs-rest"})) == Augmentation(**VARIED)
    train(config, tmp_path / "run", device="cpu", quiet=True)


def test_changes_of_the_model_that_a_task_does_not_make_are_told(tmp_path: Path) -> None:
    config = recipe("digits", scale="smoke", epochs=1, task="brightness", gray="dct")
    with pytest.warns(RuntimeWarning, match="gray=dct has changed nothing: the build.. of task=brightness does not"):
        train(config, tmp_path / "run", device="cpu", quiet=True)


def test_pictures_of_any_size_need_a_task_that_is_like_one_of_images(tmp_path: Path) -> None:
    write_photographs(tmp_path, size=8, classes=2, each=2)
    config = recipe("digits", scale="smoke", task="brightness", data=str(tmp_path))
    with pytest.raises(ValueError, match=r"task=brightness takes no image settings .*register it with like='classify'"):
        data_of(config)
    with pytest.raises(ValueError, match=r"task=sequence takes no image settings .*: set task=classify"):
        data_of(config.changed({"task": "sequence"}))


def test_settings_are_those_of_the_parents_too_and_those_without_a_default_are_needed() -> None:
    class Scaled(OneVersusRest):
        def __init__(self, config: Config, data: DataSet, *, scale: float, **others: Any):
            super().__init__(config, data, **others)

    class Other(Scaled):
        pass

    wellcond.register_task("scaled", like="classify")(Other)
    assert options_of("scaled") == {"scale": True, "weight": False}
    assert options_of("one-vs-rest") == {"weight": False}  # whose parents get no others
    config = recipe("digits", scale="smoke", task="scaled", task_kwargs={"scale": 2.0, "weight": 3.0})
    config.check()
    with pytest.raises(ValueError, match="task=scaled needs its setting 'scale'; add task_kwargs=scale=…"):
        recipe("digits", scale="smoke", task="scaled", task_kwargs={"weight": 3.0}).check()


def test_a_class_may_give_its_parents_what_these_need() -> None:
    class Scaled(OneVersusRest):
        def __init__(self, config: Config, data: DataSet, *, scale: float, **others: Any):
            super().__init__(config, data, **others)

    class Fixed(Scaled):
        def __init__(self, config: Config, data: DataSet, *, extra: int = 1, **others: Any):
            super().__init__(config, data, scale=2.0, **others)

    wellcond.register_task("fixed", like="classify")(Fixed)
    assert options_of("fixed") == {"extra": False, "scale": False, "weight": False}
    recipe("digits", scale="smoke", task="fixed").check()


def test_a_task_may_build_any_model(tmp_path: Path) -> None:
    config = recipe("digits", scale="smoke", epochs=2, lr=1e-2, task="brightness")
    found = train(config, tmp_path / "run", device="cpu", quiet=True)
    assert -0.2 < found.metrics["score"] < 0
    resumed = train(config, tmp_path / "run", device="cpu", quiet=True)
    assert resumed.metrics == found.metrics


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "one-vs-rest", "task_kwargs": {"wieght": 2}}, "no setting 'wieght'; did you mean weight"),
        ({"task": "brightness", "task_kwargs": {"a": 1}}, "it has none of its own"),
        ({"task": "brightness", "mixup": 0.8}, "mixup is a setting of task=classify or mae or linear_probe, and the"),
        ({"task": "brightnes"}, "'brightness', not 'brightnes' .import the module .*did you mean brightness"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("digits", scale="smoke", **changes).check()


def test_a_class_that_lacks_something_is_refused() -> None:
    with pytest.raises(TypeError, match=r"task 'a': Empty has no build, loss, count, metric; a task has"):
        wellcond.register_task("a")(type("Empty", (), {}))

    class Stub(Task):
        metric = "top1"

        def build(self) -> nn.Module:
            return nn.Identity()

    with pytest.raises(TypeError, match=r"task 'a': Stub has no loss, count; a task has"):
        wellcond.register_task("a")(Stub)
    with pytest.raises(ValueError, match="there is a task called 'mae' already"):
        wellcond.register_task("mae")
    with pytest.raises(ValueError, match="like='brightness' is no built-in task; those are classify, mae"):
        wellcond.register_task("b", like="brightness")


def test_counts_without_the_metric_are_refused(tmp_path: Path) -> None:
    class Forgetful(Brightness):
        def count(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
            return {"loss": self.loss(model, batch), "count": torch.tensor(1.0)}

    wellcond.register_task("forgetful")(Forgetful)
    config = recipe("digits", scale="smoke", epochs=1, task="forgetful")
    with pytest.raises(ValueError, match=r"task=forgetful: count\(\) has to return 'score', too; it returned loss, co"):
        train(config, tmp_path / "run", device="cpu", quiet=True)
