"""A step whose gradient is not finite changes nothing and is counted, whatever the optimiser and the precision."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wellcond.train.update
from wellcond import records
from wellcond.data import Batch, open_data
from wellcond.train.checkpoint import SavedState, latest, saved_steps
from wellcond.train.config import Config
from wellcond.train.divergence import RESCALED, Watch
from wellcond.train.loop import Diverged, train
from wellcond.train.processes import Processes
from wellcond.train.replay import Passes
from wellcond.train.setup import Parts, build
from wellcond.train.tasks import Classify, make_task
from wellcond.train.update import Update

Make = Callable[..., Config]
MIXER = {"model": "convmixer_768_32", "model_kwargs": {"dim": 16, "depth": 1, "kernel_size": 3, "patch_size": 2}}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def parts_on(device: str, config: Config) -> Parts:
    here = Processes(rank=0, world=1, device=torch.device(device))
    torch.manual_seed(0)
    return build(config, make_task(config, open_data("digits", image_size=8)), here, total=10, steps_per_epoch=5)


def one_step(update: Update, parts: Parts, device: str, step: int, factor: float = 1.0) -> bool:
    """A step whose gradients, and what batch norms see, are multiplied by `factor`."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(4, 1, 8, 8, generator=generator).to(device) * (1.0 if math.isfinite(factor) else factor)
    update.begin()
    parts.scaler.scale(parts.model.train()(images).square().mean() * factor).backward()
    skipped = update(step, logged=False)
    assert skipped is not None
    return bool(skipped)


def everything(parts: Parts) -> dict[str, Tensor]:
    saved = parts.saved(0, {}).tensors
    return {name: tensor.detach().clone() for name, tensor in saved.items()}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [{}, {"opt": "lamb"}, {"opt": "sgd"}, {"ema_decay": 0.9, "clip_grad": 1.0}, {**MIXER, "ema_decay": 0.9}],
    ids=("adamw", "lamb", "sgd", "averaged and clipped", "batch norm"),
)
@pytest.mark.parametrize("factor", [math.inf, math.nan])
def test_a_step_that_is_left_out_leaves_all_bits(
    make_config: Make, device: str, settings: dict[str, Any], factor: float
) -> None:
    """At the first step, when there are no moments yet, and later; then the training goes on as if it had not been."""
    check(make_config(**settings), device, factor)


@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9, "clip_grad": 1.0}, {**MIXER, "ema_decay": 0.9}])
def test_an_optimiser_that_is_told_by_a_tensor(
    make_config: Make, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """What a GPU does without the CPU's knowledge, with torch's fused AdamW for a CPU."""
    monkeypatch.setattr(wellcond.train.update, "_takes_decision", lambda optimizer: True)
    check(make_config(**settings), "cpu", math.inf, fused=True)


def check(config: Config, device: str, factor: float, *, fused: bool | None = None) -> None:
    spoilt, plain = (parts_on(device, config) for _ in range(2))
    for group in (*spoilt.optimizer.param_groups, *plain.optimizer.param_groups) if fused else ():
        group["fused"] = True
    updates = Update(config, spoilt), Update(config, plain)
    for step in range(4):
        before = everything(spoilt)
        assert one_step(updates[0], spoilt, device, step, factor)
        after = everything(spoilt)
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        assert all(not tensor.any() for name, tensor in after.items() if name not in before)  # fresh moments
        for update, parts in zip(updates, (spoilt, plain), strict=True):
            assert not one_step(update, parts, device, step)
            assert update.gradient_norm.isfinite()
    ours, others = everything(spoilt), everything(plain)
    assert ours.keys() == others.keys()
    for name, tensor in ours.items():
        if device == "cpu":
            assert torch.equal(others[name], tensor), name
        else:  # a GPU adds up in any order
            torch.testing.assert_close(others[name], tensor, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"ema_decay": 0.9, "clip_grad": 1.0}, {**MIXER, "ema_decay": 0.9}])
def test_adamw_on_a_gpu_waits_for_nothing(make_config: Make, no_waiting: Any, settings: dict[str, Any]) -> None:
    config = make_config(**settings)
    parts = parts_on("cuda", config)
    update = Update(config, parts)
    for step in range(3):
        one_step(update, parts, "cuda", step)
    loss = parts.model(torch.randn(4, 1, 8, 8, device="cuda")).square().mean()
    with no_waiting():
        update.begin()
        loss.backward()
        update(3, logged=False)


@pytest.mark.gpu
@pytest.mark.parametrize("opt", ["adamw", "lamb"])
def test_replayed_steps_are_left_out_too(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opt: str
) -> None:
    """Images that are not finite, at a step that is replayed as a graph."""
    calls, whole = [0], Passes.__call__

    def spoilt(self: Passes, batch: Batch, *, hooked: bool = False) -> Tensor:
        calls[0] += 1
        bad = calls[0] in (6, 8)
        given = [t * math.inf if bad and t.is_floating_point() else t for t in batch.tensors]
        return whole(self, batch.holding(given), hooked=hooked)

    monkeypatch.setattr(Passes, "__call__", spoilt)
    train(make_config(step_graph=True, ema_decay=0.9, opt=opt), tmp_path, device="cuda", quiet=True)
    assert [row["skipped"] for row in rows(tmp_path, "train")] == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    state = latest(tmp_path / "checkpoints")
    assert state is not None
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())


@pytest.mark.parametrize("device", DEVICES)
def test_float16_finds_its_scale_and_is_not_handled_twice(make_config: Make, device: str) -> None:
    config = make_config(amp_dtype="float16")
    parts = parts_on(device, config)
    update, start = Update(config, parts), everything(parts)
    one_step(update, parts, device, 0, math.inf)
    assert parts.scaler.get_scale() == 2.0**15
    now = everything(parts)
    assert all(torch.equal(now[name], tensor) for name, tensor in start.items())
    assert not one_step(update, parts, device, 1)
    assert parts.scaler.get_scale() == 2.0**15
    assert any(not torch.equal(everything(parts)[name], tensor) for name, tensor in start.items())


def test_what_is_never_left_out_is_the_step_of_before(make_config: Make) -> None:
    config = make_config(skip_limit=0)
    parts = parts_on("cpu", config)
    update = Update(config, parts)
    update.begin()
    (parts.model(torch.ones(2, 1, 8, 8)).sum() * math.nan).backward()
    assert update(0, logged=True) is None
    assert not all(tensor.isfinite().all() for tensor in parts.model.state_dict().values())


# ---- in a training


def spoil(monkeypatch: pytest.MonkeyPatch, bad: Callable[[int], bool]) -> list[int]:
    """Multiply the loss of some calls by NaN; the number of calls so far."""
    calls, whole = [0], Classify.loss

    def spoilt(self: Classify, model: nn.Module, batch: Batch) -> Tensor:
        calls[0] += 1
        return whole(self, model, batch) * (math.nan if bad(calls[0]) else 1)

    monkeypatch.setattr(Classify, "loss", spoilt)
    return calls


def run(config: Config, folder: Path) -> SavedState:
    train(config, folder, device="cpu", quiet=True)
    state = latest(folder / "checkpoints")
    assert state is not None
    return state


def rows(folder: Path, split: str) -> list[dict[str, Any]]:
    return [row for row in records.read_rows(folder / "metrics.jsonl") if row["split"] == split]


def test_a_training_goes_on_after_bad_steps_and_counts_them(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two parts a step: one of them is enough."""
    spoil(monkeypatch, lambda call: call in (5, 13, 14))
    state = run(make_config(accumulate=2, ema_decay=0.9), tmp_path)
    assert [row["skipped"] for row in rows(tmp_path, "train")] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    told = [(row["step"], row["event"]) for row in rows(tmp_path, "event")]
    assert told == [(step, "left out: its gradient was not finite") for step in (3, 7)]
    assert math.isnan(rows(tmp_path, "train")[2]["loss"])
    assert state.counters["watch"]["skipped"] == 2
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())
    assert [row.skipped for row in records.Run.open(tmp_path).train][-1] == 2


def test_so_many_in_a_row_are_a_training_that_is_lost(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = spoil(monkeypatch, lambda call: call == 2 or call > 4)
    match = "diverged at step 7 of 10: the gradient was not finite in 3 steps in a row, with a loss of nan"
    with pytest.raises(Diverged, match=match):
        run(make_config(skip_limit=3, save_every=1, keep=1), tmp_path)
    assert calls[0] == 7
    assert saved_steps(tmp_path / "checkpoints") == [4, 5, 6]  # the last before these steps is still there


def test_bad_steps_at_the_end_are_a_lost_training_but_one_is_not(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda call: call == 10)
    assert run(make_config(), tmp_path / "one").step == 10
    spoil(monkeypatch, lambda call: call >= 9)
    with pytest.raises(Diverged, match="diverged at step 10 of 10"):
        run(make_config(), tmp_path / "two")


def test_float16_may_look_for_its_scale() -> None:
    """With a finite loss steps are left out for the scale's sake, but not for ever."""
    true, lost = torch.tensor(True), torch.tensor(math.nan)
    for scaled, loss, first in (
        (True, torch.tensor(2.0), 10 + RESCALED), (True, lost, 10), (False, torch.tensor(2.0), 10), (False, lost, 10),
    ):  # fmt: skip
        watch, step = Watch(patience=200, skip_limit=10, scaled=scaled), 0
        problem = None
        while problem is None:
            step += 1
            watch.see(step, loss, true)
            problem = watch.judge()
        assert problem.step == first
        assert bool(watch.untold) == (not scaled or bool(loss.isnan()))


def test_the_count_survives_a_kill(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two bad steps in a row the first is before the state that the run goes on from."""
    config = make_config(save_every=1, keep=9, ema_decay=0.9)
    spoil(monkeypatch, lambda call: call in (4, 5))
    whole = run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for step in range(5, 11):
        shutil.rmtree(tmp_path / f"again/checkpoints/step-{step:08d}")
    spoil(monkeypatch, lambda call: False)
    monkeypatch.undo()
    spoil(monkeypatch, lambda call: call == 1)
    again = run(config, tmp_path / "again")
    assert again.counters == whole.counters
    assert again.counters["watch"]["skipped"] == 2
    for name, tensor in whole.tensors.items():
        assert torch.equal(again.tensors[name], tensor), name


@pytest.mark.parametrize("settings", [(), ("shard=true",)], ids=("whole", "sharded"))
def test_all_processes_leave_out_what_one_cannot_use(
    command: Callable[..., Any], tmp_path: Path, settings: tuple[str, ...]
) -> None:
    started = command(tmp_path / "run", "epochs=1", *settings, world=2, spoilt=(1, 3))
    assert started.wait() == [0, 0], started.output()
    assert [row["skipped"] for row in rows(tmp_path / "run", "train")] == [0, 0, 1, 1, 1]
    state = latest(tmp_path / "run/checkpoints")
    assert state is not None
    assert all(tensor.isfinite().all() for tensor in state.tensors.values())
