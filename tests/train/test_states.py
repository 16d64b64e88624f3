"""The states of a run: gone back to with a smaller step, whatever happens meanwhile, or begun anew, nothing lost."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from wellcond import records
from wellcond.data import Batch
from wellcond.train import checkpoint, states
from wellcond.train.checkpoint import SavedState, latest, saved_steps
from wellcond.train.config import Config
from wellcond.train.divergence import Divergence, Watch
from wellcond.train.folder import RunFolder
from wellcond.train.loop import Diverged, train
from wellcond.train.processes import Processes

Make = Callable[..., Config]


def run(config: Config, folder: Path) -> SavedState:
    train(config, folder, device="cpu", quiet=True)
    state = latest(folder / "checkpoints")
    assert state is not None
    return state


def test_every_rollback_halves_the_rate_again(make_config: Make, tmp_path: Path) -> None:
    config = make_config(lr=1e6, on_divergence="rollback", save_every=2)
    with pytest.warns(UserWarning, match="back to step") as told, pytest.raises(Diverged):
        run(config, tmp_path)  # an eighth of a million is still too much
    said = [str(warning.message) for warning in told]
    for number, factor in enumerate(("0.5", "0.25", "0.125"), start=1):  # each in other words: Python shows them all
        assert f"with lr × {factor}, rollback {number} of 3" in said[number - 1]
    rows = records.read_rows(tmp_path / "metrics.jsonl")
    events = [row["event"] for row in rows if row["split"] == "event"]
    assert sum(event.startswith("diverged: ") for event in events) == 4  # three to come back from, and the last
    back = [event.partition(" with ")[2] for event in events if event.startswith("back to step")]
    assert back == [f"lr × {factor}, rollback {n} of 3" for n, factor in ((1, "0.5"), (2, "0.25"), (3, "0.125"))]
    last = [row for row in rows if row["split"] == "train"][-1]
    rate = config.lr * 0.5 * (1 + math.cos(math.pi * (last["step"] - 1) / 10))
    assert last["lr"] == pytest.approx(0.125 * rate)


def test_a_rollback_survives_a_kill(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after it went back and before it saved anything new: the state on the disk does not know of it."""

    class Dead(BaseException):
        pass

    def go_back_and_die(self: states.States, problem: Divergence) -> int | None:
        assert whole(self, problem) == 0
        raise Dead

    config, whole = make_config(lr=1e6, opt="sgd", on_divergence="rollback"), states.States.go_back
    monkeypatch.setattr(states.States, "go_back", go_back_and_die)
    for number, factor in enumerate(("0.5", "0.25", "0.125"), start=1):
        with pytest.warns(UserWarning, match=f"lr × {factor}, rollback {number} of 3"), pytest.raises(Dead):
            run(config, tmp_path)
    monkeypatch.undo()
    with pytest.raises(Diverged):  # there is no fourth
        run(config, tmp_path)


def test_each_rollback_goes_further_back(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every training is lost at step 8, by the weights of the state of step 7; one old state is kept."""
    from wellcond.train.tasks import Classify

    steps, whole = [0], Classify.loss

    def spoilt(self: Classify, model: nn.Module, batch: Batch) -> Tensor:
        steps[0] += 1
        return whole(self, model, batch) * (math.nan if steps[0] == 8 else 1)

    go_back = states.States.go_back

    def told(self: states.States, problem: Divergence) -> int | None:
        step = go_back(self, problem)
        steps[0] = step or 0
        if step is not None:
            left.append(saved_steps(tmp_path / "checkpoints"))
        return step

    left: list[list[int]] = []
    monkeypatch.setattr(Classify, "loss", spoilt)
    monkeypatch.setattr(states.States, "go_back", told)
    with pytest.warns(UserWarning, match="back to step"), pytest.raises(Diverged):
        run(make_config(on_divergence="rollback", save_every=1, skip_limit=1), tmp_path)
    assert [note["to"] for note in records.read_json(tmp_path / "checkpoints/rollbacks.json")] == [6, 4, 4]
    assert left == [[4, 6], [4], [4]]  # what led to the loss is gone, or a killed run would go on from it


def test_states_with_bad_losses_are_not_gone_back_to(
    make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 5 on each loss is of the order of 1e7, and finite: the newest states are no better than the present."""
    from wellcond.train.tasks import Classify

    calls, whole = [0], Classify.loss

    def spoilt(self: Classify, model: nn.Module, batch: Batch) -> Tensor:
        calls[0] += 1
        loss = whole(self, model, batch)
        return loss + 1e7 if 5 <= calls[0] <= 10 else loss

    monkeypatch.setattr(Classify, "loss", spoilt)
    config = make_config(on_divergence="rollback", save_every=1, keep=3)
    with pytest.warns(UserWarning, match=r"diverged at step 10 \(.*ended at 1e\+07.*back to step 1 with lr × 0.5"):
        state = run(config, tmp_path)
    assert state.step == 10
    assert state.counters["watch"]["sound"]


def test_a_later_trouble_is_another_one(make_config: Make, tmp_path: Path) -> None:
    """Gone back at step 8, well for a long time, lost again: from the newest state, for nothing is wrong with it."""
    folder = RunFolder.open(tmp_path, make_config(on_divergence="rollback"))
    folder.rolled_back({"step": 8, "to": 7, "number": 1})
    for step, sound in ((5, True), (900, True), (1000, False)):
        watch = {"sound": sound}
        state = SavedState(
            step=step, model={"weight": torch.zeros(1)}, optimizer={}, counters={"rollbacks": 1, "watch": watch}
        )
        checkpoint.save(folder.checkpoints, state, keep=3)
    kept = cast(Any, SimpleNamespace(folder=folder, watch=Watch(patience=200)))
    assert states.States._good_step(kept, Divergence(step=1050, why="")) == 900  # the loss was high already at 1000
    assert states.States._good_step(kept, Divergence(step=20, why="")) == 5


def test_killed_in_the_middle_of_a_rollback(make_config: Make, tmp_path: Path) -> None:
    """After it was noted, before the states that led to the loss were cleared away: they are not gone on from."""
    config = make_config(on_divergence="rollback")
    for step in (0, 1, 2):
        state = SavedState(step=step, model={"weight": torch.zeros(1)}, optimizer={}, counters={"rollbacks": 0})
        checkpoint.save(tmp_path / "checkpoints", state, keep=3)
    RunFolder(path=tmp_path).rolled_back({"step": 3, "to": 1, "number": 1})
    fits, unused = cast(Any, SimpleNamespace(misfit=lambda state: None)), cast(Any, None)
    here = Processes(rank=0, world=1, device=torch.device("cpu"))
    kept = states.States(config, RunFolder(path=tmp_path), here, fits, unused, unused)
    found, foreign = kept._newest()
    assert found is not None
    assert (found.step, foreign) == (1, [])
    after = SavedState(step=2, model={"weight": torch.zeros(1)}, optimizer={}, counters={"rollbacks": 1})
    checkpoint.save(tmp_path / "checkpoints", after, keep=3)
    found, _ = kept._newest()
    assert found is not None
    assert found.step == 2  # saved since, by the run that went back


def test_a_state_of_another_run_is_passed_over_and_kept(
    make_config: Make, assert_same_run: Any, tmp_path: Path
) -> None:
    config = make_config()
    run(config, tmp_path / "whole")
    run(make_config(seed=1), tmp_path / "other")
    shutil.copytree(tmp_path / "whole", tmp_path / "mixed")
    newest = tmp_path / "mixed/checkpoints/step-00000010"
    shutil.rmtree(newest)
    shutil.copytree(tmp_path / "other/checkpoints/step-00000010", newest)
    with pytest.warns(UserWarning, match=r"step-00000010 is not of this run: seed is 1 there, 0 here.* step 5"):
        run(config, tmp_path / "mixed")
    assert_same_run(tmp_path / "mixed", tmp_path / "whole")
    kept = tmp_path / "mixed/checkpoints/other-step-00000010"
    assert (kept / "state.pt").read_bytes() == (tmp_path / "other/checkpoints/step-00000010/state.pt").read_bytes()


def test_where_all_states_are_of_another_model_nothing_is_touched(make_config: Make, tmp_path: Path) -> None:
    config = make_config(epochs=1)
    run(config, tmp_path)
    path = tmp_path / "checkpoints/step-00000005"
    state = checkpoint.read(path)
    model = {name: tensor for name, tensor in state.model.items() if name != "head.bias"}
    checkpoint.save(path.parent, SavedState(**{**vars(state), "model": model, "config": {}}), keep=1)
    before = (path / "model.safetensors").read_bytes()
    with pytest.raises(
        ValueError,
        match=r"step-00000005 is not of this run: its weights do not fit .*head\.bias: missing there.*move it",
    ):
        run(config, tmp_path)
    assert (path / "model.safetensors").read_bytes() == before


def test_a_power_cut_leaves_a_state_with_its_rows(
    make_config: Make, assert_same_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that was not fsynced when the newest state got its name is lost: the rows of that state were."""

    class Dead(BaseException):
        pass

    config = make_config(save_every=3, probe_every=2, probe_samples=4)
    run(config, tmp_path / "whole")
    died, kept, whole, fsync = tmp_path / "died", {}, Path.rename, os.fsync

    def durable(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        kept[path] = path.stat().st_size
        fsync(handle)

    def rename(self: Path, target: Path) -> Path:
        renamed = whole(self, target)
        if target.name == "step-00000006":
            raise Dead
        return renamed

    monkeypatch.setattr(os, "fsync", durable)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(Dead):
        run(config, died)
    monkeypatch.undo()
    for name in ("metrics.jsonl", "probe.jsonl"):
        os.truncate(died / name, kept.get(died / name, 0))
    run(config, died)
    assert_same_run(died, tmp_path / "whole")


def test_a_rollback_that_helps_ends_well(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loss is spoilt on its way, as a bad batch would: the second time the same step is well."""
    from wellcond.train.tasks import Classify

    calls, whole = [0], Classify.loss

    def spoilt(self: Classify, model: nn.Module, batch: Batch) -> Tensor:
        calls[0] += 1
        loss = whole(self, model, batch)
        return loss * math.nan if calls[0] == 7 else loss

    monkeypatch.setattr(Classify, "loss", spoilt)
    config = make_config(on_divergence="rollback", probe_every=2, probe_samples=8, skip_limit=1)
    with pytest.warns(UserWarning, match=r"diverged at step 7 .*back to step 5 with lr × 0.5"):
        state = run(config, tmp_path)
    assert state.step == 10
    assert state.counters["rollbacks"] == 1
    rows = records.read_rows(tmp_path / "metrics.jsonl")
    assert sorted(row["step"] for row in rows if row["split"] == "train") == list(range(1, 11))  # each once
    lrs = {row["step"]: row["lr"] for row in rows if row["split"] == "train"}
    assert lrs[6] == pytest.approx(0.5 * config.lr * 0.5 * (1 + math.cos(math.pi * 5 / 10)))
    measured = [row["step"] for row in records.read_rows(tmp_path / "probe.jsonl") if row["name"] == "log_kappa"]
    assert {step: measured.count(step) for step in measured} == dict.fromkeys((0, 2, 4, 6, 8, 10), 8)


def test_without_its_states_a_run_begins_anew_and_keeps_what_it_wrote(
    make_config: Make, assert_same_run: Any, tmp_path: Path
) -> None:
    config = make_config(probe_every=3, probe_samples=4)
    run(config, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    for number in (1, 2):
        shutil.rmtree(tmp_path / "again/checkpoints")
        with pytest.warns(
            UserWarning, match=rf"starts again from step 0.*in metrics\.before-{number}\.jsonl and probe"
        ):
            run(config, tmp_path / "again")
        assert_same_run(tmp_path / "again", tmp_path / "whole")
    for name in ("metrics", "probe"):
        first = (tmp_path / "again" / f"{name}.before-1.jsonl").read_bytes()
        assert first == (tmp_path / "whole" / f"{name}.jsonl").read_bytes()
        assert (tmp_path / "again" / f"{name}.before-2.jsonl").exists()
