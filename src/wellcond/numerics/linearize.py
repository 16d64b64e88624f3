"""A module or function linearised at a point: Jacobian times vector, vector times Jacobian, and rows in chunks.

    with evaluation(block, device=x.device, dtype=torch.float64) as function:   # the block in eval mode, in float64
        jacobian = Linearization(lambda point: function(point), x[:1])
        jacobian.vjp(u), jacobian.jvp(v), jacobian.matrix()

Inside `evaluation` the block runs on copies of its parameters and buffers in the wanted dtype, in eval mode, without
autocast or compiled code, with the attention backend that has every derivative. Afterwards everything is as it was:
parameters, buffers, caches, gradients, training flags and the random state. Hooks do run, since they may be part of
what the block computes.

Derivatives come from plain autograd, so that custom functions without support for `torch.func` work too. The product Jv
is taken in forward mode or, if an operation has none, as the derivative of u ↦ uᵀJ, which needs only backward.
"""

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from .no_trace import no_trace

__all__ = ["EvaluatedFunction", "Linearization", "evaluation", "evaluation_mode", "first_tensor"]

ROWS_AT_ONCE = 64  # vector-Jacobian products per backward pass: more gain little, and each costs its activations


class EvaluatedFunction:
    """A block with its parameters as arguments. Made by `evaluation`, and to be called only inside it."""

    def __init__(self, block: Callable[..., Any], dtype: torch.dtype, reset_random: Callable[[], None]):
        self.module: nn.Module | None = _as_module(block)
        self._block = block
        self._reset_random = reset_random
        self.dtype = dtype
        self.parameters: dict[str, Tensor] = {}
        """The parameters that require a gradient, cast and detached."""
        self._constants: dict[str, Tensor] = {}
        if self.module is not None:
            for name, tensor in self.module.named_parameters():
                (self.parameters if tensor.requires_grad else self._constants)[name] = _cast(tensor, dtype)
            self._constants |= {name: _cast(tensor, dtype) for name, tensor in self.module.named_buffers()}

    def __call__(
        self,
        x: Tensor,
        parameters: Mapping[str, Tensor] | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Tensor:
        """Return the first tensor of the output at x and these parameters. Random draws are the same in every call."""
        self._reset_random()
        args = _cast(tuple(args), self.dtype)
        options: dict[str, Any] = _cast(dict(kwargs or {}), self.dtype)
        if self.module is None:
            return first_tensor(self._block(x, *args, **options))
        buffers = {name: tensor.clone() for name, tensor in self._constants.items()}  # the block's writes are lost
        tensors = {**buffers, **(self.parameters if parameters is None else parameters)}
        # In each call, for what one has cached has the wrong dtype for the block and no derivative for the next call.
        with no_trace(self.module.modules()):
            return first_tensor(torch.func.functional_call(self.module, tensors, (x, *args), options))


@contextlib.contextmanager
def evaluation(
    block: Callable[..., Any], *, device: torch.device, dtype: torch.dtype = torch.float64, eval_mode: bool = True
) -> Iterator[EvaluatedFunction]:
    """Yield the block as an `EvaluatedFunction`, with the settings that its derivatives need; restore them after."""
    on_cuda = device.type == "cuda"
    state, cuda_state = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_cuda else None

    def reset_random() -> None:
        torch.set_rng_state(state)
        if cuda_state is not None:
            torch.cuda.set_rng_state(cuda_state, device)

    with contextlib.ExitStack() as stack:
        stack.callback(reset_random)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(torch.autocast(device.type, enabled=False))
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))  # fused ones lack forward mode and second derivatives
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        function = EvaluatedFunction(block, dtype, reset_random)
        if eval_mode and function.module is not None:
            stack.enter_context(evaluation_mode(function.module))
        yield function


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules in evaluation mode, and each back in its own. Sets only flags: `train` may be overridden."""
    before = [(module, module.training) for module in model.modules()]
    try:
        for module, _ in before:
            module.training = False
        yield
    finally:
        for module, training in before:
            module.training = training


class Linearization:
    """The Jacobian of `function` at `points`, m outputs × n inputs, over all points flattened into one vector."""

    def __init__(self, function: Callable[..., Tensor], *points: Tensor):
        self._function = function
        self._points = [point.detach().clone().requires_grad_() for point in points]
        self._value = function(*self._points)
        if not self._value.requires_grad:
            raise ValueError(
                "the output does not depend on what it is differentiated by; look for no_grad, detach or parameters "
                "that the block does not use"
            )
        self.outputs: int = self._value.numel()
        self.inputs: int = sum(point.numel() for point in self._points)
        self.device: torch.device = self._value.device
        self.dtype: torch.dtype = self._points[0].dtype
        self.finite: bool = bool(self._value.detach().isfinite().all())
        self.jvp_mode: str | None = None
        """How Jv is computed: `forward` or `double backward`; None before the first product."""
        self._pullback: tuple[Tensor, list[Tensor]] | None = None

    def vjp(self, u: Tensor) -> Tensor:
        """Return uᵀJ, (m,) → (n,)."""
        grads = torch.autograd.grad(
            self._value,
            self._points,
            u.to(self._value.dtype).view_as(self._value),
            retain_graph=True,
            allow_unused=True,
        )
        return self._flat(grads, ())

    def jvp(self, v: Tensor) -> Tensor:
        """Return Jv, (n,) → (m,)."""
        if self.jvp_mode is None:
            self._choose_mode()
        return self._forward(v) if self.jvp_mode == "forward" else self._double_backward(v)

    def matrix(self) -> Tensor:
        """Return J itself, (m, n): one vector-Jacobian product per output, ROWS_AT_ONCE in a batch."""
        rows = torch.empty(self.outputs, self.inputs, dtype=self.dtype, device=self.device)
        for start in range(0, self.outputs, ROWS_AT_ONCE):
            rows[start : start + ROWS_AT_ONCE] = self.rows(start, min(start + ROWS_AT_ONCE, self.outputs))
        return rows

    def rows(self, start: int, stop: int) -> Tensor:
        """Return rows `start` to `stop` of J."""
        units = torch.zeros(stop - start, self.outputs, dtype=self._value.dtype, device=self.device)
        units[torch.arange(stop - start), torch.arange(start, stop)] = 1
        try:
            with warnings.catch_warnings():  # about missing batching rules: slower, but as correct
                warnings.simplefilter("ignore")
                grads = torch.autograd.grad(
                    self._value,
                    self._points,
                    units.view(-1, *self._value.shape),
                    retain_graph=True,
                    allow_unused=True,
                    is_grads_batched=True,
                )
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a custom function that cannot be batched
            return torch.stack([self.vjp(unit) for unit in units])
        return self._flat(grads, (len(units),))

    def coarsest_eps(self) -> float:
        """Return the eps of the coarsest dtype between points and output: some blocks always compute in float32.

        Only the node outputs on the way count: torch reports float32 for those that have no derivative.
        """
        eps = max(torch.finfo(self._value.dtype).eps, torch.finfo(self.dtype).eps)
        seen, open_outputs = set(), [(self._value.grad_fn, self._value.output_nr)]
        while open_outputs:
            node, number = open_outputs.pop()
            if node is None or (node, number) in seen:
                continue
            seen.add((node, number))
            metadata = getattr(node, "_input_metadata", ())
            dtype = getattr(metadata[number], "dtype", None) if number < len(metadata) else None
            if dtype is not None and dtype.is_floating_point:
                eps = max(eps, torch.finfo(dtype).eps)
            open_outputs += node.next_functions
        return eps

    def _choose_mode(self) -> None:
        """Choose forward mode if it works and agrees with backward, else double backward."""
        generator = torch.Generator().manual_seed(0)
        u, v = (
            torch.randn(size, generator=generator, dtype=torch.float64).to(self.device, self.dtype)
            for size in (self.outputs, self.inputs)
        )
        row = self.vjp(u)
        size = row.abs().amax()
        size = torch.where(size > 0, size, 1.0)  # what follows is relative to it: norms neither overflow nor underflow
        row = row / size
        wanted = row @ v
        allowed = 100 * self.coarsest_eps() ** 0.75 * row.norm() * v.norm()
        problems = []
        for mode, product in (("forward", self._forward), ("double backward", self._double_backward)):
            try:
                with warnings.catch_warnings():  # torch's own, when it first scripts some derivatives
                    warnings.simplefilter("ignore", FutureWarning)
                    warnings.simplefilter("ignore", DeprecationWarning)
                    column = product(v)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                problems.append(f"{mode}: {str(error).strip().splitlines()[0] if str(error) else type(error).__name__}")
                continue
            difference = (u @ (column / size) - wanted).abs()
            if bool(difference <= allowed) or not bool(difference.isfinite()):
                self.jvp_mode = mode
                return
            problems.append(f"{mode}: differs from what backward gives by {float(difference / wanted.abs()):.1e}")
        raise ValueError(
            "this block gives no Jacobian-vector products (" + "; ".join(problems) + "). method='exact' needs backward "
            "alone; an autograd function of your own needs a jvp, or a backward that can be differentiated"
        )

    def _forward(self, v: Tensor) -> Tensor:
        with forward_ad.dual_level():
            parts = v.split([point.numel() for point in self._points])
            duals = [
                forward_ad.make_dual(point.detach(), part.view_as(point))
                for point, part in zip(self._points, parts, strict=True)
            ]
            tangent = forward_ad.unpack_dual(self._function(*duals)).tangent
            if tangent is None:
                return torch.zeros(self.outputs, dtype=self.dtype, device=self.device)
            return tangent.detach().to(self.dtype).reshape(-1)

    def _double_backward(self, v: Tensor) -> Tensor:
        if self._pullback is None:
            u = torch.zeros_like(self._value, requires_grad=True)
            grads = torch.autograd.grad(self._value, self._points, u, create_graph=True, allow_unused=True)
            rows = [torch.zeros_like(p) if g is None else g for p, g in zip(self._points, grads, strict=True)]
            self._pullback = u, rows
        u, rows = self._pullback
        parts = v.split([point.numel() for point in self._points])
        pairs = [
            (row, part.view_as(row)) for row, part in zip(rows, parts, strict=True) if row.requires_grad
        ]  # the other rows are zero whatever u is
        (column,) = torch.autograd.grad([row for row, _ in pairs], u, [part for _, part in pairs], retain_graph=True)
        return column.detach().to(self.dtype).reshape(-1)

    def _flat(self, grads: Sequence[Tensor | None], batch: tuple[int, ...]) -> Tensor:
        flat = [
            torch.zeros(*batch, point.numel(), dtype=self.dtype, device=self.device)
            if grad is None
            else grad.detach().reshape(*batch, point.numel())
            for point, grad in zip(self._points, grads, strict=True)
        ]
        return flat[0] if len(flat) == 1 else torch.cat(flat, -1)


def first_tensor(output: Any) -> Tensor:
    """Return the output itself, or the first tensor of a tuple, list or dict, as Hugging Face's layers return them."""
    if isinstance(output, Tensor):
        if not output.is_floating_point():
            raise ValueError(f"the output is {output.dtype}, which has no derivative; give a function with a real one")
        return output
    if isinstance(output, Mapping) and output:
        return first_tensor(next(iter(output.values())))
    if isinstance(output, tuple | list) and output:
        return first_tensor(output[0])
    raise ValueError(
        f"the output is a {type(output).__name__}, not a tensor; wrap the block in a function that returns its tensor"
    )


class _BoundMethod(nn.Module):
    """A module whose forward is a method of another, so that the other's parameters can be replaced for the call."""

    def __init__(self, method: Callable[..., Any], owner: nn.Module):
        super().__init__()
        self.owner = owner
        self._method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)


def _as_module(block: Callable[..., Any]) -> nn.Module | None:
    if isinstance(block, nn.Module):
        inner = getattr(block, "_orig_mod", block)  # unwraps torch.compile
        return inner.module if isinstance(inner, DistributedDataParallel) else inner
    owner = getattr(block, "__self__", None)
    return _BoundMethod(block, owner) if isinstance(owner, nn.Module) else None


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Copy `value`: floating-point tensors detached and cast to `dtype`, other tensors copied, the rest as it is."""

    def copied(tensor: Tensor) -> Tensor:
        return tensor.detach().to(dtype if tensor.is_floating_point() else tensor.dtype, copy=True)

    return pytree.tree_map_only(Tensor, copied, value)
