"""Launch a Triton kernel repeatedly with little work for the CPU.

    add = Launch(kernel, (blocks, heads), WIDTH=32, num_warps=4)      # for arguments of one kind
    add(x, y, n, scale)                                               # the first call compiles
    launch(kernel, grid, layout(x, y), (x, y, n, scale), WIDTH=32)    # the same, cached by a key

On every call, Triton works out from all arguments which compiled variant they need, which for two dozen of them takes
longer than a small kernel runs. The caller knows what the variant depends on, such as shapes, strides, dtypes and
alignments. The first launch goes through Triton, later ones go straight to the variant that it compiled; these also
accept addresses in place of tensors, whose addresses would each be checked with the driver.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from .plans import Kept

__all__ = ["Launch", "dense", "launch", "layout", "placed"]

Grid = tuple[int, ...] | Callable[[Any], tuple[int, ...]]

_kept: Kept["Launch"] = Kept(4096)


class Launch:
    """A kernel on a grid, with its constants. The caller must ensure that all calls need the same compiled variant.

    If the constant BLOCK is a tuple, the first value is used that fits into the GPU's shared memory; the grid may be a
    function of it.
    """

    __slots__ = ("_constants", "_grid", "_kernel", "_options", "_start")

    def __init__(self, kernel: Any, grid: Grid, *, num_warps: int = 4, num_stages: int = 2, **constants: Any):
        """`constants` come last in the kernel's signature, and must be given in its order."""
        self._kernel, self._grid, self._constants = kernel, grid, constants
        self._options = {"num_warps": num_warps, "num_stages": num_stages}
        self._start: Callable[..., None] | None = None

    def addresses(self, *tensors: Tensor) -> Sequence[Any]:
        """Return the tensors in the form that costs this launch the least work."""
        return tensors if self._start is None else [tensor.data_ptr() for tensor in tensors]

    def __call__(self, *args: Any) -> None:
        if self._start is not None:
            self._start(*args)
            return
        blocks = self._constants.get("BLOCK")
        alternatives = list(blocks) if isinstance(blocks, tuple) else [blocks]
        while True:
            block = alternatives.pop(0)
            constants = self._constants if block is None else {**self._constants, "BLOCK": block}
            grid = self._grid(block) if callable(self._grid) else self._grid
            try:
                compiled = self._kernel[grid](*args, **constants, **self._options)
            except OutOfResources:
                if not alternatives:
                    raise
                continue
            if compiled is not None:  # it is None in the interpreter
                self._start = _starter(compiled, grid, tuple(constants.values()))
            return


def _starter(compiled: Any, grid: tuple[int, ...], constants: tuple[Any, ...]) -> Callable[..., None]:
    """Return what `compiled[grid]` does, looking up only the stream on each call. Profiler hooks are not called."""
    x, y, z = (*grid, 1, 1)[:3]
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    device, stream_of = driver.active.get_current_device(), driver.active.get_current_stream

    def start(*args: Any) -> None:
        run(x, y, z, stream_of(device), function, metadata, None, None, None, *args, *constants)

    return start


def layout(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return everything that a kernel's variant can depend on, as a key."""
    return tuple(
        None if t is None else (t.shape, t.stride(), t.dtype, t.device.index, t.data_ptr() & 15) for t in tensors
    )


def placed(*tensors: Tensor | None) -> tuple[Any, ...]:
    """Return how tensors of known shapes lie in memory: autograd may restore saved ones otherwise, moved by hooks."""
    return tuple(None if t is None else (t.stride(), t.data_ptr() & 15) for t in tensors)


def dense(t: Tensor) -> Tensor:
    """Return a tensor aligned and without gaps, as our passes make it: autograd may restore a saved one otherwise."""
    if t.is_contiguous() and t.data_ptr() & 15 == 0:
        return t
    return t.clone(memory_format=torch.contiguous_format)


def launch(kernel: Any, grid: tuple[int, ...], key: Any, args: tuple[Any, ...], **settings: Any) -> None:
    """Call a `Launch`, made once per key, on the device of the first argument; settings as for `Launch`."""
    device = args[0].device.index
    if device is not None and device != torch.cuda.current_device():  # which is where Triton launches
        with torch.cuda.device(device):
            launch(kernel, grid, key, args, **settings)
        return
    key = (kernel, grid, key, *settings.values())
    kept = _kept.get(key)
    if kept is None:
        kept = _kept.add(key, Launch(kernel, grid, **settings))
    kept(*args)
