"""How far one update moves the embeddings, relative to how far it moves the weights.

    score = instability_score(model, batch, step)
    score.tau, score.status
    instability_scores(model, batches, step, embed=around("norm"))     # 20 steps, before and after the final norm

    τ = ‖f(x, W') − f(x, W)‖² / ‖W' − W‖²   (Frobenius), with W and W' all parameters before and after the update on x

f returns the token embeddings. It is evaluated in eval mode, without gradients, with the same random draws and the same
buffers before and after, so that only the weights make a difference. Training itself is not affected: the random state,
gradients, buffers, caches and training flags are left as `step` leaves them.
"""

import contextlib
import copy
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from wellcond.models.families import unwrap
from wellcond.numerics.linearize import evaluation_mode
from wellcond.numerics.no_trace import no_trace

__all__ = ["STEPS", "Embed", "InstabilityScore", "Step", "around", "instability_score", "instability_scores", "seeded"]

Embed = Callable[[nn.Module, Any], Tensor | Mapping[str, Tensor]]
Step = Callable[[nn.Module, Any], object]

STEPS = 20  # as in the paper
ROUNDING = 16  # changes up to this times eps·‖f‖ are rounding


@dataclass(frozen=True, kw_only=True)
class InstabilityScore:
    """τ of one step and one embedding."""

    tau: float
    """NaN where the status is `zero` or `non_finite`."""
    output_change: float
    """‖f(x, W') − f(x, W)‖²."""
    parameter_change: float
    """‖W' − W‖²."""
    step: int
    status: str
    """`ok`; `zero`: no parameter moved (as when a GradScaler skips a step); `non_finite`; `low_precision`: the
    embedding is coarser than float32 (as under autocast), or moved by no more than its rounding."""
    embedding: str
    """Its name: "embedding", unless `embed` returns names."""
    count: int
    """Samples in the batch."""
    dtype: str
    """The embedding's dtype."""
    others: tuple["InstabilityScore", ...] = ()
    """The scores of the other embeddings, if `embed` returns several."""

    def __getitem__(self, embedding: str) -> "InstabilityScore":
        """Return the score of the embedding with this name."""
        for score in (self, *self.others):
            if score.embedding == embedding:
                return score
        raise KeyError(f"no embedding {embedding!r}; there are {', '.join(self.embeddings())}")

    def embeddings(self) -> list[str]:
        """Return the names of the embeddings of this score and the others."""
        return [score.embedding for score in (self, *self.others)]

    def rows(self, run: str = "") -> list[dict[str, Any]]:
        """Return flat dicts for `records.append_rows`: rows with `embedding` instead of block, index and site."""
        return [
            {
                "run": run,
                "step": score.step,
                "embedding": score.embedding,
                "name": "tau",
                "value": score.tau,
                "count": score.count,
                "dtype": score.dtype,
                "status": score.status,
            }
            for score in (self, *self.others)
        ]


def instability_score(
    model: nn.Module, batch: Any, step: Step, *, embed: Embed | None = None, index: int = 1, seed: int = 0
) -> InstabilityScore:
    """Return τ of the update that `step(model, batch)` does.

    `embed(model, batch)` returns the token embeddings, or several by name, e.g. before and after the final norm
    (`around` makes such a function). By default `forward_features` of the model inside its wrappers (DDP,
    torch.compile), or else the model, is called with the batch or its first element. Both evaluations get a copy of the
    batch, since the step or the model may change it in place.
    `index` is the step's number; `seed` is that of the random draws in both evaluations. Needs memory for one copy of
    the parameters, the buffers and the embeddings, and two of the batch.
    """
    embed = embed or _default_embed
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    if not parameters:
        raise ValueError(f"{type(model).__name__} has no parameters that an update could move")
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    first, second = cloned(batch), cloned(batch)
    with no_trace(model.modules()):  # else the second evaluation could read what the first has cached
        before = _evaluate(model, first, embed, seed, buffers)
    step(model, batch)
    moved = _squared_distance(model, parameters)
    with no_trace(model.modules()):
        after = _evaluate(model, second, embed, seed, buffers)
    if [(name, value.shape) for name, value in before.items()] != [(n, v.shape) for n, v in after.items()]:
        raise ValueError("the embeddings changed in name or shape; `embed` must give the same ones before and after")
    scores = []
    for name, value in before.items():
        change = float((_wide(after[name]) - _wide(value)).abs().square().sum())
        status = _status(value, change, moved)
        scores.append(
            InstabilityScore(
                tau=change / moved if status in ("ok", "low_precision") else math.nan,
                output_change=change,
                parameter_change=moved,
                step=index,
                status=status,
                embedding=name,
                count=len(value),
                dtype=str(value.dtype).removeprefix("torch."),
            )
        )
    return replace(scores[0], others=tuple(scores[1:]))


def instability_scores(
    model: nn.Module,
    batches: Iterable[Any],
    step: Step,
    *,
    embed: Embed | None = None,
    steps: int = STEPS,
    seed: int = 0,
) -> list[InstabilityScore]:
    """Return τ of each of `steps` updates, one per batch; they train the model. ValueError for too few batches."""
    check_count(batches, steps)
    scores = [
        instability_score(model, batch, step, embed=embed, index=index, seed=seed)
        for index, batch in enumerate(itertools.islice(batches, steps), start=1)
    ]
    check_count(scores, steps)
    return scores


def around(path: str) -> Embed:
    """Return an `embed` for the embeddings `before` and `after` the module at `path`: `around("norm")` for timm's ViT.

    The path is one in the model, or in the model inside its wrappers. It calls the model with the batch or its first
    element. In that call the module must run exactly once, with its input as a positional argument.
    """

    def embed(model: nn.Module, batch: Any) -> dict[str, Tensor]:
        seen: list[tuple[Any, Any]] = []
        try:
            module = model.get_submodule(path)
        except AttributeError:
            module = unwrap(model).get_submodule(path)
        hook = module.register_forward_hook(lambda _, args, out: seen.append((args[0], out)))
        try:
            model(_inputs(batch))
        finally:
            hook.remove()
        if len(seen) != 1:
            raise ValueError(f"{path!r} ran {len(seen)} times in one call of the model; name a module that runs once")
        return {"before": seen[0][0], "after": seen[0][1]}

    return embed


def _status(embedding: Tensor, change: float, moved: float) -> str:
    if not math.isfinite(change) or not math.isfinite(moved):
        return "non_finite"
    if moved == 0:
        return "zero"
    rounding = ROUNDING * torch.finfo(embedding.dtype).eps
    coarse = embedding.dtype.itemsize < 4 or change <= rounding**2 * float(_wide(embedding).abs().square().sum())
    return "low_precision" if coarse else "ok"


def _squared_distance(model: nn.Module, before: Mapping[str, Tensor]) -> float:
    now = dict(model.named_parameters())
    if {name: tensor.shape for name, tensor in now.items()} != {name: t.shape for name, t in before.items()}:
        raise ValueError(
            "the step added, removed or reshaped parameters; ‖W' − W‖ needs the same ones before and after"
        )
    with torch.no_grad():
        return sum(float((_wide(now[name]) - _wide(tensor)).abs().square().sum()) for name, tensor in before.items())


def _wide(t: Tensor) -> Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


def _evaluate(
    model: nn.Module, batch: Any, embed: Embed, seed: int, buffers: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the embeddings in eval mode with these buffers; flags, buffers and random state are restored."""
    current = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    try:
        _set_buffers(model, buffers)
        with evaluation_mode(model), seeded(model, seed), torch.no_grad():
            found = embed(model, batch)
    finally:
        _set_buffers(model, current)
    named = {"embedding": found} if isinstance(found, Tensor) else found
    if not isinstance(named, Mapping) or not named or not all(isinstance(v, Tensor) for v in named.values()):
        raise ValueError(
            f"the embeddings are a {type(found).__name__}, not a tensor or tensors by name; give embed=… that returns "
            "one or the other"
        )
    return {name: value.detach().clone() for name, value in named.items()}


def _set_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name in values and not torch.equal(buffer, values[name]):
                buffer.copy_(values[name])


@contextlib.contextmanager
def seeded(model: nn.Module, seed: int) -> Iterator[None]:
    """Seed torch on the CPU and the model's GPUs, NumPy and Python inside this context, and restore them afterwards."""
    devices = {parameter.device.index for parameter in model.parameters() if parameter.is_cuda}
    state, numpy_state = random.getstate(), np.random.get_state()  # noqa: NPY002 (the draws of others, such as timm)
    with torch.random.fork_rng(devices=sorted(devices)):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)  # noqa: NPY002


def cloned(batch: Any) -> Any:
    """Return a copy of the batch that shares no values with it. ValueError if something in it cannot be copied."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):  # deepcopy refuses tensors that were computed with gradients
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        try:
            return copy.deepcopy(leaf)
        except (TypeError, RuntimeError) as error:
            raise ValueError(
                f"the {type(leaf).__name__} in the batch cannot be copied ({error}), and without a copy the step could "
                "change what f is evaluated on; put tensors into the batch, or containers of them"
            ) from error

    return pytree.tree_map(of_leaf, batch)


def _default_embed(model: nn.Module, batch: Any) -> Tensor:
    return getattr(unwrap(model), "forward_features", model)(_inputs(batch))


def _inputs(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        raise ValueError("the batch is a dict, and what of it the model takes is not known; give embed=… that calls it")
    return batch[0] if isinstance(batch, tuple | list) else batch


def check_count(batches: Iterable[Any], steps: int) -> None:
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if isinstance(batches, Sized) and len(batches) < steps:
        raise ValueError(f"there are {len(batches)} batches for {steps} steps; give more, or ask for fewer steps")
