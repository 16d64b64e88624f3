"""Saved states: written aside and renamed, so that whatever kills the process, a whole one is left.

    save(folder.checkpoints, state, keep=2)        # checkpoints/step-00001200/{model.safetensors, state.pt, …}
    state = latest(folder.checkpoints)             # the newest whole one, or None; broken ones are passed over

`model.safetensors` is a plain timm state dict whose metadata remember graying, removed skips and replaced attention.
`state.pt` holds what else the training needs, read with `weights_only=True`. Nothing is random in a state: every step
seeds its own random numbers (loop.py).
"""

import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["SavedState", "latest", "save", "saved_steps"]

PREFIX = "step-"


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
    """What the loop keeps besides: best accuracy, the first losses, how often it was rolled back."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """For the safetensors files."""


def save(folder: Path, state: SavedState, *, keep: int) -> Path:
    """Write `state` and remove all but the newest `keep`. OSError leaves what there was."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.tmp"):  # of a process that was killed while writing
        shutil.rmtree(left, ignore_errors=True)
    older = [step for step in saved_steps(folder) if step < state.step]
    final = folder / f"{PREFIX}{state.step:08d}"
    aside = folder / f".{final.name}.{secrets.token_hex(4)}.tmp"
    aside.mkdir()
    try:
        save_file(_plain(state.model), aside / "model.safetensors", metadata=dict(state.metadata))
        if state.ema is not None:
            save_file(_plain(state.ema), aside / "ema.safetensors", metadata=dict(state.metadata))
        rest = {
            "step": state.step,
            "averaged": state.ema is not None,
            "optimizer": dict(state.optimizer),
            "scaler": None if state.scaler is None else dict(state.scaler),
            "counters": dict(state.counters),
        }
        torch.save(rest, aside / "state.pt")
        for file in aside.iterdir():
            _to_disk(file)
        _to_disk(aside)
        if final.exists():
            shutil.rmtree(final)
        aside.rename(final)
        _to_disk(folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, SafetensorError | RuntimeError):  # what these writers make of a full disk
            raise OSError(f"{folder}: {error}") from error
        raise
    # Later states than this one were broken, else the run would have gone on from them.
    kept = [*older, state.step][-keep:]
    for step in saved_steps(folder):
        if step not in kept:
            shutil.rmtree(folder / f"{PREFIX}{step:08d}", ignore_errors=True)
    return final


def latest(folder: Path) -> SavedState | None:
    """The newest state that can be read; those that cannot are named in a warning."""
    steps = saved_steps(folder)
    for step in reversed(steps):
        path = folder / f"{PREFIX}{step:08d}"
        try:
            return _read(path)
        except Exception as error:
            back = "to the state before" if step > steps[0] else "to the beginning, for there is no state before"
            warnings.warn(
                f"{path} is not a whole saved state ({type(error).__name__}: {error}); going back {back}", stacklevel=2
            )
    return None


def saved_steps(folder: Path) -> list[int]:
    """The steps of the states there are, ascending."""
    names = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def _read(path: Path) -> SavedState:
    from safetensors import safe_open

    with safe_open(path / "model.safetensors", "pt") as file:
        model = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
        metadata = file.metadata() or {}
    rest = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
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
        metadata=metadata,
    )


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, contiguous, and no two names for one memory, which safetensors refuses."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def _to_disk(path: Path) -> None:
    """Past the operating system's own memory: a machine that loses power has it, too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
