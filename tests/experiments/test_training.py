"""`wellcond train`: a recipe with its changes, an exit code, a message, and a page whatever way it ends."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wellcond.experiments.training import configure, run
from wellcond.train.config import Config

SMALL = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    del one_thread
    monkeypatch.setenv("COLUMNS", "1000")


def small(**changes: object) -> Config:
    options = {"epochs": 1, "batch_size": 256}
    settings = ["model_kwargs=" + ",".join(f"{k}={v}" for k, v in SMALL.items()), "log_every=1", "warmup_epochs=0"]
    return configure("digits", scale="lab", options=options, settings=settings).changed(changes)


def test_settings_come_after_options_and_those_after_the_recipe() -> None:
    config = configure("digits", scale="lab", options={"lr": 1.0, "epochs": 3, "model": None}, settings=["lr=2"])
    assert (config.recipe, config.lr, config.epochs, config.image_size) == ("digits", 2.0, 3, 8)
    with pytest.raises(ValueError, match="did you mean digits"):
        configure("digit", scale="lab", options={}, settings=[])


def test_a_training_ends_with_0_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small(probe_every=2, probe_samples=8), tmp_path, device="cpu") == 0
    told = capsys.readouterr().err
    assert "5 steps; loss" in told
    assert "top1" in told
    assert "report.html" in told
    assert "blocks.0" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert run(small(probe_every=2, probe_samples=8), tmp_path, device="cpu") == 0  # nothing is left to do
    assert "5 steps; loss" in capsys.readouterr().err


def test_a_lost_training_ends_with_3_a_message_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(lr=1e6, epochs=4, probe_every=1, probe_samples=8)
    assert run(config, tmp_path, device="cpu") == 3
    told = capsys.readouterr().err
    assert "diverged at step" in told
    assert "log κ" in told
    assert "report.html" in told
    assert (tmp_path / "report.html").exists()


def test_a_stopped_training_ends_with_130(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import threading

    stop = threading.Event()

    def signal_soon() -> None:
        while not stop.wait(0.002):
            if (tmp_path / "metrics.jsonl").exists():
                os.kill(os.getpid(), signal.SIGTERM)
                return

    waiting = threading.Thread(target=signal_soon)
    waiting.start()
    try:
        assert run(small(epochs=500), tmp_path, device="cpu") == 130
    finally:
        stop.set()
        waiting.join()
    assert "of 2500; the same command goes on" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_itself(tmp_path: Path) -> None:
    """Once as a person starts it; the tests of wellcond.train start it from a fork, for speed."""
    sets = ["--set", "model_kwargs=" + ",".join(f"{k}={v}" for k, v in SMALL.items()), "--batch-size", "256"]
    command = [sys.executable, "-m", "wellcond", "train", "digits", "--output", "run", "--epochs", "1", *sets]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "5 steps; loss" in done.stderr
    other = subprocess.run(
        [*command, "--lr", "7"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert other.returncode == 1
    assert "another configuration (lr: 0.003 there, 7.0 now)" in other.stderr
    assert "Traceback" not in other.stderr
