"""How a training computes: precision, determinism, threads, random numbers, and a fix for torch's compiler.

with deterministic(config), float32_precision(config), autocast(config, device):
    seed_by(device, config.seed, step, rank)        # dropout, masks and landmarks depend only on these numbers
mend_read_back()            # before compiling a model; does nothing if torch needs no fix
"""

import contextlib
import functools
import hashlib
import inspect
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch

from wellcond.numerics.autocast import no_tf32, tf32
from wellcond.train.config import Config

__all__ = [
    "autocast",
    "deterministic",
    "float32_precision",
    "mend_read_back",
    "one_thread",
    "seed_by",
    "waiting",
    "waits_to_read_back",
]


def autocast(config: Config, device: torch.device) -> Any:
    if config.amp_dtype in ("float32", "tf32"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.amp_dtype))


def float32_precision(config: Config) -> Any:
    """Return a context with TF32 on for tf32 and off for float32, also in convolutions, where it is torch's default."""
    usual = contextlib.nullcontext
    return {"float32": no_tf32, "tf32": tf32}.get(config.amp_dtype, usual)()


def seed_by(device: torch.device, *numbers: int) -> None:
    """Seed only the CPU and `device`, from these numbers; torch.manual_seed would seed every device, at every step."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.init()  # the generators do not exist before
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use a single thread inside the context: the rounding of sums depends on their number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextlib.contextmanager
def deterministic(config: Config) -> Iterator[None]:
    """Compute the same bits from run to run, if the configuration asks for it."""
    before = torch.are_deterministic_algorithms_enabled()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is initialised
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# ---- a fix for torch's compiler, which can compute wrong results on a GPU
#
# In a reduction that loops over a row twice, such as a LayerNorm fused with the addition before it, inductor stores the
# sum in the first loop and reads it back in the second. If the two loops distribute the row over threads differently, a
# thread reads what another one writes, and up to torch 2.13 it does not wait for that: with torch 2.11 on an H200 a
# compiled ViT gave wrong logits for single images, at random. Later versions insert a barrier
# (pytorch/pytorch#190519); the code below adds it to older ones.

TAG = "reads-back-after-a-barrier"


def mend_read_back() -> bool:
    """Make compiled kernels wait before they read back what they stored; return whether they now do."""
    kernel = _kernel()
    if kernel is None:
        return False
    try:
        waits = waits_to_read_back(kernel)
    except OSError:  # torch without its source cannot be inspected, and is left unchanged
        return False
    if not waits:
        kernel.load = waiting(kernel.load)
        # Code compiled earlier, by this or another process, is cached on disk: with a new tag it is not reused.
        config: Any = torch.compiler.config
        config.cache_key_tag = f"{config.cache_key_tag}{TAG}"
        torch.compiler.reset()
    return True


def waits_to_read_back(kernel: Any) -> bool:
    """Whether the kernels already wait, because torch or this module makes them."""
    return hasattr(kernel.load, TAG) or "invalidated_stores" in inspect.getsource(kernel.load)


def waiting(load: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `load` of inductor's kernels, which emits a line of code: if that line reads what the kernel has stored,
    a barrier is emitted on the line before."""
    from torch._inductor.codegen.common import DeferredLine

    @functools.wraps(load)
    def with_barrier(kernel: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in kernel.cse.invalidated_stores:
            return load(kernel, name, *args, **kwargs)
        place_of = kernel.get_load_buffer

        def place(indexing: Any) -> Any:
            buffer = place_of(indexing)
            buffer.writeline(DeferredLine(name, "tl.debug_barrier()"))
            return buffer

        kernel.get_load_buffer = place  # shadows the class's method while this line is emitted
        try:
            return load(kernel, name, *args, **kwargs)
        finally:
            del kernel.get_load_buffer

    setattr(with_barrier, TAG, True)
    return with_barrier


def _kernel() -> Any:
    """Return inductor's class of Triton kernels, or None if this torch does not have it in the form we know."""
    try:
        from torch._inductor.codegen.triton import TritonKernel
    except ImportError:
        return None
    return TritonKernel if hasattr(TritonKernel, "get_load_buffer") and hasattr(TritonKernel, "load") else None
