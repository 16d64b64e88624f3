"""`wellcond train`: a recipe with its changes, an exit code, a message, and a page whatever way it ends."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from wellcond import cli
from wellcond.cli import training
from wellcond.cli.options import complete_settings
from wellcond.cli.training import configure, run
from wellcond.train.config import Config

SMALL = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_machine_that_trains_need_not_draw(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    assert run(small(probe_every=5, probe_samples=8), tmp_path, device="cpu") == 0
    told = " ".join(capsys.readouterr().err.split())
    assert f"no page: there is no Altair here; `wellcond report {tmp_path}` draws it where Altair is installed" in told
    assert "5 steps; loss" in told
    assert not (tmp_path / "report.html").exists()


def test_a_lost_training_ends_with_3_a_message_and_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small(lr=1e6, epochs=4, probe_every=1, probe_samples=8)
    assert run(config, tmp_path, device="cpu") == 3
    told = capsys.readouterr().err
    assert "diverged at step" in told
    assert "log κ" in told
    assert "report.html" in told
    assert (tmp_path / "report.html").exists()


def test_without_a_probe_there_is_a_page_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(small(), tmp_path / "good", device="cpu") == 0
    assert run(small(lr=1e6, epochs=4), tmp_path / "lost", device="cpu") == 3
    assert capsys.readouterr().err.count("report.html") == 2
    for name in ("good", "lost"):
        page = (tmp_path / name / "report.html").read_text(encoding="utf-8")
        assert "<h3>Training loss<" in page
        assert "--set probe_every=100" in page
        assert ("diverged: " in page) is (name == "lost")


def test_a_warning_of_ours_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(small(), tmp_path / "run", device="cpu") == 0
    shutil.rmtree(tmp_path / "run/checkpoints")
    capsys.readouterr()

    def again(**_: object) -> None:
        assert run(small(), tmp_path / "run", device="cpu") == 0
        raise SystemExit(0)

    monkeypatch.setattr(cli, "app", again)
    with warnings.catch_warnings():
        warnings.simplefilter("default")  # as outside of tests
        with pytest.raises(SystemExit):
            cli.main()
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("warning: ")
    assert first.endswith("starts again from step 0. What it had written is kept in metrics.before-1.jsonl")


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        (["--on-divergence=rollback"], "on_divergence", "rollback"),
        (["--tracker", "tensorboard"], "tracker", "tensorboard"),
        (["--model-kwargs", "img_size=8,patch_size=2"], "model_kwargs", {"img_size": 8, "patch_size": 2}),
        (
            ["--model-kwargs", "img_size=8", "--model-kwargs", "patch_size=2"],
            "model_kwargs",
            {"img_size": 8, "patch_size": 2},
        ),
        (["--pretrained"], "pretrained", True),
        ([], "pretrained", False),
        (["--tracker=wandb", "--set", "tracker="], "tracker", ""),
    ],
)
def test_options_are_spellings_of_settings(
    monkeypatch: pytest.MonkeyPatch, options: list[str], field: str, value: object
) -> None:
    given: list[Config] = []
    monkeypatch.setattr(training, "run", lambda config, output, *, device: given.append(config) or 0)
    done = CliRunner().invoke(cli.app, ["train", "digits", *options])
    assert done.exit_code == 0, done.output
    assert getattr(given[0], field) == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--on-divergence", "hope"], "on_divergence can be"),
        (["--checkpoint", "nowhere.pt"], "there is no checkpoint nowhere.pt; name the file of weights to start from"),
        (["--device", "gpu"], "none that torch knows"),
        (["--model-kwargs", "depth"], "model_kwargs must be key=value pairs"),
    ],
)
def test_wrong_usage_is_a_plain_sentence(tmp_path: Path, options: list[str], words: str) -> None:
    done = CliRunner().invoke(cli.app, ["train", "digits", "--output", str(tmp_path / "run"), *options])
    assert done.exit_code == 2
    assert words in done.output
    assert not (tmp_path / "run").exists()


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
def test_the_command_itself(tmp_path: Path, launcher: Any) -> None:
    """Once as a person starts it; the tests of wellcond.train start it from a fork, for speed."""
    sets = ["--set", "model_kwargs=" + ",".join(f"{k}={v}" for k, v in SMALL.items()), "--batch-size", "256"]
    command = [sys.executable, "-m", "wellcond", "train", "digits", "--output", "run", "--epochs", "1", *sets]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "1000"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "5 steps; loss" in done.stderr
    again = [str(tmp_path / "run") if word == "run" else word for word in command[3:]]
    other = launcher.start([*again, "--lr", "7"], log=tmp_path / "log.txt")
    assert other.wait() == [1]
    assert "another configuration (lr: 0.003 there, 7.0 now)" in other.output()
    assert "Traceback" not in other.output()


def test_the_settings_are_listed_by_group_without_a_recipe() -> None:
    done = CliRunner().invoke(cli.app, ["train", "--settings"])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    titles = [number for number, line in enumerate(lines) if number == 0 or not lines[number - 1]]
    assert [lines[number].strip() for number in titles if lines[number]][:3] == [
        "What is trained",
        "The model and its surgery",
        "Data",
    ]
    for field in dataclasses.fields(Config):
        (line,) = (line for line in lines if line.split()[:1] == [field.name])
        assert line.rstrip()[40:], field.name  # a word on each
    assert any(line.split()[:2] == ["lr", "0.001"] for line in lines)
    assert any("0.95" in line and "above 0 and at most 1" in line for line in lines)


@pytest.mark.parametrize(
    ("typed", "found"),
    [("deco", ["decoder_dim=", "decoder_depth=", "decoder_heads="]), ("gray=d", ["gray=dct"]), ("nothing=", [])],
)
def test_the_shell_completes_settings_and_their_words(typed: str, found: list[str]) -> None:
    assert complete_settings(typed) == found


@pytest.mark.parametrize(
    ("words", "incomplete", "found"),
    [
        (["gray", "="], "", ["", "svd", "dct"]),
        (["gray", "=", "d"], "d", ["dct"]),
        (["lr", "=", "1", "gray", "=", "s"], "s", ["svd"]),
        (["gray", "=", "dct", "epsil"], "epsil", ["epsilon="]),
        (["cifar10", ":", "da"], "da", []),
    ],
)
def test_bash_breaks_settings_into_words(
    monkeypatch: pytest.MonkeyPatch, words: list[str], incomplete: str, found: list[str]
) -> None:
    typed = ["wellcond", "train", "digits", "--set", *words]
    monkeypatch.setenv("COMP_WORDS", "\n".join(typed))
    monkeypatch.setenv("COMP_CWORD", str(len(typed) - 1))
    assert complete_settings(incomplete) == found


def test_what_was_given_on_the_command_line_is_known() -> None:
    config = configure("mae_base", scale="smoke", options={"lr": 1e-3, "epochs": None}, settings=["batch-size=64"])
    assert config.given == {"lr", "batch_size"}
    assert (config.compile, config.amp_dtype) == (False, "float32")


def test_a_place_that_cannot_be_written_is_wrong_usage(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file" / "run", Path("/proc/run")):
        told = CliRunner().invoke(cli.app, ["train", "digits", "--output", str(output)])
        assert told.exit_code == 2
        assert "nothing can be written to" in told.output
