"""Saved states: written aside and renamed, so that whatever kills the process, a whole one is left.

    save(folder.checkpoints, state, keep=2)        # checkpoints/step-00001200/{model.safetensors, state.pt, …}
    state = latest(folder.checkpoints)             # the newest whole one, or None; broken ones are passed over
    for state in whole_states(folder.checkpoints): # all of them, the newest first

`model.safetensors` is a plain timm state dict whose metadata remember graying, removed skips and replaced attention.
`state.pt` holds what else the training needs, read with `weights_only=True`. `SHA256SUMS` are the checksums of both,
looked at when the state is read. Nothing is random in a state: every step seeds its own random numbers (loop.py), and
equal states are equal files.
"""

import contextlib
import hashlib
import secrets
import shutil
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellcond.models.weights import write_weights
from wellcond.records import fsync

__all__ = ["SavedState", "discard", "latest", "read", "save", "saved_steps", "state_path", "whole_states"]

PREFIX = "step-"
SUMS = "SHA256SUMS"  # as sha256sum writes and checks them


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """All of a training between two steps, on the CPU."""

    step: int
    """Steps done."""
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    ema: Mapping[str, Tensor] | None = None
    scaler: Mapping[str, Any] | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    """What the loop keeps besides: best accuracy, the last losses, how often it was rolled back."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings it was trained with, those that may not change in a run."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """For the safetensors files."""


def save(
    folder: Path, state: SavedState, *, keep: int, keep_old: bool = False, sound: bool = True, best: int | None = None
) -> Path:
    """Write `state` and remove all but the newest `keep`, and the one of step `best`.

    OSError names the path and leaves what there was.

    With `keep_old` one more is kept, from about the middle of the training so far: the newest ones may all be of its
    last, bad part. It gives way to a newer one only while the training is `sound`.
    """
    from safetensors import SafetensorError

    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.tmp"):  # of a process that was killed while writing
        shutil.rmtree(left, ignore_errors=True)
    older = [step for step in saved_steps(folder) if step < state.step]
    final = state_path(folder, state.step)
    aside = folder / f".{final.name}.{secrets.token_hex(4)}.tmp"
    aside.mkdir()
    try:
        write_weights(aside / "model.safetensors", _plain(state.model), state.metadata)
        if state.ema is not None:
            write_weights(aside / "ema.safetensors", _plain(state.ema), state.metadata)
        rest = {
            "step": state.step,
            "averaged": state.ema is not None,
            "optimizer": state.optimizer,
            "scaler": state.scaler,
            "counters": state.counters,
            "config": state.config,
        }
        torch.save(_canonical(rest), aside / "state.pt")
        sums = "".join(f"{_checksum(file)}  {file.name}\n" for file in sorted(aside.iterdir()))
        (aside / SUMS).write_text(sums, encoding="utf-8")
        for file in aside.iterdir():
            fsync(file)
        fsync(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        fsync(folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, SafetensorError | RuntimeError):  # what these writers make of a full disk
            raise OSError(f"{folder}: {error}") from error
        if isinstance(error, OSError) and str(folder) not in str(error):
            raise OSError(f"{folder}: {error}") from error
        raise
    # Later states than this one were broken, else the run would have gone on from them.
    kept = [*older, state.step][-keep:]
    if best is not None:
        kept.append(best)
        link_best(folder, best)
    spare = [step for step in older if step not in kept]
    if keep_old and spare:
        old, *left = spare
        for step in left if sound else ():
            old = step if step >= 2 * old else old
        kept.append(old)
    discard(folder, [step for step in saved_steps(folder) if step not in kept])
    return final


def link_best(folder: Path, step: int) -> None:
    """Let checkpoints/best lead to the state of this step; a file system without links goes without it."""
    aside = folder / f".best.{secrets.token_hex(4)}.tmp"
    with contextlib.suppress(OSError):
        aside.symlink_to(state_path(folder, step).name, target_is_directory=True)
        aside.replace(folder / "best")


def state_path(folder: Path, step: int) -> Path:
    return folder / f"{PREFIX}{step:08d}"


def discard(folder: Path, steps: list[int]) -> None:
    for step in steps:
        shutil.rmtree(state_path(folder, step), ignore_errors=True)


def latest(folder: Path) -> SavedState | None:
    """The newest state that can be read; those that cannot are named in a warning."""
    return next(whole_states(folder), None)


def whole_states(folder: Path) -> Iterator[SavedState]:
    """Those that can be read, the newest first, each read when it is asked for; the others are named in warnings."""
    steps = saved_steps(folder)
    for step in reversed(steps):
        path = state_path(folder, step)
        try:
            state = read(path)
        except Exception as error:
            back = "to the state before" if step > steps[0] else "to the beginning, for there is no state before"
            warnings.warn(
                f"{path} is not a whole saved state ({type(error).__name__}: {error}); going back {back}", stacklevel=2
            )
        else:
            yield state


def saved_steps(folder: Path) -> list[int]:
    """The steps of the states there are, ascending."""
    names = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def read(path: Path) -> SavedState:
    """The state in a folder, whole and as it was saved; else an error of whatever kind."""
    from safetensors import safe_open

    if (path / SUMS).exists():  # states of 0.1.0.dev0 had none
        for line in (path / SUMS).read_text(encoding="utf-8").splitlines():
            checksum, name = line.split("  ", 1)
            if _checksum(path / name) != checksum:
                raise ValueError(f"{name} is not what was saved: its checksum differs")
    with safe_open(path / "model.safetensors", "pt") as file:
        model = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        metadata = file.metadata() or {}
    rest = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    if path.name.startswith(PREFIX) and path.name != state_path(path.parent, rest["step"]).name:
        raise ValueError(f"state.pt is of step {rest['step']}, of another state")
    ema = None
    if rest["averaged"]:
        with safe_open(path / "ema.safetensors", "pt") as file:
            ema = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return SavedState(
        step=rest["step"],
        model=model,
        optimizer=rest["optimizer"],
        ema=ema,
        scaler=rest["scaler"],
        counters=rest["counters"],
        config=rest.get("config", {}),
        metadata=metadata,
    )


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two names for one memory, which safetensors refuses."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def _canonical(value: Any) -> Any:
    """The same, built anew and sorted: a pickle also tells in which order, and which equal words are one object.

    Both differ between a run and one that went on from a state.
    """
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: (type(pair[0]).__name__, pair[0]))
        return {_canonical(key): _canonical(item) for key, item in pairs}
    if isinstance(value, list | tuple):
        items = [_canonical(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return sys.intern(value) if type(value) is str else value


def _checksum(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
