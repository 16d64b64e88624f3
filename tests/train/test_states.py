"""The states of a run: gone back to with a smaller step, whatever happens meanwhile, or begun anew, nothing lost."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn

from wellcond import records
from wellcond.train import states
from wellcond.train.checkpoint import SavedState, latest
from wellcond.train.config import Config
from wellcond.train.divergence import Divergence
from wellcond.train.loop import Diverged, train

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

    class Dead(Exception):  # noqa: N818
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


def test_a_rollback_that_helps_ends_well(make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One loss is spoilt on its way, as a bad batch would: the second time the same step is well."""
    from wellcond.train.tasks import Classify

    calls, whole = [0], Classify.loss

    def spoilt(self: Classify, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        calls[0] += 1
        loss = whole(self, model, images, labels)
        return loss * math.nan if calls[0] == 7 else loss

    monkeypatch.setattr(Classify, "loss", spoilt)
    config = make_config(on_divergence="rollback", probe_every=2, probe_samples=8)
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
