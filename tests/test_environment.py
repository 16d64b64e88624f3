"""What a record says of where it was made: true, and without a folder or a person of the machine."""

import subprocess
import sys
from pathlib import Path

import pytest

from wellcond import environment as module
from wellcond.environment import environment


def test_environment_works_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert environment()["device"] == "cpu"


def test_environment_works_without_git(monkeypatch):
    monkeypatch.delenv("WELLCOND_COMMIT", raising=False)
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"] is None


def test_commit_and_changes_come_from_the_checkout_that_tracks_the_file(tmp_path, monkeypatch):
    monkeypatch.delenv("WELLCOND_COMMIT", raising=False)

    def git(*arguments):
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    package = tmp_path / "src"
    package.mkdir()
    here = package / "environment.py"
    here.write_text("")
    monkeypatch.setattr(module, "__file__", str(here))
    git("init", "-q")
    assert module._commit() == {"commit": None, "dirty": None}  # someone else's checkout: it does not track us
    git("add", ".")
    git("commit", "-q", "-m", "m")
    assert module._commit() == {"commit": git("rev-parse", "HEAD"), "dirty": False}
    (tmp_path / "result.json").write_text("{}")  # what a benchmark writes is no change of the code
    assert module._commit()["dirty"] is False
    (package / "new.py").write_text("")
    assert module._commit()["dirty"] is True


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["/somewhere/bin/wellcond", "bench", "kappa"], "wellcond bench kappa"),
        (["/somewhere/wellcond/__main__.py", "info"], "python -m wellcond info"),
        (["wellcond", "--output", "/elsewhere/a b.json"], "wellcond --output 'a b.json'"),
        (["wellcond", "--output={here}/x/y.json", "--set", "lr=0.1"], "wellcond --output=x/y.json --set lr=0.1"),
        ([], ""),
    ],
)
def test_command_holds_no_absolute_path(argv, command):
    argv = [argument.format(here=Path.cwd()) for argument in argv]
    assert module._command(argv).strip("'") == command.strip("'")


def test_a_module_that_is_run_is_named(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tool.py").write_text(
        "import sys; from wellcond.environment import _command; print(_command(sys.argv))"
    )
    run = [sys.executable, "-m", "mine.tool", "--seed", "1"]
    said = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert said.strip() == "python -m mine.tool --seed 1"


@pytest.mark.parametrize(
    ("argument", "kept"),
    [
        ("cifar10=wds:/home/someone/data", "cifar10=wds:data"),
        ("folder:/home/someone/data", "folder:data"),
        ("--output=/home/someone/runs/a", "--output=a"),
        ("hf:cifar10", "hf:cifar10"),
        ("https://example.org/a/b", "https://example.org/a/b"),
    ],
)
def test_no_absolute_path_is_recorded_behind_whatever_prefix(argument, kept):
    assert module._command(["wellcond", argument]) == f"wellcond {kept}"
