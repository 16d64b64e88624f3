"""Attentions whose kernels know how tokens lie in memory: what autograd saved may come back laid out otherwise.

`torch.autograd.graph.save_on_cpu`, and whatever else moves saved tensors away and back, does not keep the strides of
queries, keys and values that stand side by side, as one projection makes them.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from wellcond.attention import find_attention, nystrom_fused, skyformer_fused
from wellcond.attention.linear_fused import fused_linear
from wellcond.attention.nystrom_fused import fused_nystrom
from wellcond.attention.skyformer_fused import fused_skyformer
from wellcond.numerics import gaussian
from wellcond.numerics.triton.launch import Launch

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def skyformer(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.3) -> Tensor:
    at = torch.tensor([1, 5, 8, 2, 9, 12], device=q.device)
    return fused_skyformer(q, k, v, positions=at, of_queries=3, scale=scale, gamma=0.1)


def nystrom(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.3) -> Tensor:
    return fused_nystrom(q, k, v, num_landmarks=6, num_iterations=3, scale=scale)


def linear(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.3) -> Tensor:
    return fused_linear(q, k, v, factor=scale)


def kernelized(q: Tensor, k: Tensor, v: Tensor, scale: float = 0.3) -> Tensor:
    return gaussian.gaussian_product(q, k, v, scale=scale)


every = pytest.mark.parametrize("attention", [skyformer, nystrom, linear, kernelized])


@pytest.fixture(autouse=True)
def with_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian, "fused_kernels", lambda _: True)


def side_by_side(device: torch.device) -> list[Tensor]:
    tokens = torch.randn(2, 20, 3, 2, 8, device=device).permute(2, 0, 3, 1, 4)
    return [t.detach().requires_grad_() for t in tokens]


def dense(t: Tensor) -> Tensor:
    return t.clone(memory_format=torch.contiguous_format)


def turned(t: Tensor) -> Tensor:
    return t.mT.contiguous().mT if t.ndim > 1 else t.clone()


def in_a_buffer(t: Tensor) -> Tensor:
    """Not aligned as memory of its own is."""
    buffer = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return buffer[1:].view(t.shape).copy_(t)


@every
@pytest.mark.parametrize("moved_to", [dense, turned, in_a_buffer])
def test_gradients_of_what_hooks_have_moved(
    moved_to: Callable[[Tensor], Tensor], attention: Attention, device: torch.device
) -> None:
    tokens, weight = side_by_side(device), torch.randn(2, 2, 20, 8, device=device)
    want = torch.autograd.grad(attention(*tokens), tokens, weight)
    moved: list[Tensor] = []

    def away(t: Tensor) -> Tensor:
        moved.append(t)
        return moved_to(t)

    with torch.autograd.graph.saved_tensors_hooks(away, lambda t: t):
        out = attention(*tokens)
    assert any(not t.is_contiguous() for t in moved)
    for found, other in zip(torch.autograd.grad(out, tokens, weight), want, strict=True):
        torch.testing.assert_close(found, other)


@pytest.mark.parametrize("name", ["skyformer", "nystrom"])
def test_kernels_are_given_no_numbers_of_numpy(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be no numbers for a compiled kernel; and equal to the next caller's, who would get its plan."""
    given: list[object] = []
    real = Launch.__call__

    def seen(launch: Launch, *args: object) -> None:
        given.extend(args)
        real(launch, *args)

    monkeypatch.setattr(Launch, "__call__", seen)
    for module in (nystrom_fused, skyformer_fused):
        for asked in ("fused_kernels", "large_programs"):
            monkeypatch.setattr(module, asked, lambda _: True)
    tokens = [t.half() for t in side_by_side(device)]
    find_attention(name).function(*tokens, num_landmarks=np.int64(6), scale=np.float64(0.3))
    assert given
    assert not any(isinstance(x, np.generic) for x in given)


@every
def test_an_integer_is_a_number_like_any_other(
    attention: Callable[..., Tensor], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton would make a kernel for the integer 1, which the next number would be given to."""
    given: list[object] = []
    real = Launch.__call__

    def seen(launch: Launch, *args: object) -> None:
        given.extend(type(x) for x in args if isinstance(x, int | float))
        real(launch, *args)

    monkeypatch.setattr(Launch, "__call__", seen)
    kinds = []
    for scale in (1, 0.5):
        attention(*side_by_side(device), scale=scale)
        kinds.append(given.copy())
        given.clear()
    assert float in kinds[0]
    assert kinds[0] == kinds[1]
