"""The plan of the Gaussian product: the same as the kernels launched one by one, to the bit, and what it hands them."""

from typing import Any

import pytest
import torch
from torch import Tensor

from wellcond.numerics import gaussian as whole
from wellcond.numerics.gaussian_weights import gaussian_weights
from wellcond.numerics.triton.gaussian import half_norms, pull, stream
from wellcond.numerics.triton.gaussian_plan import plan_for

SHAPES = [  # batch, heads, rows, columns, width, values
    (1, 2, 70, 50, 8, 8),
    (2, 1, 20, 33, 16, 5),
    (1, 1, 1, 3, 4, 4),
    (2, 3, 64, 128, 32, 16),
]


def made(shape: tuple[int, ...], device: torch.device) -> list[Tensor]:
    b, h, n, m, p, c = shape
    return [torch.randn(s, device=device) for s in ((b, h, n, p), (b, h, m, p), (b, h, m, c), (b, h, n, c))]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("is_causal", [False, True])
def test_it_is_what_the_kernels_give_one_by_one(shape, is_causal, device):
    x, y, v, g = made(shape, device)
    plan = plan_for(x, y, v, is_causal)
    assert plan is plan_for(x, y, v, is_causal)
    assert plan is not None
    out, halves = plan.forward(x, y, v, 0.3)
    x_half, y_half = half_norms(x, y, scale=0.3)
    assert torch.equal(plan.halves_of(halves)[0], x_half)
    assert torch.equal(plan.halves_of(halves)[1], y_half)
    down, up = (1, -1) if is_causal else (0, 0)
    assert torch.equal(out, stream(x, y, v, scale=0.3, causal=down))
    dx, dy, dv = plan.backward(g, x, y, v, 0.3, halves)
    assert torch.equal(dx, pull(x, y, g, v, scale=0.3, causal=down)[0])
    want_dy, want_dv = pull(y, x, v, g, scale=0.3, causal=up, product=True)
    assert torch.equal(dy, want_dy)
    assert want_dv is not None
    assert torch.equal(dv, want_dv)


def test_few_rows_and_many_columns_have_none(device):
    x, y, v, _ = made((1, 1, 20, 1200, 8, 8), device)
    assert plan_for(x, y, v, False) is None
    assert plan_for(y, x, torch.randn(1, 1, 20, 8, device=device), False) is None  # its gradient would be one


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 2), (0, 1, 2)])
def test_any_gradients_of_tokens_with_any_strides(needed, device, monkeypatch):
    """Heads side by side, as one projection makes them; a gradient that is expanded."""
    monkeypatch.setattr(whole, "fused_kernels", lambda _: True)
    tokens = torch.randn(2, 20, 3, 2, 8, device=device).permute(2, 0, 3, 1, 4)
    for g in (torch.randn(2, 2, 20, 8, device=device), torch.randn(1, device=device).expand(2, 2, 20, 8)):
        given = [t.detach().requires_grad_(i in needed) for i, t in enumerate(tokens)]
        out = whole.gaussian_product(given[0], given[1], given[2], scale=0.3)
        found = torch.autograd.grad(out, [given[i] for i in needed], g)
        wide = [t.detach().double().requires_grad_() for t in given]
        want = gaussian_weights(wide[0], wide[1], scale=0.3) @ wide[2]
        truth = torch.autograd.grad(want, [wide[i] for i in needed], g.double())
        for one, other in zip((out, *found), (want, *truth), strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


def test_compiled_launches_are_given_addresses(device):
    """From the second call on a launch takes numbers instead of tensors: here what they are is looked at."""
    x, y, v, g = made((1, 2, 24, 40, 8, 16), device)
    plan = plan_for(x, y, v, False)
    assert plan is not None
    seen: list[tuple[Any, ...]] = []
    plan.backward(g, x, y, v, 0.3, torch.zeros(plan.halves_size, device=device))  # makes its launches
    of_rows, _, _, of_columns, *_ = next(iter(plan.pulls.values()))
    launches = (plan.norms, plan.stream, of_rows, of_columns)
    try:
        for launch in launches:
            launch._start = lambda *args: seen.append(args)
        out, halves = plan.forward(x, y, v, 0.3)
        dx, dy, dv = plan.backward(g, x, y, v, 0.3, halves)
    finally:  # the plan is kept for others
        for launch in launches:
            launch._start = None
    of_x, of_y = (t.data_ptr() for t in plan.halves_of(halves))
    to = {t: t.data_ptr() for t in (x, y, v, g, out, dx, dy, dv)}
    norms, product, rows, columns = seen
    assert norms[:5] == (to[x], to[y], to[x], of_x, of_y)
    assert product[:7] == (to[x], to[y], to[v], of_y, to[x], to[x], to[out])
    assert rows[:9] == (to[x], to[y], to[g], to[v], of_y, to[x], to[x], to[dx], to[dx])
    assert columns[:9] == (to[y], to[x], to[v], to[g], of_x, to[y], to[y], to[dy], to[dv])


def test_a_batch_of_gradients(device, monkeypatch):
    monkeypatch.setattr(whole, "fused_kernels", lambda _: True)
    tokens = [t.requires_grad_() for t in made((1, 2, 9, 11, 4, 5), device)[:3]]
    out = whole.gaussian_product(tokens[0], tokens[1], tokens[2], scale=0.3)
    weights = torch.randn(3, 1, 2, 9, 5, device=device)
    found = torch.autograd.grad(out, tokens, weights, is_grads_batched=True, retain_graph=True)
    for i, weight in enumerate(weights):
        for a, b in zip(found, torch.autograd.grad(out, tokens, weight, retain_graph=True), strict=True):
            torch.testing.assert_close(a[i], b, rtol=1e-4, atol=1e-5)
