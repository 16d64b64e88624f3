"""Which fast paths this machine has, which are taken and why; the switch that turns the fused kernels off; and what all
of them ask of tensors and gradients.

for path in fast_paths():
    print(path.name, path.taken, path.why)

with plain_twins():          # or set WELLCOND_TRITON=0
    gray_tokens(x, "dct")    # plain torch operations only
"""

import contextlib
import functools
import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._device import DeviceContext

__all__ = [
    "FUSED_SIDE",
    "FastPath",
    "addressable",
    "batch_of_gradients",
    "exporting",
    "fast_double",
    "fast_paths",
    "followed",
    "fused_kernels",
    "gradient_wanted",
    "large_programs",
    "may_look",
    "other_derivatives",
    "overheard",
    "packed",
    "plain_twins",
    "refuse_batch",
    "tokens_like",
    "transformed",
]

FUSED_SIDE = 256  # largest shorter side of a matrix that the fused kernels hold on chip
LARGE_PROGRAM = 227 * 2**10  # bytes of shared memory that 128 landmarks need
MOST_PROGRAMS = 65_535  # limit of a grid's second and third dimensions, where kernels put batch · heads

_forced_plain = False


@dataclass(frozen=True, kw_only=True)
class FastPath:
    """One fast path: whether this machine has it, whether it will be taken, and the reason in a sentence."""

    name: str
    available: bool
    taken: bool
    why: str


@contextlib.contextmanager
def plain_twins() -> Iterator[None]:
    """Use plain torch operations in place of every fused kernel while this context is active."""
    global _forced_plain
    before, _forced_plain = _forced_plain, True
    try:
        yield
    finally:
        _forced_plain = before


@torch.compiler.assume_constant_result
def fused_kernels(device: torch.device) -> bool:
    """Whether the Triton kernels run for tensors on `device`. A compiled function keeps the answer it was given."""
    return (
        not _forced_plain and _available(device.type, device.index or 0)[0] and os.environ.get("WELLCOND_TRITON") != "0"
    )


@torch.compiler.assume_constant_result
def exporting() -> bool:
    """Whether `torch.export` is running. In torch 2.11 `torch.compiler.is_exporting()` is always true when compiled."""
    return torch.compiler.is_exporting()


@torch.compiler.assume_constant_result
def large_programs(device: torch.device) -> bool:
    """Whether a program can have the shared memory that 128 landmarks need: on data-centre GPUs from the H100 on."""
    return _shared_memory(device.index or 0) >= LARGE_PROGRAM


def addressable(*tokens: Tensor) -> bool:
    """Whether kernels that take (…, n, p) can handle these: row numbers and offsets must fit 32 bits, and the number of
    matrices must fit a grid."""
    for t in tokens:
        shape, stride = t.shape, t.stride(-2)  # each read once: this runs on every call
        width = shape[-1]
        if shape[-2] * (stride if stride > width else width) >= 2**31:
            return False
    return tokens[0].shape[:-2].numel() <= MOST_PROGRAMS


def packed(t: Tensor) -> Tensor:
    """Copy `t` unless its last dimension is contiguous and 32 bits can address its rows, as the kernels require."""
    return t if t.stride(-1) == 1 and t.shape[-2] * t.stride(-2) < 2**31 else t.contiguous()


def tokens_like(t: Tensor, tokens: int) -> Tensor:
    """Return an empty (b, h, tokens, width) with heads side by side in memory, as in the layers before and after."""
    b, h, _, width = t.shape
    return t.new_empty(b, tokens, h, width).transpose(1, 2)


@torch.compiler.assume_constant_result
def fast_double(device: torch.device) -> bool:
    """Whether float64 products cost little more than float32 ones: true on CPUs and data-centre GPUs."""
    return device.type == "cpu" or (device.type == "cuda" and not _slow_double(device.index or 0))


@functools.lru_cache(maxsize=16)
def _shared_memory(index: int) -> int:
    return torch.cuda.get_device_properties(index).shared_memory_per_block_optin


def other_derivatives(*tensors: Tensor) -> bool:
    """Whether forward-mode AD or torch.func is active: neither knows of our hand-written backward passes."""
    if torch.compiler.is_compiling():
        return _compiled_derivatives()
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    if functorch.peek_interpreter_stack() is not None and any(map(functorch.is_functorch_wrapped_tensor, tensors)):
        return True
    if forward_ad._current_level < 0:
        return False
    return any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


@torch.compiler.assume_constant_result
def _compiled_derivatives() -> bool:
    """The same in code being compiled, where our operators have no tangents, which would silently be zero."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def transformed() -> bool:
    """Whether this runs inside a transform of torch.func, which wraps every tensor that is made there."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return not torch.compiler.is_compiling() and functorch.peek_interpreter_stack() is not None


def followed(*tensors: Tensor) -> bool:
    """Whether something intercepts single operations and would not see into a kernel: forward-mode AD, torch.func, a
    tracer, a dispatch mode, or a tensor that implements its own operations (a fake or a distributed one)."""
    if torch.compiler.is_compiling():
        return _compiled_derivatives()
    torch_c: Any = torch._C
    if torch_c._len_torch_dispatch_stack() or torch_c._get_tracing_state() is not None:
        return True
    kinds: list[Any] = [type(t) for t in tensors]
    if any(kind.__torch_dispatch__ is not torch_c._disabled_torch_dispatch_impl for kind in kinds):
        return True
    return other_derivatives(*tensors)


def may_look(t: Tensor) -> bool:
    """Whether values can be read: not on `meta`, nor while code is being compiled, captured, traced or transformed."""
    if torch.compiler.is_compiling() or exporting() or t.is_meta or followed(t):
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


def overheard() -> bool:
    """Whether a torch function mode is active, such as the probe's in attention modules, which sees torch's functions
    but not ours; torch's own mode for a default device does not count."""
    if torch.compiler.is_compiling():
        return False
    torch_c: Any = torch._C
    if not torch_c._len_torch_function_stack():
        return False
    modes = (torch_c._get_function_stack_at(number) for number in range(torch_c._len_torch_function_stack()))
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def gradient_wanted(*tensors: Tensor | None) -> bool:
    """Whether there may be a backward pass; in inference mode there is none."""
    if not torch.is_grad_enabled():
        return False
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():  # not available to compilers
        return False
    return any(t is not None and t.requires_grad for t in tensors)


def batch_of_gradients(grad: Tensor) -> bool:
    """Whether `grad` hides a batch of `torch.autograd.grad(…, is_grads_batched=True)`, and so has no storage."""
    if torch.compiler.is_compiling():
        return False
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return functorch.is_legacy_batchedtensor(grad) or other_derivatives(grad)


def refuse_batch(grad: Tensor) -> None:
    """Raise RuntimeError under `torch.autograd.grad(…, is_grads_batched=True)`, whose tensors own no memory."""
    if batch_of_gradients(grad):
        raise RuntimeError(
            "the fused kernels compute one gradient at a time: leave out is_grads_batched=True (in torch.autograd."
            "functional.jacobian, vectorize=True), or call the forward pass with WELLCOND_TRITON=0 set"
        )


@functools.lru_cache(maxsize=16)
def _available(kind: str, index: int) -> tuple[bool, str]:
    if kind != "cuda":
        return False, f"Triton kernels need an NVIDIA GPU; this tensor is on {kind}"
    if not torch.cuda.is_available():
        return False, "Triton kernels need an NVIDIA GPU, and torch sees none"
    if importlib.util.find_spec("triton") is None:
        return False, "the package triton is not installed"
    if torch.version.hip is not None:
        return False, "the kernels are written and tested for NVIDIA GPUs, and this is a ROCm build of torch"
    if torch.cuda.get_device_capability(index) < (8, 0):
        return False, "the kernels need compute capability 8.0 (Ampere) or newer"
    return True, f"Triton and {torch.cuda.get_device_name(index)}"


@functools.lru_cache(maxsize=16)
def _slow_double(index: int) -> bool:
    """Consumer GPUs run float64 at 1/64 of the float32 rate; data-centre ones at a half or more."""
    return torch.cuda.get_device_capability(index) not in {(8, 0), (9, 0), (10, 0), (10, 3)}


def _landmark_paths(available: bool, taken: bool, why: str) -> list[FastPath]:
    large = available and large_programs(torch.device("cuda", 0))
    little = "; but its programs need the shared memory of an H100 or more" if available and not large else ""
    limits = little or "; at most 128 landmarks, heads of 64 in bfloat16 and of 32 else"
    of_nystrom = (
        little
        or "; half precision, at most 128 landmarks and 8 steps, heads of 64 in bfloat16 or up to 64 landmarks, of 32 "
        "else"
    )
    return [
        FastPath(name="fused Skyformer (Triton)", available=large, taken=taken and large, why=why + limits),
        FastPath(name="fused Nyström (Triton)", available=large, taken=taken and large, why=why + of_nystrom),
    ]


def fast_paths() -> list[FastPath]:
    """Return every fast path of this installation, for the default device."""
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    available, why = _available(kind, 0)
    taken = available and fused_kernels(torch.device(kind))
    if available and not taken:
        why = (
            "switched off by WELLCOND_TRITON=0"
            if os.environ.get("WELLCOND_TRITON") == "0"
            else "switched off by plain_twins()"
        )
    if not available and kind == "cpu":
        why = "needs an NVIDIA GPU, and torch sees none"
    note = "; float64 is slow on this GPU, so svd graying costs more than dct" if available and _slow_double(0) else ""
    paths = [
        FastPath(name="fused DCT graying (Triton)", available=available, taken=taken, why=why + "; epsilon ≥ 0.9 only"),
        FastPath(name="fused spectral power (Triton)", available=available, taken=taken, why=why + note),
        FastPath(name="fused condition numbers (Triton)", available=available, taken=taken, why=why + note),
        FastPath(name="streaming Gaussian product (Triton)", available=available, taken=taken, why=why),
        FastPath(
            name="fused linear attention (Triton)",
            available=available,
            taken=taken,
            why=why + "; heads of at most 64, in compiled code sequences of at most 256",
        ),
        FastPath(
            name="fused softmax attention with dropout or padding (Triton)",
            available=available,
            taken=taken,
            why=why + "; heads of at most 64, in float32 32",
        ),
        FastPath(
            name="fused narrow encoder layers (Triton)",
            available=available,
            taken=taken,
            why=why + "; under autocast, 16, 32 or 64 wide",
        ),
        *_landmark_paths(available, taken, why),
    ]
    on_cpu = kind == "cpu"
    paths.append(
        FastPath(
            name="spectral power by eigh of the float64 Gram matrix",
            available=True,
            taken=on_cpu,
            why="on a CPU it is several times faster than an SVD" if on_cpu else "for tensors on the CPU",
        )
    )
    return paths
