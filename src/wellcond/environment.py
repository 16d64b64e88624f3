"""The environment in which a number was measured: command, versions, machine and commit.

    environment()      # {"command": …, "versions": {…}, "cpu": …, "device": …, "commit": …, "date": …}

Absolute paths are shortened, so that it names no folder of the machine and no person. torch is optional. If the source
tree is a copy without its history, set WELLCOND_COMMIT to its commit.
"""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["environment", "own_version"]

PACKAGES = ("wellcond", "torch", "timm", "torchvision", "triton", "numpy", "transformers")


def environment() -> dict[str, Any]:
    """Return command, versions, platform, CPU, device, commit and date: what is needed to repeat the measurement."""
    return {
        "command": _command(sys.argv),
        "versions": _versions(),
        "platform": " ".join(filter(None, [platform.system(), platform.machine(), *platform.libc_ver()])),
        "cpu": {"name": _cpu_name(), "cores": os.cpu_count()},
        **_accelerator(),
        **_commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _command(argv: list[str]) -> str:
    """Return one line for a shell. Absolute paths, useless elsewhere, are shortened: they may name a person."""
    program, *arguments = argv or [""]
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)  # of what `python -m` runs, if anything
    module = spec.name if spec is not None and spec.origin == program else ""
    module = "wellcond" if program.endswith("__main__.py") else module
    name = f"python -m {module}" if module else shlex.quote(Path(program).name)
    return " ".join([name, *(shlex.quote(_shorten(argument)) for argument in arguments)])


def _shorten(argument: str) -> str:
    option, value = _split_path(argument)
    path = Path(value)
    if not path.is_absolute():
        return argument
    here = Path.cwd()
    return option + (str(path.relative_to(here)) if path.is_relative_to(here) else path.name)


def _split_path(argument: str) -> tuple[str, str]:
    """Split an argument before its absolute path: --data=/a, cifar10=wds:/a or folder:/a."""
    for start, letter in enumerate(argument):
        if letter == "/" and (start == 0 or argument[start - 1] in "=:") and argument[start : start + 2] != "//":
            return argument[:start], argument[start:]
    option, equals, value = argument.rpartition("=")  # absolute paths on other systems need not start with a slash
    return option + equals, value


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def own_version() -> str:
    """Return wellcond's version, or "(not installed)" if it runs from its source tree and was never installed."""
    return _versions().get("wellcond", "(not installed)")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), "") or platform.processor() or platform.machine()


def _accelerator() -> dict[str, Any]:
    """Return the devices that torch sees, with its thread count and CUDA version; without torch, only the CPU."""
    try:
        import torch
    except ImportError:
        return {"device": "cpu", "devices": []}
    names = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    )
    if not names and torch.backends.mps.is_available():
        names = ["Apple MPS"]
    return {
        "device": names[0] if names else "cpu",
        "devices": names,
        "cuda": torch.version.cuda,
        "threads": torch.get_num_threads(),
    }


def _commit() -> dict[str, Any]:
    """Return the commit of this source tree, and whether the package's files differ from it (None if unknown)."""
    given = os.environ.get("WELLCOND_COMMIT", "").strip()
    if given:
        return {"commit": given, "dirty": None}
    here = Path(__file__).resolve()
    # An installed copy may lie inside another project's checkout: only a tree that tracks this very file is ours.
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return {"commit": None, "dirty": None}
    changes = _git(here.parent, "status", "--porcelain", "--", ".")
    return {"commit": _git(here.parent, "rev-parse", "HEAD"), "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
