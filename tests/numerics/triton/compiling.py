"""Compiles every kernel for an H100, where there is none: a process of its own, for the interpreter must be off.

    python tests/numerics/triton/compiling.py gaussian         # one JSON line a kernel: its name, its shared memory

The functions run on CPU tensors, and each launch is a compilation for compute capability 9.0 instead; what they give
back is nothing. It finds what the interpreter forgives: types that do not fit, programs that ask for too much. Both are
known before the assembler takes over, which takes a third of the time: it ends there.
"""

import json
import os
import sys
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.compiler import compile as compile_kernel
from triton.runtime.errors import OutOfResources
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)
SHARED = 227 * 2**10
POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16",
    torch.int64: "*i64", torch.int32: "*i32", torch.uint8: "*u8", torch.bool: "*i1",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]
COMPILED: list[tuple[Any, dict[str, Any]]] = []  # what is the same for narrower heads, and the sizes


class Lowered(Exception):  # noqa: N818 (it is what was wanted)
    """A kernel is LLVM's code now; with what is known of it."""


def end_here(self: Any, source: Any, metadata: dict[str, Any], *_rest: Any) -> None:
    """In the place of `CUDABackend.make_ptx`."""
    raise Lowered(metadata)


def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    """In the place of `JITFunction.run`: arguments are specialised as a launch does it."""
    del warmup, grid
    given = {
        **dict(zip(self.arg_names, args, strict=False)),
        **{k: v for k, v in kwargs.items() if k in self.arg_names},
    }
    options = {k: v for k, v in kwargs.items() if k not in self.arg_names}
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, parameter in enumerate(self.params):
        name, value = parameter.name, given[parameter.name]
        if parameter.is_constexpr or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name], attributes[(place,)] = POINTERS[value.dtype], ALIGNED
        elif isinstance(value, float):
            signature[name] = "fp32"
        else:
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0:
                attributes[(place,)] = ALIGNED
    sizes = {name: value for name, value in constants.items() if name in ("WIDTH", "VALUES")}
    same = self, signature, {k: v for k, v in constants.items() if k not in sizes}, attributes, options
    if any(known == same and all(wide[name] >= sizes[name] for name in sizes) for known, wide in COMPILED):
        return  # of a head that is as wide, or wider
    try:
        compile_kernel(ASTSource(self, signature, constants, attributes), target=TARGET, options=options)
        raise AssertionError("it went on to an assembler")
    except Lowered as lowered:
        shared = lowered.args[0]["shared"]
    print(json.dumps({"kernel": self.__name__, "shared": shared, "fits": shared <= SHARED}), flush=True)
    if shared > SHARED:
        raise OutOfResources(shared, SHARED, "shared memory")
    COMPILED.append((same, sizes))


KINDS = ((64, torch.bfloat16), (32, torch.float32))  # narrower heads need less of everything


def gaussian() -> None:
    from wellcond.numerics.triton import gaussian, landmark_plan

    keep = torch.ones(2, 2, 2048, dtype=torch.bool)
    for width, dtype in KINDS:
        q, k, v = (torch.zeros(2, 2, 2048, width, dtype=dtype) for _ in range(3))
        gaussian.stream(q, k, v, scale=0.1, keep=keep if dtype == torch.bfloat16 else None)
        gaussian.pull(q, k, v, v, scale=0.1, keep=keep)
        gaussian.pull(k, q, v, v, scale=0.1, keep=keep, of_rows=True, product=True)
        gaussian.pull(k, q, v, v, scale=0.1, causal=-1, product=True)
        positions = torch.zeros(2, 128, dtype=torch.int64)
        plan = landmark_plan.plan_for(q, k, v, None, positions, 64, None, None)
        out, space, work = plan.forward(q, k, v, None, positions, None, None, 0.1, 0.1)
        plan.backward(out, q, k, v, None, positions, None, 0.1, space, work)
    q, k, v = (torch.zeros(2, 2, 2048, 32, dtype=torch.float16) for _ in range(3))
    rows, valid = torch.zeros(2, 2, 70, 32, dtype=torch.float16), torch.ones(2, 2, 70, dtype=torch.bool)
    plan = landmark_plan.plan_for(q, k, v, rows, None, 0, valid, keep)
    out, space, work = plan.forward(q, k, v, rows, None, valid, keep, 0.1, 0.1)
    plan.backward(out, q, k, v, rows, None, keep, 0.1, space, work)


def softmax() -> None:
    from wellcond.numerics.triton import linear, nystrom_plan, softmax

    keep, ends = torch.ones(2, 1, 2048, dtype=torch.bool), torch.zeros(2, 1, dtype=torch.int32)
    seed = torch.zeros(1, dtype=torch.int64)
    for width, dtype in KINDS:
        half = dtype == torch.bfloat16  # float32 differs in how it multiplies, whatever the masks: each of these once
        q, k, v = (torch.zeros(2, 2, 2048, width, dtype=dtype) for _ in range(3))
        mask = keep if half else None
        nystrom = nystrom_plan.plan_for(q, k, v, mask, 64, 6)
        out, space, work = nystrom.forward(q, k, v, mask, 0.1, differentiable=True)
        nystrom.backward(out, q, k, v, mask, 0.1, space, work)
        plan = linear.plan_for(q, k, v)
        out, small = plan.forward(q, k, v, 0.1)
        plan.backward(out, q, k, v, 0.1, small)
        linear.pull_short(linear.attend_short(q, k, v, 0.1), q, k, v, 0.1)
        for masks in ((None, None, seed), (keep, ends, seed)) if half else ((keep, ends, None),):
            settings = {"dropout_p": 0.0 if masks[2] is None else 0.1, "scale": 0.1}
            out, lse = softmax.forward(q, k, v, *masks, **settings)
            softmax.backward(out, q, k, v, *masks, out, lse, **settings)


def numerics() -> None:
    from wellcond.numerics.extremes import _gram_with_room
    from wellcond.numerics.power_fit import folded_fit
    from wellcond.numerics.spectral import floor_of
    from wellcond.numerics.triton import narrow_layer
    from wellcond.numerics.triton.extremes import extreme_eigenvalues
    from wellcond.numerics.triton.geometry import Geometry
    from wellcond.numerics.triton.gray_dct import gray_dct_images
    from wellcond.numerics.triton.spectral_power import spectral_power_in_place_layout
    from wellcond.numerics.triton.split_linear import combine, split_rows

    images = torch.zeros(2, 3, 224, 224)
    geometry = Geometry.of_images(224, 224, (16, 16))
    gray_dct_images(images, 196, 768, geometry, 0.95, restore_scale=True)
    fit = folded_fit(0.95, floor_of("products", torch.float32, 196, 768))
    spectral_power_in_place_layout(images, 196, 768, geometry, fit, restore_scale=True)
    w = torch.zeros(2, 197, 768, dtype=torch.float64)
    extreme_eigenvalues(w, *_gram_with_room(w))
    (x, x_inverse), (y, y_inverse) = (split_rows(torch.zeros(64, 768), weight=weight) for weight in (False, True))
    combine(torch.zeros(2, 64, 64), torch.zeros(64, 64), x_inverse, y_inverse, torch.zeros(64))
    assert x.shape == y.shape == (64, 1536)
    ends, seed = torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    norm, square, wide = [torch.zeros(64)] * 2, [torch.zeros(64, 64), torch.zeros(64)], torch.zeros(128, 64)
    before = [*norm, torch.zeros(192, 64), torch.zeros(192)]
    after = [*square, *norm, wide, torch.zeros(128), wide.mT.contiguous(), torch.zeros(64)]
    for n, masks in ((1024, (seed, ends)), (1, (None, None))):
        x = torch.zeros(2 if n > 1 else 1, n, 64)
        q, k, v = narrow_layer.enter(x, before, masks[1], dtype=torch.bfloat16, eps=1e-5)
        narrow_layer.enter_back((q, k, v), x, before, masks[1], eps=1e-5)
        p = 0.0 if masks[0] is None else 0.1
        y = narrow_layer.leave(q, x, after, *masks, dropout_p=p, eps=1e-5)
        narrow_layer.leave_back(y, q, x, after, *masks, dropout_p=p, eps=1e-5)


if __name__ == "__main__":
    CUDABackend.make_ptx = end_here  # pyright: ignore[reportAttributeAccessIssue]
    JITFunction.run = compile_only  # pyright: ignore[reportAttributeAccessIssue]
    torch.set_num_threads(1)
    {"gaussian": gaussian, "softmax": softmax, "numerics": numerics}[sys.argv[1]]()
