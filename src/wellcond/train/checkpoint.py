"""Saved states, written under a temporary name and then renamed: whatever kills the process, a complete one remains.

    save(folder.checkpoints, state, keep=2)        # checkpoints/step-00001200/{model.safetensors, state.pt, …}
    state = latest(folder.checkpoints)             # the newest intact one, or None; damaged ones are skipped
    for state in whole_states(folder.checkpoints): # all intact ones, newest first
    export(path, "model.safetensors")              # the weights of any state, as timm and wellcond.load read them

`model.safetensors` is a plain timm state dict whose metadata record graying, removed skips and replaced attention.
`state.pt` holds everything else the training needs, and is read with `weights_only=True`. `SHA256SUMS` holds the
checksums of all files, verified when the state is read. A state has no random-number state: every step seeds its own
random numbers (loop.py). Equal states are identical files.

A sharded state has its tensors in `__RANK_0.distcp` files and `.metadata` instead (shards.py). The last state of a run
and its best one also have the weights in `model.safetensors`.
"""

import contextlib
import secrets
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from wellcond.models.weights import write_weights
from wellcond.records import fsync
from wellcond.train.shards import Shards, checksum, is_sharded, read_shards, shapes_of

__all__ = [
    "SavedState", "aside_name", "discard", "export", "final_state", "latest", "make_aside", "read", "save",
    "save_sharded", "saved_steps", "state_path", "whole_states",
]  # fmt: skip

PREFIX = "step-"
SUMS = "SHA256SUMS"  # in the format of sha256sum, which can check them


@dataclass(frozen=True, kw_only=True)
class SavedState:
    """The complete state of a training between two steps."""

    step: int
    """The number of steps done."""
    model: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    ema: Mapping[str, Tensor] | None = None
    scaler: Mapping[str, Any] | None = None
    counters: Mapping[str, Any] = field(default_factory=dict)
    """What else the loop keeps: the best metric, the last losses, the number of rollbacks."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The settings it was trained with, as far as they must not change within a run."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Metadata of the safetensors files."""
    shards: Path | None = None
    """The folder that `filled` is still to read the tensors from; those here are on the meta device. None once read."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """The weights to evaluate: averaged over the steps, if the training does that."""
        return dict(self.ema or self.model)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All tensors, under unique names: `model.NAME`, `ema.NAME`, `optimizer.INDEX.NAME`."""
        found = {f"model.{name}": tensor for name, tensor in self.model.items()}
        found |= {f"ema.{name}": tensor for name, tensor in (self.ema or {}).items()}
        for index, values in self.optimizer["state"].items():
            found |= {f"optimizer.{index}.{k}": value for k, value in values.items() if isinstance(value, Tensor)}
        return found

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "SavedState":
        """Return the same state with these tensors, named as in `tensors`."""
        kinds: dict[str, dict[str, Tensor]] = {"model": {}, "ema": {}, "optimizer": {}}
        for key, tensor in tensors.items():
            kind, _, name = key.partition(".")
            kinds[kind][name] = tensor
        values = {
            i: {k: v for k, v in kept.items() if not isinstance(v, Tensor)}
            for i, kept in self.optimizer["state"].items()
        }
        for key, tensor in kinds["optimizer"].items():
            index, _, name = key.partition(".")
            values.setdefault(int(index), {})[name] = tensor
        optimizer = {**self.optimizer, "state": dict(sorted(values.items()))}
        return replace(
            self, model=kinds["model"], ema=kinds["ema"] if self.ema is not None else None, optimizer=optimizer
        )

    def filled(self, make: Callable[[str, Tensor], Tensor] | None = None) -> "SavedState":
        """Return the state with its tensors read into those that `make` creates; by default whole ones on the CPU."""
        if self.shards is None:
            return self
        tensors = {
            key: torch.empty_like(like, device="cpu") if make is None else make(key, like)
            for key, like in self.tensors.items()
        }
        read_shards(self.shards, tensors)
        return replace(self.with_tensors(tensors), shards=None)


def save(
    folder: Path, state: SavedState, *, keep: int, keep_old: bool = False, sound: bool = True, best: int | None = None
) -> Path:
    """Write `state`, then remove all states but the newest `keep` and the one of step `best`.

    With `keep_old` one more is kept, from about the middle of the training so far, because the newest ones may all
    come from its last, bad part. A newer one replaces it only while the training is `sound`.

    Raises OSError, which names the path, and then leaves the existing states untouched.
    """
    aside = make_aside(folder, state.step, secrets.token_hex(4))
    with _all_or_nothing(folder, aside):
        _write_weights(aside, state)
        _write_rest(aside, state)
        final = _publish(aside, state.step, {})
    _clear(folder, state.step, keep=keep, keep_old=keep_old, sound=sound, best=best)
    return final


def save_sharded(
    folder: Path, aside: Path, state: SavedState, shards: Shards, *, weights: SavedState | None = None, keep: int,
    keep_old: bool = False, sound: bool = True, best: int | None = None,
) -> None:  # fmt: skip
    """As `save`, for a state of which each process holds a part: all processes call it, and the main one publishes.

    `weights` is a state with whole weights, which are written as well.
    """
    if not shards.here.is_main:
        shards.write(aside, state.tensors)
        return
    with _all_or_nothing(folder, aside):
        sums = shards.write(aside, state.tensors)
        if weights is not None:
            _write_weights(aside, weights)
        _write_rest(aside, state.with_tensors({}))
        _publish(aside, state.step, sums)
    _clear(folder, state.step, keep=keep, keep_old=keep_old, sound=sound, best=best)


def make_aside(folder: Path, step: int, token: str) -> Path:
    """Create the temporary folder for a state, and remove those that killed processes left behind."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(".*.tmp"):
        shutil.rmtree(left, ignore_errors=True)
    aside = folder / aside_name(step, token)
    aside.mkdir()
    return aside


def aside_name(step: int, token: str) -> str:
    """Return the name of the temporary folder that a state is written to before it gets its final name."""
    return f".{PREFIX}{step:08d}.{token}.tmp"


def export(path: Path | str, output: Path | str) -> None:
    """Write the weights of a saved state, sharded or not, to a safetensors file with timm's names.

    Averaged weights, if the state has them, go to `ema-OUTPUT` beside it.
    """
    state, output = read(Path(path)), Path(output)
    write_weights(output, _plain(state.model), state.metadata)
    if state.ema is not None:
        write_weights(output.with_name(f"ema-{output.name}"), _plain(state.ema), state.metadata)


def _write_weights(aside: Path, state: SavedState) -> None:
    write_weights(aside / "model.safetensors", _plain(state.model), state.metadata)
    if state.ema is not None:
        write_weights(aside / "ema.safetensors", _plain(state.ema), state.metadata)


def _write_rest(aside: Path, state: SavedState) -> None:
    rest = {
        "step": state.step,
        "averaged": state.ema is not None,
        "optimizer": state.optimizer,
        "scaler": state.scaler,
        "counters": state.counters,
        "config": state.config,
    }
    if is_sharded(aside):
        rest["metadata"] = dict(state.metadata)
    torch.save(_canonical(rest), aside / "state.pt")


def _publish(aside: Path, step: int, sums: Mapping[str, str]) -> Path:
    """Flush the files to disk (fsync), then rename their folder. `sums` holds checksums that are already known."""
    files = sorted(aside.iterdir())
    lines = [f"{sums.get(file.name) or checksum(file)}  {file.name}\n" for file in files]
    (aside / SUMS).write_text("".join(lines), encoding="utf-8")
    for file in aside.iterdir():
        fsync(file)
    fsync(aside)
    final = state_path(aside.parent, step)
    if final.exists():
        shutil.rmtree(final)
    aside.rename(final)
    fsync(aside.parent)
    return final


@contextlib.contextmanager
def _all_or_nothing(folder: Path, aside: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, SafetensorError | RuntimeError):  # what these writers raise on a full disk
            raise OSError(f"{folder}: {error}") from error
        if isinstance(error, OSError) and str(folder) not in str(error):
            raise OSError(f"{folder}: {error}") from error
        raise


def _clear(folder: Path, step: int, *, keep: int, keep_old: bool, sound: bool, best: int | None) -> None:
    """Remove the states that need not be kept beside that of `step`, which has been written."""
    # States later than this one are damaged, otherwise the run would have resumed from them.
    older = [other for other in saved_steps(folder) if other < step]
    kept = [*older, step][-keep:]
    if best is not None:
        kept.append(best)
        link_best(folder, best)
    spare = [other for other in older if other not in kept]
    if keep_old and spare:
        old, *left = spare
        for other in left if sound else ():
            old = other if other >= 2 * old else old
        kept.append(old)
    discard(folder, [other for other in saved_steps(folder) if other not in kept])


def link_best(folder: Path, step: int) -> None:
    """Link checkpoints/best to the state of this step, if there is one and the file system supports links."""
    if not state_path(folder, step).exists():
        return
    aside = folder / f".best.{secrets.token_hex(4)}.tmp"
    with contextlib.suppress(OSError):
        aside.symlink_to(state_path(folder, step).name, target_is_directory=True)
        aside.replace(folder / "best")


def state_path(folder: Path, step: int) -> Path:
    """Return the folder of the state of a step."""
    return folder / f"{PREFIX}{step:08d}"


def discard(folder: Path, steps: list[int]) -> None:
    """Delete the states of these steps, if they exist, and the link to the best one if it leads nowhere."""
    for step in steps:
        shutil.rmtree(state_path(folder, step), ignore_errors=True)
    link = folder / "best"
    if link.is_symlink() and not link.exists():
        link.unlink(missing_ok=True)


def latest(folder: Path) -> SavedState | None:
    """Return the newest state that can be read, or None. Warnings name newer ones that cannot."""
    return next((state.filled() for state in whole_states(folder)), None)


def final_state(folder: Path) -> SavedState:
    """Return the newest state of the run in `folder`. ValueError if there is none."""
    state = latest(folder / "checkpoints")
    if state is None:
        raise ValueError(f"{folder} holds no saved state to measure; train it first")
    return state


def whole_states(
    folder: Path, *, part: tuple[int, int] = (0, 1), any_of: Callable[[bool], bool] = bool
) -> Iterator[SavedState]:
    """Yield the states that can be read, newest first, reading each on demand. Warnings name the others.

    The tensors of sharded states stay in their files until the state is `filled`. With several processes, each checks
    its `part` of those files, and `any_of` says whether any of them found damage.
    """
    steps = saved_steps(folder)
    for step in reversed(steps):
        path, state, problem = state_path(folder, step), None, None
        try:
            state = read(path, part=part, fill=False)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if not any_of(problem is not None) and state is not None:
            yield state
            continue
        back = "to the state before" if step > steps[0] else "to the beginning, for there is no state before"
        why = problem or "another process says why"
        warnings.warn(f"{path} is not a whole saved state ({why}); going back {back}", stacklevel=2)


def saved_steps(folder: Path) -> list[int]:
    """Return the steps of the existing states, ascending."""
    names = [path.name.removeprefix(PREFIX) for path in folder.glob(f"{PREFIX}*") if path.is_dir()]
    return sorted(int(name) for name in names if name.isdecimal())


def read(path: Path, *, part: tuple[int, int] = (0, 1), fill: bool = True) -> SavedState:
    """Return the state in a folder, exactly as it was saved; damage raises an exception, of any type.

    With `fill=False` the tensors of a sharded state stay in its files. With `part=(i, n)`, for the i-th of n processes,
    only every n-th of those files is checked.
    """
    _check_sums(path, part)
    rest = torch.load(path / "state.pt", map_location="cpu", weights_only=True)
    if path.name.startswith(PREFIX) and path.name != state_path(path.parent, rest["step"]).name:
        raise ValueError(f"state.pt is of step {rest['step']}, of another state")
    state = SavedState(
        step=rest["step"],
        model={},
        optimizer=rest["optimizer"],
        ema={} if rest["averaged"] else None,
        scaler=rest["scaler"],
        counters=rest["counters"],
        config=rest.get("config", {}),
        metadata=rest.get("metadata", {}),
    )
    if is_sharded(path):
        state = replace(state.with_tensors(shapes_of(path)), shards=path)
        return state.filled() if fill else state
    model, metadata = _read_weights(path / "model.safetensors")
    ema = _read_weights(path / "ema.safetensors")[0] if rest["averaged"] else None
    return replace(state, model=model, ema=ema, metadata=metadata)


def _read_weights(file: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import safe_open

    with safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata() or {}  # noqa: SIM118 (no dict)


def _check_sums(path: Path, part: tuple[int, int]) -> None:
    if not (path / SUMS).exists():  # states of 0.1.0.dev0 had none
        return
    lines = (path / SUMS).read_text(encoding="utf-8").splitlines()
    index, number = part if is_sharded(path) else (0, 1)
    for line in lines[index::number]:
        saved, name = line.split("  ", 1)
        if checksum(path / name) != saved:
            raise ValueError(f"{name} is not what was saved: its checksum differs")


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU, contiguous and none sharing memory with another, which safetensors refuses."""
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in state.items()}


def _canonical(value: Any) -> Any:
    """Rebuild a value with sorted keys and interned strings, so that equal values give equal pickles.

    A pickle also records the order of keys and which equal strings are one object. Both differ between an
    uninterrupted run and a resumed one.
    """
    if isinstance(value, Mapping):
        pairs = sorted(value.items(), key=lambda pair: (type(pair[0]).__name__, pair[0]))
        return {_canonical(key): _canonical(item) for key, item in pairs}
    if isinstance(value, list | tuple):
        items = [_canonical(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return sys.intern(value) if type(value) is str else value
