"""Check in Triton's interpreter that nothing is read or written outside the tensors that a kernel was given.

The interpreter follows any address: a kernel with a wrong one reads some other memory and often passes, where a GPU
stops with "an illegal memory access". Here every address is looked up among the launch's tensors first.
"""

import types
from typing import Any

import numpy as np

__all__ = ["OutsideError", "watch"]


class OutsideError(AssertionError):
    """A kernel touched memory that belongs to none of its tensors."""


def watch() -> None:
    """Check every kernel that is interpreted in this process from now on."""
    from triton.runtime import interpreter

    if getattr(interpreter._interpreter, "watched", False):
        return
    given: dict[str, np.ndarray] = {"starts": np.zeros(0, np.uint64), "ends": np.zeros(0, np.uint64)}
    arguments_of = interpreter.GridExecutor._init_args_hst

    def see(self: Any, *args: Any, **kwargs: Any) -> Any:
        found = arguments_of(self, *args, **kwargs)
        given["starts"], given["ends"] = _extents(found)
        return found

    def inside(addresses: np.ndarray, mask: np.ndarray, size: int, what: str) -> None:
        wanted = np.asarray(addresses)[np.asarray(mask, dtype=bool)].astype(np.uint64, copy=False)
        if wanted.size == 0:
            return
        at = np.searchsorted(given["starts"], wanted, side="right") - 1
        astray = (at < 0) | (wanted + np.uint64(size) > given["ends"][at])
        if astray.any():
            first = int(wanted[astray][0])
            past = first - int(given["ends"][at[astray][0]])
            raise OutsideError(f"{astray.sum()} addresses to {what} lie outside, the first {past} bytes past a tensor")

    real = interpreter._interpreter

    def load(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        inside(pointers, mask, np.dtype(dtype).itemsize, "load")
        return real.load(pointers, mask, other, dtype)

    def store(pointers: Any, value: Any, mask: Any) -> Any:
        inside(pointers, mask, np.asarray(value).dtype.itemsize, "store")
        return real.store(pointers, value, mask)

    def atomic_rmw(operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        inside(pointers, mask, np.asarray(value).dtype.itemsize, "change")
        return real.atomic_rmw(operation, pointers, value, mask, *rest)

    members = {name: getattr(real, name) for name in dir(real) if not name.startswith("__")}
    members.update(load=load, store=store, atomic_rmw=atomic_rmw, watched=True)
    interpreter._interpreter = types.SimpleNamespace(**members)
    interpreter.GridExecutor._init_args_hst = see


def _extents(arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return where the storages of all tensors among a launch's arguments start and end, sorted."""
    found: set[tuple[int, int]] = set()

    def look(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            for one in value:
                look(one)
        elif isinstance(value, dict):
            look(list(value.values()))
        elif hasattr(value, "untyped_storage"):
            storage = value.untyped_storage()
            found.add((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))

    look(arguments)
    ordered = sorted(found)
    return np.array([s for s, _ in ordered], np.uint64), np.array([e for _, e in ordered], np.uint64)
