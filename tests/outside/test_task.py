"""A task from outside the package, registered as docs/training.md says and by nothing else."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellcond
from wellcond.data import Batch, DataSet
from wellcond.records import read_json
from wellcond.train import Config, recipe
from wellcond.train.checkpoint import latest
from wellcond.train.config import TASK_KINDS
from wellcond.train.loop import train
from wellcond.train.tasks import TASKS, Classify


class OneVersusRest(Classify):
    def __init__(self, config: Config, data: DataSet, *, weight: float = 1.0):
        super().__init__(config, data)
        self.weight, self.chance = weight, math.log(2)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        logits = model(*batch.inputs).float()
        wanted = nn.functional.one_hot(batch.targets, logits.shape[1]).float()
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
def _registered(one_thread: None):
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
