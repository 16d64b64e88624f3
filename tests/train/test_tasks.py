"""What is trained and counted: classification, a linear probe, masked autoencoding."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from wellcond import records
from wellcond.bench.photographs import write_photographs
from wellcond.data import Batch
from wellcond.data.digits import load_digits
from wellcond.train.checkpoint import latest
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.processes import Processes
from wellcond.train.recipes import recipe
from wellcond.train.tasks import Classify, Validation, create, make_task

Make = Callable[..., Config]


class Fixed(nn.Module):
    """Gives these logits, whatever it sees: the truth can be counted on fingers."""

    def __init__(self, logits: torch.Tensor):
        super().__init__()
        self.logits = logits

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits[: len(images)]


def test_top_1_and_top_5_are_counted(make_config: Make) -> None:
    task = Classify(make_config(), load_digits())
    logits = torch.arange(10.0).repeat(4, 1)  # class 9 first, then 8, 7, 6, 5
    batch = Batch(inputs=(torch.zeros(4, 1, 8, 8),), targets=torch.tensor([9, 5, 4, 8]), count=4)
    counted = task.count(Fixed(logits), batch)
    assert {name: counted[name].item() for name in ("top1", "top5", "count")} == {"top1": 1, "top5": 3, "count": 4}
    truth = -torch.log_softmax(logits.double(), 1)[range(4), [9, 5, 4, 8]].sum()
    assert counted["loss"].item() == pytest.approx(truth.item(), rel=1e-6)


def test_the_same_seed_builds_the_same_weights(make_config: Make) -> None:
    states = [make_task(make_config(seed=seed), load_digits()).build().state_dict() for seed in (0, 0, 1)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert any(not torch.equal(states[0][name], states[2][name]) for name in states[0])


@pytest.mark.parametrize(
    ("settings", "largest"),
    [({}, 0.0), ({"drop_path": 0.2}, 0.2), ({"drop_path": 0.0, "model_kwargs": {"drop_path_rate": 0.3}}, 0.3)],
)
def test_drop_path_is_the_one_of_the_configuration(settings: dict[str, Any], largest: float) -> None:
    """timm's Swin has one of 0.1 if it is told nothing."""
    small = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    changes = {**settings, "model_kwargs": {**small, **settings.get("model_kwargs", {})}}
    config = recipe("swin_small", scale="smoke").changed(changes)
    model = create(config, num_classes=10, channels=3)
    assert max(getattr(part, "drop_prob", 0.0) or 0.0 for part in model.modules()) == pytest.approx(largest)


def test_a_convmixer_has_no_drop_path_to_set() -> None:
    config = recipe("convmixer", scale="smoke")
    create(config, num_classes=10, channels=3)
    with pytest.raises(ValueError, match=r"a ConvMixer has no drop path.*leave drop_path=0.1 out"):
        create(config.changed({"drop_path": 0.1}), num_classes=10, channels=3)


def test_a_linear_probe_trains_its_head_alone(make_config: Make, tmp_path: Path) -> None:
    small = {"padding": 0, "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2, "epochs": 1}
    train(make_config(task="mae", **small), tmp_path / "mae", device="cpu", quiet=True)
    features = tmp_path / "mae/checkpoints/step-00000005/model.safetensors"
    before = latest(tmp_path / "mae/checkpoints")
    assert before is not None
    config = make_config(task="linear_probe", checkpoint=str(features), epochs=1, weight_decay=0.0)
    train(config, tmp_path / "probe", device="cpu", quiet=True)
    after = latest(tmp_path / "probe/checkpoints")
    assert after is not None
    frozen = {name: t for name, t in after.model.items() if f"encoder.{name}" in before.model}
    assert len(frozen) > 20
    for name, tensor in frozen.items():
        assert torch.equal(tensor, before.model[f"encoder.{name}"]), name
    assert any(name.startswith("head") and tensor.abs().sum() > 0 for name, tensor in after.model.items())


def test_a_masked_autoencoder_learns(make_config: Make, tmp_path: Path) -> None:
    small = {"padding": 0, "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2, "epochs": 1}
    first = train(make_config(task="mae", **small, lr=0.0, warmup_lr=0.0), tmp_path / "a", device="cpu", quiet=True)
    second = train(make_config(task="mae", **small, lr=1e-2), tmp_path / "b", device="cpu", quiet=True)
    assert second.metrics["loss"] < first.metrics["loss"]
    assert second.metrics["score"] == pytest.approx(-second.metrics["loss"])


# ---- validation


@pytest.fixture
def two_to_validate(tmp_path: Path) -> Path:
    """Two classes, six images of each for training and one for validation."""
    write_photographs(tmp_path / "data", size=8, classes=2, each=6)
    for file in (tmp_path / "data/val").glob("*/000001.jpg"):
        file.unlink()
    return tmp_path / "data"


@pytest.mark.parametrize("shard", ["false", "true"])
def test_a_process_without_a_validation_image_waits_for_the_others(
    command: Any, two_to_validate: Path, tmp_path: Path, shard: str
) -> None:
    """Three processes, two images; a sharded model has to be called by all of them."""
    settings = (f"data=folder:{two_to_validate}", "batch_size=6", "epochs=1", "padding=0")
    settings += (f"cache_dir={tmp_path / 'cache'}", "lr=0")
    three = command(tmp_path / "three", *settings, f"shard={shard}", world=3)
    assert three.wait() == [0, 0, 0], three.output()
    one = command(tmp_path / "one", *settings)
    assert one.wait() == [0], one.output()
    [few], [truth] = (validated(tmp_path / name) for name in ("three", "one"))
    assert few["top1"] == truth["top1"]
    assert "top5" not in few  # of two classes
    assert few["loss"] == pytest.approx(truth["loss"], rel=1e-5)


def validated(folder: Path) -> list[dict[str, Any]]:
    return [row for row in records.read_rows(folder / "metrics.jsonl") if row["split"] == "val"]


def test_streamed_images_none_of_which_can_be_read(
    make_config: Callable[..., Config], two_to_validate: Path, tmp_path: Path
) -> None:
    """With one left, it alone is counted; with none there is nothing to divide by, and that is said."""
    config = make_config(
        data=f"folder:{two_to_validate}", cache_limit=0, workers=0, padding=0, batch_size=4, epochs=1, lr=0.0
    )
    first, second = sorted((two_to_validate / "val").glob("*/*.jpg"))
    first.write_bytes(first.read_bytes()[:200])
    assert train(config, tmp_path / "one", device="cpu", quiet=True).metrics["top1"] in (0.0, 1.0)
    second.write_bytes(second.read_bytes()[:200])
    with pytest.raises(ValueError, match="none of the 2 validation samples can be read"):
        train(config, tmp_path / "none", device="cpu", quiet=True)


def test_a_validation_that_fails_leaves_the_model_as_it_was(make_config: Make) -> None:
    """In training mode, but for a part that was not."""

    class Failing(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            assert not self.training
            raise RuntimeError("out of memory")

    config, data = make_config(), load_digits()
    model = nn.Sequential(nn.BatchNorm2d(1), Failing())
    model[0].eval()
    here = Processes(rank=0, world=1, device=torch.device("cpu"))
    with pytest.raises(RuntimeError, match="out of memory"):
        Validation(config, make_task(config, data), data.val, here).of(model)
    assert [module.training for module in model.modules()] == [True, False, True]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mixed", [False, True])
def test_the_loss_of_logits_in_half_precision_is_not_rounded_to_it(device: str, mixed: bool, make_config: Make) -> None:
    task = Classify(make_config(), load_digits())
    logits = (5 * torch.randn(64, 10)).to(device, torch.bfloat16)
    targets = torch.randint(10, (64,), device=device)
    if mixed:
        targets = 0.3 * nn.functional.one_hot(targets, 10) + 0.7 * nn.functional.one_hot(targets.flip(0), 10)
    batch = Batch(inputs=(logits,), targets=targets, count=64)
    with torch.autocast(device, torch.bfloat16):
        loss = task.loss(nn.Identity(), batch)
    right = nn.functional.cross_entropy(logits.double(), targets.double() if mixed else targets)
    assert loss.item() == pytest.approx(right.item(), rel=1e-6)
