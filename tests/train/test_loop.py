"""What a training computes: the same whatever it is divided into, counted exactly, and not moved by being measured."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file
from torch import nn

import wellcond
from wellcond import records
from wellcond.data import EvalBatches, TrainBatches, open_data
from wellcond.models.surgery import GrayingSettings, attention_of, graying_of, skips_of
from wellcond.train import checkpoint, states
from wellcond.train.checkpoint import SavedState, discard, latest
from wellcond.train.config import Config
from wellcond.train.loop import Diverged, augmentation_of, train
from wellcond.train.tasks import Classify, Validation

Make = Callable[..., Config]


def weights_of(folder: Path) -> SavedState:
    state = latest(folder / "checkpoints")
    assert state is not None
    return state


def file_of(folder: Path, name: str = "model.safetensors") -> Path:
    return folder / "checkpoints" / f"step-{weights_of(folder).step:08d}" / name


def run(config: Config, folder: Path) -> tuple[dict[str, float], SavedState]:
    outcome = train(config, folder, device="cpu", quiet=True)
    return outcome.metrics, weights_of(folder)


def assert_close(one: SavedState, other: SavedState) -> None:
    """But for rounding, which Adam's division by small second moments may enlarge."""
    assert one.model.keys() == other.model.keys()
    for name, tensor in one.model.items():
        torch.testing.assert_close(tensor, other.model[name], rtol=1e-3, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def plain(config: Config, **more: Any) -> Any:
    return timm.create_model(config.model, num_classes=10, in_chans=1, **config.model_kwargs, **more)


@torch.no_grad()
def count_by_hand(model: nn.Module, config: Config) -> dict[str, float]:
    """Top-1, top-5 and loss over the validation images, one after the other."""
    data = open_data("digits", image_size=config.image_size, holdout=config.holdout, seed=config.seed)
    model.eval()
    first = five = 0
    losses = []
    for images, labels in EvalBatches(data.val, batch_size=1):
        logits = model(images)[0]
        order = logits.argsort(descending=True)
        first += int(order[0] == labels[0])
        five += int(labels[0] in order[:5])
        losses.append(-torch.log_softmax(logits.double(), 0)[labels[0]].item())
    count = len(data.val)
    return {"top1": first / count, "top5": five / count, "loss": sum(losses) / count}


# ---- divided in other ways, the same


def test_accumulated_parts_give_the_same_step(make_config: Make, tmp_path: Path) -> None:
    _, whole = run(make_config(epochs=1), tmp_path / "whole")
    _, parts = run(make_config(epochs=1, accumulate=4), tmp_path / "parts")
    assert_close(parts, whole)
    _, other = run(make_config(epochs=1, seed=1), tmp_path / "other")
    with pytest.raises(AssertionError):  # the comparison would see a difference
        assert_close(other, whole)


def test_two_processes_give_the_same_as_one_and_count_exactly(command: Any, make_config: Make, tmp_path: Path) -> None:
    settings = ("epochs=2", "mixup=0.8", "label_smoothing=0.1", "eval_every=2")
    started = command(tmp_path / "two", *settings, world=2)
    assert started.wait() == [0, 0], started.output()
    assert command(tmp_path / "one", *settings).wait() == [0]
    assert_close(weights_of(tmp_path / "two"), weights_of(tmp_path / "one"))
    counted = [row for row in records.read_rows(tmp_path / "two/metrics.jsonl") if row["split"] == "val"]
    assert [row["step"] for row in counted] == [10]
    config = make_config()
    model = plain(config)
    model.load_state_dict(load_file(file_of(tmp_path / "two")))
    truth = count_by_hand(model, config)
    assert (counted[0]["top1"], counted[0]["top5"]) == (truth["top1"], truth["top5"])
    assert counted[0]["loss"] == pytest.approx(truth["loss"], rel=1e-5)


@pytest.mark.parametrize("batch_size", [7, 256, 359])
def test_the_last_partial_batch_is_counted(make_config: Make, tmp_path: Path, batch_size: int) -> None:
    config = make_config(epochs=1, batch_size=batch_size, log_every=1000)
    metrics, state = run(config, tmp_path)
    model = plain(config)
    model.load_state_dict(dict(state.model))
    truth = count_by_hand(model, config)
    assert (metrics["top1"], metrics["top5"]) == (truth["top1"], truth["top5"])
    assert metrics["loss"] == pytest.approx(truth["loss"], rel=1e-5)


# ---- against a loop written by hand


def test_a_step_is_what_it_says(make_config: Make, tmp_path: Path) -> None:
    """Clipping, smoothed and mixed labels, layer decay, weight decay, schedule, EMA: a plain loop with timm's parts."""
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    config = make_config(
        epochs=2, clip_grad=0.1, label_smoothing=0.1, mixup=0.8, layer_decay=0.7, ema_decay=0.9, warmup_epochs=1
    )
    _, state = run(config, tmp_path)
    torch.manual_seed(0)
    model = plain(config).train()
    average = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = create_optimizer_v2(model, opt="adamw", lr=config.lr, weight_decay=0.05, layer_decay=0.7)
    schedule = CosineLRScheduler(
        optimizer, t_initial=10, warmup_t=5, warmup_lr_init=config.warmup_lr, t_in_epochs=False
    )
    data = open_data("digits", image_size=8)
    batches = TrainBatches(data.train, batch_size=256, seed=0, augmentation=augmentation_of(config), num_classes=10)
    step = 0
    for epoch in range(2):
        for images, labels in batches.epoch(epoch):
            assert labels.shape == (256, 10)
            schedule.step_update(step)
            loss = -(labels * torch.log_softmax(model(images), 1)).sum(1).mean()
            optimizer.zero_grad()
            loss.backward()
            norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
            for parameter in model.parameters():
                parameter.grad.mul_(min(1.0, 0.1 / (norm.item() + 1e-6)))
            optimizer.step()
            decay = 0.0 if step <= 1 else 0.9  # timm's average starts as a copy
            for name, tensor in model.state_dict().items():
                average[name] = decay * average[name] + (1 - decay) * tensor
            step += 1
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(state.model[name], tensor, rtol=1e-4, atol=1e-5)
        assert state.ema is not None
        torch.testing.assert_close(state.ema[name], average[name], rtol=1e-4, atol=1e-5)


def test_validation_uses_the_average(make_config: Make, tmp_path: Path) -> None:
    config = make_config(ema_decay=0.9)
    metrics, state = run(config, tmp_path)
    model = plain(config)
    model.load_state_dict(dict(state.ema or {}))
    assert metrics["loss"] == pytest.approx(count_by_hand(model, config)["loss"], rel=1e-5)
    model.load_state_dict(dict(state.model))
    assert metrics["loss"] != pytest.approx(count_by_hand(model, config)["loss"], rel=1e-5)


def test_a_holdout_is_validated_on_and_not_trained_on(make_config: Make, tmp_path: Path) -> None:
    config = make_config(epochs=1, holdout=0.2)
    metrics, state = run(config, tmp_path)
    model = plain(config)
    model.load_state_dict(dict(state.model))
    held = count_by_hand(model, config)
    assert metrics["loss"] == pytest.approx(held["loss"], rel=1e-5)
    assert state.step == 4  # of 1150 images, not 1437


def test_bfloat16_computes_in_it_and_keeps_float32_weights(make_config: Make, tmp_path: Path) -> None:
    full, state = run(make_config(epochs=1), tmp_path / "full")
    half, rounded = run(make_config(epochs=1, amp_dtype="bfloat16"), tmp_path / "half")
    assert all(tensor.dtype == torch.float32 for tensor in rounded.model.values())
    assert any(not torch.equal(tensor, state.model[name]) for name, tensor in rounded.model.items())
    assert half["loss"] == pytest.approx(full["loss"], rel=0.02)


# ---- what is built


def test_the_surgery_reaches_the_model_and_its_file(make_config: Make, tmp_path: Path) -> None:
    config = make_config(
        epochs=1, remove_skips=["mlp"], gray="dct", epsilon=0.7, restore_scale=False, attention="skyformer",
        attention_kwargs={"num_landmarks": 4},
    )  # fmt: skip
    metrics, state = run(config, tmp_path)
    model = plain(config)
    wellcond.load(model, file_of(tmp_path))
    assert graying_of(model) == GrayingSettings(method="dct", epsilon=0.7, restore_scale=False)
    assert skips_of(model) == {"blocks.0": ("mlp",), "blocks.1": ("mlp",)}
    assert len(attention_of(model)) == 2
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state.model[name])
    assert metrics["loss"] == pytest.approx(count_by_hand(model, config)["loss"], rel=1e-4)


def test_a_file_of_an_average_loads_too(make_config: Make, tmp_path: Path) -> None:
    config = make_config(epochs=1, ema_decay=0.9, remove_skips=["sa"])
    run(config, tmp_path)
    model = plain(config)
    wellcond.load(model, file_of(tmp_path, "ema.safetensors"))
    assert skips_of(model) == {"blocks.0": ("sa",), "blocks.1": ("sa",)}


def test_training_starts_from_a_checkpoint_with_a_fresh_head(make_config: Make, tmp_path: Path) -> None:
    config = make_config(epochs=1)
    run(config, tmp_path / "before")
    start = str(file_of(tmp_path / "before"))
    _, still = run(make_config(epochs=1, lr=0.0, warmup_lr=0.0, checkpoint=start), tmp_path / "still")
    for name, tensor in load_file(start).items():
        assert torch.equal(still.model[name], tensor)
    small = {**config.model_kwargs, "depth": 3}
    with pytest.raises(ValueError, match="does not fit the model"):
        run(make_config(checkpoint=start, model_kwargs=small), tmp_path / "deeper")


def test_what_cannot_be_built_is_said_and_leaves_the_folder_free(make_config: Make, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="timm cannot build"):
        run(make_config(model_kwargs={"img_size": 8, "patch_size": 4, "deepth": 2}), tmp_path)
    with pytest.raises(ValueError, match="training images"):
        run(make_config(batch_size=2000), tmp_path)
    with pytest.raises(ValueError, match="images of 8 × 8 pixels are smaller than a patch of cait_xxs24_224, 16 × 16"):
        run(make_config(model="cait_xxs24_224", model_kwargs={"img_size": 8}), tmp_path)
    with pytest.raises(ValueError, match="images of 6 × 6 pixels are smaller than a patch of convmixer_768_32, 7 × 7"):
        run(make_config(image_size=6, model="convmixer_768_32", model_kwargs={"dim": 16, "depth": 1}), tmp_path)
    run(make_config(epochs=1), tmp_path)  # the mended command, in the same folder


# ---- the probe


def test_the_probe_changes_no_bit(make_config: Make, tmp_path: Path) -> None:
    settings = {"drop_path": 0.2, "model_kwargs": {**make_config().model_kwargs, "proj_drop_rate": 0.1}}
    _, without = run(make_config(**settings), tmp_path / "without")
    _, watched = run(make_config(**settings, probe_every=3, probe_samples=16, accumulate=2), tmp_path / "accumulated")
    _, watched = run(make_config(**settings, probe_every=3, probe_samples=16), tmp_path / "with")
    for name, tensor in without.model.items():
        assert torch.equal(watched.model[name], tensor), name
    for folder in ("with", "accumulated"):
        rows = records.read_rows(tmp_path / folder / "probe.jsonl")
        kappas = [row for row in rows if row["name"] == "log_kappa"]
        assert sorted({row["step"] for row in kappas}) == [0, 3, 6, 9, 10]
        assert len(kappas) == 5 * 2 * 4  # steps × blocks × sites, each once
        tokens, width = records.Run.open(tmp_path / folder).about["shape"]  # what a page compares with others
        assert (tokens - 1) ** 0.5 % 1 == 0
        assert width == settings["model_kwargs"]["embed_dim"]
    assert not (tmp_path / "without/probe.jsonl").exists()


# ---- divergence


def test_a_lost_training_names_step_block_and_kappa(make_config: Make, tmp_path: Path) -> None:
    config = make_config(lr=1e6, probe_every=1, probe_samples=8, save_every=1)
    with pytest.raises(
        Diverged, match=r"diverged at step \d+ of 10: .*blocks\.\d [+a-z]+, log κ .*smaller lr"
    ) as caught:
        run(config, tmp_path)
    events = [row for row in records.read_rows(tmp_path / "metrics.jsonl") if row["split"] == "event"]
    assert f"at step {events[-1]['step']} " in str(caught.value)
    kept = latest(tmp_path / "checkpoints")  # what is there to go on from is finite
    assert kept is None or all(tensor.isfinite().all() for tensor in kept.model.values())
    assert latest(tmp_path / "diverged") is not None


def test_only_what_is_not_yet_set_is_recommended(make_config: Make, tmp_path: Path) -> None:
    for name, settings, advice in (
        ("unclipped", {}, "A smaller lr, or clip_grad=1, may help"),
        ("clipped", {"clip_grad": 1.0}, "A smaller lr may help"),
    ):
        with pytest.raises(Diverged, match=f"{advice}$"):
            run(make_config(lr=1e6, **settings), tmp_path / name)


def test_a_training_that_exploded_and_ends_at_chance_is_lost(command: Any, tmp_path: Path) -> None:
    """Its losses are finite, its first ones the highest, and its last ones those of a model that knows nothing."""
    started = command(tmp_path / "run", "lr=10", "epochs=12")
    assert started.wait() == [3], started.output()
    assert "diverged at step 60 of 60: the loss rose to" in started.output()
    assert "its start, 2.3" in started.output()
    rows = [row for row in records.read_rows(tmp_path / "run/metrics.jsonl") if row["split"] == "train"]
    first = [row["loss"] for row in rows[:20]]
    assert rows[-1]["loss"] < sum(first) / 20  # below the mean of the first ones, which was taken for the start once
    started = command(tmp_path / "run", "lr=10", "epochs=12")
    assert started.wait() == [3], started.output()  # it does not end well the second time


def test_weights_that_are_not_finite_are_not_saved(make_config: Make, tmp_path: Path) -> None:
    """After the first step, whose loss was fine: a run would go on from them for ever."""
    with pytest.raises(Diverged, match=r"diverged at step 1 of 10: the weights \S+ are no longer finite"):
        run(make_config(opt="sgd", lr=1e20, weight_decay=1e30, save_every=1), tmp_path)
    assert latest(tmp_path / "checkpoints") is None


# ---- going on


@pytest.mark.parametrize(
    "settings",
    [
        {"task": "mae", "padding": 0, "decoder_dim": 16, "decoder_depth": 1, "decoder_heads": 2, "gray": "dct"},
        {"attention": "skyformer", "attention_kwargs": {"num_landmarks": 2}},
        {"amp_dtype": "float16"},
        {"opt": "sgd", "sched": "tanh", "accumulate": 2, "layer_decay": 0.8},
        {"mixup": 0.8, "cutmix": 1.0, "erasing": 0.5, "padding": 0, "scale_min": 0.5, "flip": 0.5, "color_jitter": 0.3},
        {"model": "convmixer_768_32", "model_kwargs": {"dim": 16, "depth": 1, "kernel_size": 3, "patch_size": 4}},
    ],
    ids=lambda settings: next(iter(settings)) + "-" + str(next(iter(settings.values()))),
)
def test_going_on_reaches_the_same_bits(
    make_config: Make, assert_same_run: Any, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = make_config(**settings, probe_every=3, probe_samples=4)
    run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    shutil.rmtree(tmp_path / "again/checkpoints/step-00000010")
    torch.manual_seed(17)  # whatever was drawn before means nothing
    run(config, tmp_path / "again")
    assert_same_run(tmp_path / "again", tmp_path / "whole")


@pytest.mark.parametrize("last", [1, 4, 5, 10])
def test_a_process_that_dies_right_after_saving_has_written_all(
    make_config: Make, assert_same_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: int
) -> None:
    """The rows of a step and its validation come before its state, for who goes on from it does not make them again."""
    config = make_config(save_every=1, probe_every=1, probe_samples=4)
    run(config, tmp_path / "whole")

    class Dead(BaseException):
        pass

    def save_and_die(folder: Path, state: SavedState, **how: Any) -> Path:
        path = checkpoint.save(folder, state, **how)
        if state.step == last:
            raise Dead
        return path

    monkeypatch.setattr(states, "save", save_and_die)
    with pytest.raises(Dead):
        run(config, tmp_path / "died")
    monkeypatch.undo()
    run(config, tmp_path / "died")
    assert_same_run(tmp_path / "died", tmp_path / "whole")


def test_the_best_state_is_kept_beside_the_newest(make_config: Make, tmp_path: Path, monkeypatch) -> None:
    scores = iter([0.2, 0.9, 0.5, 0.4, 0.3])
    monkeypatch.setattr(Validation, "of", lambda self, model, number: {"loss": 1.0, "top1": next(scores), "top5": 1.0})
    train(make_config(epochs=5, keep=1, keep_best=True), tmp_path, device="cpu", quiet=True)
    names = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert names == ["step-00000010", "step-00000025"]
    assert (tmp_path / "checkpoints/best").resolve().name == "step-00000010"


def test_a_best_state_that_was_not_kept_is_told_and_another_one_found(
    make_config: Make, tmp_path: Path, monkeypatch
) -> None:
    scores = iter([0.2, 0.9, 0.5, 0.4, 0.3, 0.3])
    monkeypatch.setattr(Validation, "of", lambda self, model, number: {"loss": 1.0, "top1": next(scores), "top5": 1.0})
    train(make_config(epochs=5), tmp_path, device="cpu", quiet=True)
    kept = tmp_path / "checkpoints"
    shutil.rmtree(kept / "step-00000025")
    with pytest.warns(UserWarning, match="the state of the best validation so far, of step 10, is gone"):
        train(make_config(epochs=5, keep_best=True), tmp_path, device="cpu", quiet=True)
    assert os.readlink(kept / "best") == "step-00000025"
    shutil.rmtree(kept / "step-00000025")
    discard(kept, [])
    assert not (kept / "best").is_symlink()


def test_raw_and_averaged_weights_are_both_validated(make_config: Make, tmp_path: Path) -> None:
    train(make_config(epochs=1, ema_decay=0.99), tmp_path, device="cpu", quiet=True)
    row = next(row for row in records.read_rows(tmp_path / "metrics.jsonl") if row["split"] == "val")
    assert row["raw_loss"] != row["loss"]
    assert 0 <= row["raw_top1"] <= 1


def test_an_exception_loses_no_finished_step(make_config: Make, assert_same_run, tmp_path: Path, monkeypatch) -> None:
    """Out of memory in step 8, between two states: what was done is saved, and goes on to the same bits."""
    config = make_config(epochs=2, save_every=100)
    train(config, tmp_path / "whole", device="cpu", quiet=True)
    loss, calls = Classify.loss, [0]

    def fails_once(self, *given):
        calls[0] += 1
        if calls[0] == 8:
            raise torch.OutOfMemoryError("no memory left")
        return loss(self, *given)

    monkeypatch.setattr(Classify, "loss", fails_once)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        train(config, tmp_path / "run", device="cpu", quiet=True)
    assert "the state after step 7 is saved" in raised.value.__notes__[0]
    train(config, tmp_path / "run", device="cpu", quiet=True)
    assert calls[0] == 11  # 7 and the one that failed, then 3
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_rows_say_how_long_data_were_waited_for(make_config: Make, tmp_path: Path) -> None:
    train(make_config(epochs=1), tmp_path, device="cpu", quiet=True)
    rows = [row for row in records.read_rows(tmp_path / "metrics.jsonl") if row["split"] == "train"]
    assert all(0 <= row["data_wait"] <= 1 for row in rows)
    assert not any("memory_mib" in row for row in rows)
