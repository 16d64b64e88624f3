"""How a training computes: precision, determinism, the random numbers of a step, and a compiler that can be trusted.

with deterministic(config), float32_precision(config), autocast(config, device):
    seed_by(device, config.seed, step, rank)        # dropout, masks and landmarks depend on these numbers alone
mend_read_back()            # before a model is compiled; does nothing where torch needs no mending
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
    "seed_by",
    "waiting",
    "waits_to_read_back",
]


def autocast(config: Config, device: torch.device) -> Any:
    if config.amp_dtype in ("float32", "tf32"):
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, config.amp_dtype))


def float32_precision(config: Config) -> Any:
    """Where the configuration says float32, TF32 is off, for convolutions too, which torch rounds by default."""
    usual = contextlib.nullcontext
    return {"float32": no_tf32, "tf32": tf32}.get(config.amp_dtype, usual)()


def seed_by(device: torch.device, *numbers: int) -> None:
    """As torch.manual_seed with a number made of these, which would seed every device there could be, at every step."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    seed = int.from_bytes(digest, "little") >> 1
    if device.type not in ("cpu", "cuda"):
        torch.manual_seed(seed)
        return
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.init()  # there are no generators before
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.default_generators[index].manual_seed(seed)


@contextlib.contextmanager
def deterministic(config: Config) -> Iterator[None]:
    """The same bits from run to run, where the configuration asks for it."""
    before = torch.are_deterministic_algorithms_enabled()
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA's matrix products start
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


# ---- torch's compiler, mended where it is known to compute something else on a GPU
#
# In a reduction that goes over a row twice, as of a LayerNorm with what was added before it, inductor stores the sum in
# the first loop and reads it back in the second. Where the two loops spread the row over threads differently, a thread
# reads what another one writes, and up to torch 2.13 nothing makes it wait: with torch 2.11 on an H200 a compiled ViT
# had wrong logits for single images, at random. Later versions wait (pytorch/pytorch#190519), and here older ones do.

TAG = "reads-back-after-a-barrier"


def mend_read_back() -> bool:
    """Whether compiled kernels wait before they read back what they stored, from now on."""
    kernel = _kernel()
    if kernel is None:
        return False
    try:
        waits = waits_to_read_back(kernel)
    except OSError:  # a torch without its source is not looked into, and not changed
        return False
    if not waits:
        kernel.load = waiting(kernel.load)
        # What was compiled before, by this process or another, lies in caches on disk.
        config: Any = torch.compiler.config
        config.cache_key_tag = f"{config.cache_key_tag}{TAG}"
        torch.compiler.reset()
    return True


def waits_to_read_back(kernel: Any) -> bool:
    """Whether torch, or this module, has seen to it."""
    return hasattr(kernel.load, TAG) or "invalidated_stores" in inspect.getsource(kernel.load)


def waiting(load: Callable[..., Any]) -> Callable[..., Any]:
    """`load` of inductor's kernels, which writes a line of code, with a barrier on the line before where it reads what
    the kernel has stored."""
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

        kernel.get_load_buffer = place  # the class's own is back when this line has been written
        try:
            return load(kernel, name, *args, **kwargs)
        finally:
            del kernel.get_load_buffer

    setattr(with_barrier, TAG, True)
    return with_barrier


def _kernel() -> Any:
    """Inductor's class of Triton kernels, if this torch has it as we know it."""
    try:
        from torch._inductor.codegen.triton import TritonKernel
    except ImportError:
        return None
    return TritonKernel if hasattr(TritonKernel, "get_load_buffer") and hasattr(TritonKernel, "load") else None
