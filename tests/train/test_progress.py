"""The progress tells loss, rate and the worst block, in lines where there is no terminal."""

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from wellcond.train import progress as progress_module
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.progress import Decoding, Laps, Progress
from wellcond.train.stopping import OutOfTime


def row(block: str, value: float, status: str = "ok", name: str = "log_kappa") -> dict[str, object]:
    return {"block": block, "site": "+sa", "name": name, "value": value, "status": status}


def test_the_worst_block_is_the_one_with_the_largest_kappa(make_config: Callable[..., Config]) -> None:
    progress = Progress(make_config(), 10, show=False)
    progress.measured([row("blocks.0", 3.0), row("blocks.1", 12.04, "ceiling"), row("blocks.2", 99.0, name="rank")])
    assert progress.worst == "blocks.1 +sa, log κ ≥ 12.0"
    progress.measured([row("blocks.0", float("nan"), "non_finite"), row("blocks.2", 4.0)])
    assert progress.worst == "blocks.2 +sa, log κ 4.0"
    progress.measured([row("blocks.0", float("nan"), "non_finite")])  # nothing better is known
    assert progress.worst == "blocks.2 +sa, log κ 4.0"
    read = {**row("blocks.0", 15.9, "ceiling"), "site": "in"}
    progress.measured([read, row("blocks.1", 2.0)])
    assert progress.worst == "blocks.1 +sa, log κ 2.0"
    progress.measured([read])
    assert progress.worst == "blocks.0 in, log κ ≥ 15.9"


def test_lines_without_a_terminal(make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(make_config(), 10, show=True)
    with progress.running(0):
        progress.measured([row("blocks.0", 3.0)])
        progress.step(1, samples=256)
        progress.logged(1.25)
        progress.evaluated({"top1": 0.5})
    told = capsys.readouterr().err
    assert "loss 1.25" in told
    assert "worst: blocks.0 +sa, log κ 3.0" in told
    assert "step 1  validation: top1 0.5" in told
    assert progress.rate > 0
    assert "step 1 of 10  loss" in told
    quiet = Progress(make_config(), 10, show=False)
    quiet.logged(1.0)
    quiet.evaluated({"top1": 0.5})
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("step", "left"), [(1000, "2:30:00"), (9999, "0:00:01"), (10000, "0:00:00")])
def test_a_line_says_how_far_it_is_and_how_long_it_takes(
    make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str], step: int, left: str
) -> None:
    """A log of SLURM's has nothing else to tell it from."""
    progress = Progress(make_config(batch_size=512), 10_000, show=True)
    with progress.running(step - 1):
        progress.step(step, samples=512)
        progress.rate = 512.0  # a step a second
        progress._tell(now=1e9)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "loss" in line]
    assert line.startswith(f"step {step:,} of 10,000  loss")
    assert line.endswith(f"{left} left")


def test_the_time_left_counts_what_lies_between_the_steps(
    make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A validation in the last ten steps is not in all that follow."""
    progress = Progress(make_config(batch_size=1), 100, show=True)
    with progress.running(0):
        for step, now in ((10, 1000.0), (20, 1010.0), (30, 1080.0)):  # ten steps take 10 seconds, and then 70
            monkeypatch.setattr("time.perf_counter", lambda now=now: now)
            progress.step(step, samples=10)
            progress.logged(1.0)
    assert capsys.readouterr().err.splitlines()[-1].endswith("0:04:40 left")  # 70 steps of 4 seconds


def test_a_run_that_goes_on_says_so(make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(make_config(), 4, show=True).running(4):
        pass
    assert capsys.readouterr().err == "all 4 steps are done already\n"
    with Progress(make_config(), 10, show=True).running(4):
        pass
    with Progress(make_config(), 10, show=False).running(5):
        pass
    assert capsys.readouterr().err == "going on from step 4 of 10\n"


def test_files_that_cannot_be_read_are_named_once(
    make_config: Callable[..., Config], capsys: pytest.CaptureFixture[str]
) -> None:
    progress = Progress(make_config(), 10, show=True)
    progress.left_out([])
    progress.left_out([("cat/[b]1.jpg", "truncated")])
    progress.left_out([("cat/[b]1.jpg", "truncated"), *((f"dog/{i}.jpg", "empty") for i in range(7))])
    first, second = capsys.readouterr().err.splitlines()
    assert first == "1 file cannot be read and is left out: cat/[b]1.jpg (truncated)"
    assert second.startswith("7 files cannot be read and are left out: dog/0.jpg (empty); dog/1.jpg")
    assert second.endswith("dog/4.jpg (empty); and 2 more")


def test_decoding_tells_how_far_it_is(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    Decoding(show=True)("decoding pets (train)", 512, 1000)  # done in less than ten seconds: no word
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(progress_module, "PLAIN_EVERY", -1.0)
    Decoding(show=True)("decoding pets (train)", 512, 1000)
    Decoding(show=False)("decoding pets (val)", 512, 1000)
    assert capsys.readouterr().err == "decoding pets (train): 512 of 1,000\n"
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a terminal
    bar = Decoding(show=True)
    for done in (500, 1000):
        bar("decoding pets (train)", done, 1000)
    told = capsys.readouterr().err
    assert "1000/1000" in told
    assert "decoding pets (train)" in told


def test_decoding_ends_at_the_time_limit():
    Decoding(show=False, limit="10d")("decoding pets (train)", 512, 1000)
    with pytest.raises(OutOfTime, match=r"decoding pets \(train\): 512 of 1,000 when the time was over"):
        Decoding(show=False, limit="0.01s")("decoding pets (train)", 512, 1000)


def test_laps_give_each_second_to_one_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def wait(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    laps = Laps()
    wait(1)
    laps.lap("data")
    with laps.timing("measuring"):
        wait(2)
    wait(4)
    with contextlib.suppress(KeyError), laps.timing("saving"):
        wait(8)
        raise KeyError
    laps.lap("first steps")
    with laps.timing("measuring"):
        wait(16)
    laps.lap("steps")
    assert laps.seconds == {"data": 1, "measuring": 18, "saving": 8, "first steps": 4, "steps": 0}


def test_a_training_says_where_its_time_went(
    make_config: Callable[..., Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(epochs=1, probe_every=2, probe_samples=4)
    began = time.perf_counter()
    outcome = train(config, tmp_path, device="cpu")
    took = time.perf_counter() - began
    phases = {"data", "building", "measuring", "first steps", "steps", "validation", "saving"}
    assert set(outcome.seconds) == phases
    assert sum(outcome.seconds.values()) <= took + 0.1  # no second is counted twice
    assert "time: data " in capsys.readouterr().err
    again = train(config, tmp_path, device="cpu")  # it is done: the time of this call, which takes no step
    assert set(again.seconds) == {"data", "building", "first steps", "validation", "measuring"}
