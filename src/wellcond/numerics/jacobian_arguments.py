"""The arguments of a block besides x, split into those of single samples; `jacobian.py` gives the rule.

    arguments = BatchArguments((context,), {"attn_mask": mask}, samples=len(x))
    arguments.of_sample(0)                                    # (args, kwargs) for x[:1]
    note = check_arguments(block, x, arguments, torch.float64)

A shape alone cannot tell a mask per sample from a shared mask that happens to have as many rows. So the block is
called once with the whole batch, and must give the same output there as for each sample alone.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from .linearize import EvaluatedFunction, Linearization, evaluation

__all__ = ["BatchArguments", "check_arguments"]

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)  # never specific to a sample
WAY_OUT = (
    "measure one sample at a time, jacobian_spectrum(block, x[i : i + 1], …), with what belongs to it: then nothing is "
    "split"
)


class BatchArguments:
    """`args` and `kwargs` for a batch: tensors whose first dimension is the batch are split, the rest is shared."""

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any] | None, samples: int):
        if isinstance(args, Tensor):
            raise ValueError("args must be a tuple of what comes after x, got a tensor; give args=(tensor,)")
        self.whole: tuple[tuple[Any, ...], dict[str, Any]] = tuple(args), dict(kwargs or {})
        named, self._structure = pytree.tree_flatten_with_path(self.whole)
        self._leaves = {
            f"{'args' if path[0] == pytree.SequenceKey(0) else 'kwargs'}{pytree.keystr(path[1:])}": leaf
            for path, leaf in named
        }
        self.samples = samples
        self.split: list[str] = [
            name for name, leaf in self._leaves.items() if samples > 1 and _length(leaf) == samples
        ]
        """The names of the arguments that are split, such as `kwargs['attn_mask']`."""
        self.shared: list[str] = [
            name for name, leaf in self._leaves.items() if name not in self.split and not isinstance(leaf, PLAIN)
        ]
        """The names of the arguments that each sample gets as they are, except for numbers, strings and the like."""

    def of_sample(self, index: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return `args` and `kwargs` for a batch of this sample alone."""
        leaves = [self._part(name, index) if name in self.split else leaf for name, leaf in self._leaves.items()]
        return pytree.tree_unflatten(leaves, self._structure)

    def described(self) -> str:
        """Describe which arguments are split and which are not, with their shapes."""
        split, shared = (
            ", ".join(f"{name} {_described(self._leaves[name])}" for name in names) or "nothing"
            for names in (self.split, self.shared)
        )
        return f"split with the {self.samples} samples: {split}; given to each as it is: {shared}"

    def _part(self, name: str, index: int) -> Tensor:
        leaf: Tensor = self._leaves[name]
        try:
            return leaf.narrow(0, index, 1)
        except (RuntimeError, NotImplementedError) as error:
            raise ValueError(
                f"{name} {_described(leaf)} cannot be split by sample ({_first_line(error)}); make it a dense tensor, "
                f"or {WAY_OUT}"
            ) from error


def check_arguments(block: Callable[..., Any], x: Tensor, arguments: BatchArguments, dtype: torch.dtype) -> str:
    """Raise ValueError unless each sample alone gives its output in the batch; return a note for the reader, or "".

    Always in eval mode, since in training mode batch norm and dropout treat a sample alone differently by design.
    """
    if arguments.samples == 1 or not (arguments.split or arguments.shared):
        return ""
    with evaluation(block, device=x.device, dtype=dtype) as function, torch.no_grad():
        note = "split with the samples: " + ", ".join(arguments.split) if arguments.split else ""
        try:
            whole = function(x.clone(), None, *arguments.whole)
        except Exception:  # whatever the block raises: some arguments may suit a single sample only
            return note and f"{note} (unchecked, for the block does not take the whole batch with these arguments)"
        if whole.ndim > 0 and len(whole) != len(x):
            raise ValueError(
                f"the output for {len(x)} samples has the shape {tuple(whole.shape)}, whose first dimension is not the "
                f"batch, so what belongs to which sample cannot be known ({arguments.described()}); {WAY_OUT}"
            )
        allowed = None
        for index, sample in enumerate(x.split(1)):
            alone = _alone(function, sample, index, arguments)
            if whole.ndim == 0:  # such as a loss
                continue
            if allowed is None:
                allowed = _rounding(function, sample, arguments.of_sample(index)) ** 0.5
            if not _agree(alone, whole[index], allowed):
                raise ValueError(
                    f"sample {index} alone gives another output than in its batch ({arguments.described()}). Where one "
                    f"of these was meant otherwise, or samples see each other, or what a function holds draws random "
                    f"numbers: {WAY_OUT}"
                )
    return note and (f"{note} (unchecked, for the block gives one number for all)" if whole.ndim == 0 else note)


def _alone(function: EvaluatedFunction, sample: Tensor, index: int, arguments: BatchArguments) -> Tensor:
    given = arguments.of_sample(index)
    try:
        return function(sample.clone(), None, *given)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"the block takes the whole batch, but not sample {index} alone: {_first_line(error)} "
            f"({arguments.described()}). Where the batch is not the first dimension of one of these, {WAY_OUT}"
        ) from error


def _rounding(function: EvaluatedFunction, sample: Tensor, given: tuple[tuple[Any, ...], dict[str, Any]]) -> float:
    with torch.enable_grad():
        return Linearization(lambda point: function(point.clone(), None, *given), sample).coarsest_eps()


def _agree(alone: Tensor, whole: Tensor, allowed: float) -> bool:
    if alone.numel() != whole.numel():
        return False
    alone = alone.reshape(whole.shape)
    finite = bool(whole.isfinite().all())
    if not finite or not bool(alone.isfinite().all()):
        return finite == bool(alone.isfinite().all())
    return bool((alone - whole).abs().amax() <= allowed * whole.abs().amax())


def _length(leaf: Any) -> int | None:
    return leaf.size(0) if isinstance(leaf, Tensor) and leaf.ndim > 0 else None


def _described(leaf: Any) -> str:
    if not isinstance(leaf, Tensor):
        return f"(a {type(leaf).__name__})"
    if leaf.is_nested or leaf.layout is not torch.strided:
        return f"({'a nested tensor' if leaf.is_nested else leaf.layout})"
    return str(tuple(leaf.shape))


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
