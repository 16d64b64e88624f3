"""The published code's behaviour: its numbers, and the quirks that `compat` is for, in both orders of operations.

`compat` agreed with the published code, given the same draws, to 4e-7 in float32, forward and backward. Two things
keep it so: the method written out step by step from its description, with loops over samples and heads, and numbers of
our own from the state that was compared (compat.json; `python tests/attention/test_compat.py` writes it anew).
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from wellcond.attention import skyformer_attention, skyformer_compat
from wellcond.attention.compat import ORDERS, published_order
from wellcond.numerics import gaussian

in_both_orders = pytest.mark.parametrize("order", ORDERS)


@in_both_orders
def test_golden_numbers(golden, assert_golden, order: str) -> None:
    draws = (torch.tensor([0, 3, 5, 1, 4, 6], dtype=torch.float64) + 0.5) / 8
    out = skyformer_compat(*golden, draws=draws, order=order)
    assert_golden(out, [0.836074, 2.888845, 2.057966, 1.014275], 31.909092, 8.801199)


@in_both_orders
def test_many_steps_are_the_exact_solve(golden, golden_landmarks, order: str) -> None:
    draws = (torch.tensor([0, 3, 5, 1, 4, 6], dtype=torch.float64) + 0.5) / 8
    out = skyformer_compat(*golden, draws=draws, num_iterations=20, order=order)
    torch.testing.assert_close(out, skyformer_attention(*golden, landmarks=golden_landmarks))


@in_both_orders
def test_one_draw_serves_the_batch_and_the_start_couples_it(order: str) -> None:
    x = torch.randn(3, 2, 16, 4, dtype=torch.float64)
    draws = torch.rand(8, dtype=torch.float64)

    def of(x: Tensor, num_iterations: int) -> Tensor:
        return skyformer_compat(x, x, x, draws=draws, num_iterations=num_iterations, order=order)

    assert not torch.allclose(of(x, 2)[:1], of(x[:1], 2), rtol=1e-6, atol=0)
    torch.testing.assert_close(of(x, 30)[:1], of(x[:1], 30))  # the landmarks were the same
    x.requires_grad_()
    found = torch.stack([torch.autograd.grad(of(x, 2)[i].sum(), x)[0].abs().amax((1, 2, 3)) for i in range(3)])
    others = found.fill_diagonal_(0) > 0  # the sample with the largest column sum has a say in both others
    assert sorted(others.sum(0).tolist()) == [0, 0, 2]


@in_both_orders
def test_a_mask_of_which_tokens_changes_where_landmarks_are_drawn(order: str) -> None:
    """Among the first places, as many as there are tokens: a place without a token is a landmark of zeros."""
    x, draws = torch.randn(1, 1, 8, 4, dtype=torch.float64), (torch.arange(6, dtype=torch.float64) + 0.5) / 6
    keep = torch.tensor([False, False, True, True, True, True, True, True])
    zeros = x.masked_fill(~keep[:, None], 0)
    chosen = torch.cat([zeros[..., [0, 1, 2], :], zeros[..., [3, 4, 5], :]], -2)
    out = skyformer_compat(x, x, x, keep, draws=draws, num_iterations=30, order=order)
    expected = skyformer_attention(x, x, x, keep, landmarks=chosen)
    torch.testing.assert_close(out[..., 2:, :], expected[..., 2:, :])
    at_zero = skyformer_attention(zeros[..., :1, :], x, x, keep, landmarks=chosen)
    torch.testing.assert_close(out[..., :2, :], at_zero.expand_as(out[..., :2, :]))


@in_both_orders
def test_padding_behind_the_tokens_changes_nothing(order: str) -> None:
    x, draws = torch.randn(2, 2, 12, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    keep = torch.arange(12) < 9
    out = skyformer_compat(x, x, x, keep, draws=draws, order=order)
    torch.testing.assert_close(out[:, :, :9], skyformer_compat(*[x[:, :, :9]] * 3, draws=draws, order=order))


def test_one_entry_for_all_keys_is_as_many_entries() -> None:
    x, draws = torch.randn(2, 2, 12, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
    mask = torch.ones(2, 1, 1, 1, dtype=torch.bool)
    torch.testing.assert_close(skyformer_compat(x, x, x, mask, draws=draws), skyformer_compat(x, x, x, draws=draws))


def test_no_tokens() -> None:
    assert skyformer_compat(*[torch.randn(2, 3, 0, 4)] * 3).shape == (2, 3, 0, 4)


def test_it_is_what_compat_gives() -> None:
    x = torch.randn(2, 2, 12, 4)
    out = skyformer_attention(x, x, x, compat=True, num_landmarks=6, generator=torch.Generator().manual_seed(3))
    same = skyformer_compat(x, x, x, num_landmarks=6, generator=torch.Generator().manual_seed(3))
    assert torch.equal(out, same)


@in_both_orders
def test_gradients(order: str) -> None:
    q, k, v = (torch.randn(2, 1, 6, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    draws = torch.rand(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda *parts: skyformer_compat(*parts, draws=draws, order=order), (q, k, v))


def test_lengths_must_agree() -> None:
    with pytest.raises(ValueError, match="as many queries as keys"):
        skyformer_compat(torch.randn(4, 2), torch.randn(5, 2), torch.randn(5, 2))


def test_masks_of_numbers_and_no_landmarks_raise() -> None:
    x = torch.randn(2, 3, 6, 4)
    with pytest.raises(ValueError, match="mask > -1"):
        skyformer_attention(x, x, x, torch.tensor([0, -2.0, 0, 1, 0, 3]), compat=True)
    with pytest.raises(ValueError, match="at least one"):
        skyformer_compat(x, x, x, num_landmarks=0)


MASKS = {
    "none": lambda b, n: None,
    "prefix": lambda b, n: torch.arange(n) < torch.randint(n // 2, n + 1, (b, 1, 1, 1)),
    "holes": lambda b, n: torch.rand(b, 1, 1, n) < 0.7,
    "nothing left of one": lambda b, n: torch.arange(b)[:, None, None, None].ne(1).expand(b, 1, 1, n),
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("shape", [(2, 2, 40, 8, 8, 16), (3, 1, 37, 5, 3, 7), (2, 3, 9, 1, 2, 1), (2, 1, 1, 4, 4, 5)])
@pytest.mark.parametrize("mask", MASKS)
def test_both_orders_agree(mask: str, shape: tuple[int, ...], streamed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if streamed:  # as for long sequences
        monkeypatch.setattr(gaussian, "DIRECT", 0)
        monkeypatch.setattr(gaussian, "CHUNK", 64)
    b, h, n, p, c, d = shape
    keep, draws = MASKS[mask](b, n), torch.rand(d, dtype=torch.float64)
    tokens = torch.randn(b, h, n, p), torch.randn(b, h, n, p), torch.randn(b, h, n, c)
    grad = torch.randn(b, h, n, c)

    def found(order: str, dtype: torch.dtype, num_iterations: int) -> dict[str, Tensor]:
        q, k, v = (t.to(dtype).requires_grad_() for t in tokens)
        out = skyformer_compat(q, k, v, keep, draws=draws, num_iterations=num_iterations, order=order)
        gradients = torch.autograd.grad(out, (q, k, v), grad.to(dtype))
        return {"out": out.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))}

    held = (("fast", torch.float64, 1e-10), ("fast", torch.float32, 4e-6), ("published", torch.float32, 4e-6))
    for num_iterations in (6, 1, 0):
        expected = found("published", torch.float64, num_iterations)
        for order, dtype, share in held:
            for name, t in found(order, dtype, num_iterations).items():
                largest = float(expected[name].abs().max()) or 1.0
                assert float((t - expected[name]).abs().max()) < share * largest, (order, dtype, name)


def test_the_fast_order_is_no_less_exact() -> None:
    """As many landmarks as in the Long Range Arena, and tokens so similar that N has condition numbers of hundreds."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, 192, 32) for _ in range(4))
    draws, expected = torch.rand(128), []
    for spread in (0.1, 0.5):
        errors = {}
        for order, dtype in (("published", torch.float64), ("published", torch.float32), ("fast", torch.float32)):
            parts = [t.to(dtype).requires_grad_() for t in (1 + spread * q, 1 + spread * k, v)]
            out = skyformer_compat(*parts, draws=draws, order=order)
            found = [out.detach(), *torch.autograd.grad(out, parts, grad.to(dtype))]
            if dtype == torch.float64:
                expected = found
            pairs = zip(found, expected, strict=True)
            errors[order] = torch.stack([(t.double() - e).norm() / e.norm() for t, e in pairs])
        assert bool((errors["fast"] < 1.5 * errors["published"]).all()), (spread, errors)


def test_which_order_is_taken() -> None:
    x, draws = torch.randn(2, 2, 12, 4), torch.rand(6)
    published, fast = (skyformer_compat(x, x, x, draws=draws, order=order) for order in ("published", "fast"))
    assert not torch.equal(published, fast)  # they differ in rounding
    assert torch.equal(skyformer_compat(x, x, x, draws=draws), published)  # on a CPU
    with published_order():
        assert torch.equal(skyformer_compat(x, x, x, draws=draws), published)
        assert torch.equal(skyformer_compat(x, x, x, draws=draws, order="fast"), fast)
    with pytest.raises(ValueError, match="order='quick' is unknown; use 'fast' or 'published'"):
        skyformer_compat(x, x, x, order="quick")


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS)
def test_both_orders_agree_on_a_gpu(mask: str) -> None:
    keep, draws = MASKS[mask](3, 700), torch.rand(128)
    keep = None if keep is None else keep.cuda()
    tokens, grad = [torch.randn(3, 2, 700, 32) for _ in range(3)], torch.randn(3, 2, 700, 32)

    def found(order: str | None, dtype: torch.dtype) -> list[Tensor]:
        q, k, v = parts = [t.to("cuda", dtype).requires_grad_() for t in tokens]
        out = skyformer_compat(q, k, v, keep, draws=draws.cuda(), order=order)
        return [out.detach(), *torch.autograd.grad(out, parts, grad.to("cuda", dtype))]

    expected = found("published", torch.float64)
    for order in (*ORDERS, None):
        for t, e in zip(found(order, torch.float32), expected, strict=True):
            assert float((t - e).norm() / e.norm()) < 4e-6, order


@pytest.mark.parametrize(("order", "masked"), [("fast", False), ("fast", True), ("published", True), (None, False)])
def test_it_compiles_as_one_graph(order: str | None, masked: bool) -> None:
    parts = [torch.randn(2, 2, 24, 8, requires_grad=True) for _ in range(3)]
    keep, draws = (torch.arange(24) < torch.tensor([24, 15])[:, None])[:, None, None] if masked else None, torch.rand(8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return skyformer_compat(q, k, v, keep, draws=draws, order=order)

    torch.compiler.reset()
    expected, found = attend(*parts), torch.compile(attend, backend="aot_eager", fullgraph=True)(*parts)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    wanted, gradients = (torch.autograd.grad(out.square().sum(), parts) for out in (expected, found))
    torch.testing.assert_close(gradients, wanted, rtol=1e-4, atol=1e-4)


Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
GOLDEN = Path(__file__).with_name("compat.json")
AGREEMENT = 4e-7  # of the largest entry


def case(dtype: torch.dtype = torch.float64) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor, Tensor]:
    """(q, k, v) of two samples, two heads, 24 tokens of width 32, by formula; a mask with holes; draws; weights."""
    b, h, i, j = torch.meshgrid(*(torch.arange(m, dtype=torch.float64) for m in (2, 2, 24, 32)), indexing="ij")
    q = torch.sin(0.7 * i + 1.3 * j + 0.5 * h + b)
    k = torch.cos(0.5 * i - 0.9 * j + 0.3 * h * j + 0.2 * b)
    v = torch.sin(0.3 * i * j + 0.2 + h - b)
    mask = torch.ones(2, 24, dtype=torch.bool)
    mask[0, 15:] = False
    mask[1, [2, 3, 9, 14, 20]] = False  # as where a black pixel counts as padding
    draws = torch.remainder(torch.arange(12, dtype=torch.float64) * 0.6180339887, 1)
    weights = torch.cos(0.11 * i * j + 0.4 * b - h) / 5
    return (q.to(dtype), k.to(dtype), v.to(dtype)), mask, draws.to(dtype), weights.to(dtype)


def described(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, draws: Tensor) -> Tensor:
    """The method from its description, one sample and head after the other."""
    samples, heads, n, p = q.shape
    d, half = len(draws), len(draws) // 2
    parts = {}
    for b in range(samples):
        keep = mask[b].to(q.dtype)[:, None]
        first = [math.floor(float(u) * int(mask[b].sum())) for u in draws]  # among the first n_valid places
        for h in range(heads):
            queries, keys, values = q[b, h] * keep * p**-0.25, k[b, h] * keep * p**-0.25, v[b, h] * keep
            chosen = [queries[at] for at in first[:half]] + [keys[at] for at in first[half:]]
            landmarks = torch.stack(chosen)

            def kernel(x: Tensor, y: Tensor) -> Tensor:
                return torch.stack([(-(x - row).square().sum(-1) / 2).exp() for row in y], -1)

            with_gamma = kernel(landmarks, landmarks) + 0.1 * torch.eye(d, dtype=q.dtype)
            root = with_gamma.sum(-1).rsqrt()
            parts[b, h] = (queries, keys, values, landmarks, kernel, root, root[:, None] * with_gamma * root)
    normals = torch.stack([part[-1] for part in parts.values()])
    c = normals.sum(-2).max()  # one number for the whole batch
    outputs = []
    for queries, keys, values, landmarks, kernel, root, normal in parts.values():
        eye, z = torch.eye(d, dtype=q.dtype), normal.T / c
        for _ in range(6):
            az = normal @ z
            z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
        inverse = root[:, None] * z * root
        outputs.append(kernel(queries, landmarks) @ (inverse @ (kernel(keys, landmarks).T @ values)))
    return torch.stack(outputs).reshape(samples, heads, n, p)


def forward_and_gradients(attend: Attend, dtype: torch.dtype) -> dict[str, Tensor]:
    tokens, mask, draws, weights = case(dtype)
    q, k, v = (t.requires_grad_() for t in tokens)
    out = attend(q, k, v, mask, draws)
    gradients = torch.autograd.grad((out * weights).sum(), (q, k, v))
    return {"out": out.detach(), **dict(zip(("query", "key", "value"), gradients, strict=True))}


def ours(order: str) -> Attend:
    return lambda q, k, v, mask, draws: skyformer_compat(q, k, v, mask[:, None, None], draws=draws, order=order)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], share: float) -> None:
    for name, wanted in expected.items():
        largest = float(wanted.abs().max())
        assert largest > 1e-3, name
        assert float((found[name].double() - wanted).abs().max()) < share * largest, name


@in_both_orders
def test_it_is_the_method_that_is_described(order: str) -> None:
    expected = forward_and_gradients(described, torch.float64)
    assert_near(forward_and_gradients(ours(order), torch.float64), expected, 1e-11)
    assert_near(forward_and_gradients(ours(order), torch.float32), expected, 5 * AGREEMENT)


@in_both_orders
def test_numbers_of_the_state_that_was_compared(order: str) -> None:
    found, golden = forward_and_gradients(ours(order), torch.float64), json.loads(GOLDEN.read_text())
    for name, kept in golden.items():
        wanted = {key: torch.tensor(value, dtype=torch.float64) for key, value in kept.items()}
        assert_near(summary(found[name]), wanted, 1e-10)
    for name, kept in golden.items():
        largest = float(found[name].abs().max())
        rounded = forward_and_gradients(ours(order), torch.float32)[name].double()
        assert float((rounded[0, 1, 5] - torch.tensor(kept["row"])).abs().max()) < 5 * AGREEMENT * largest, name


def summary(x: Tensor) -> dict[str, Tensor]:
    """One row of it, and of each sample and head the sum of squares and a sum with changing weights."""
    weights = torch.cos(torch.arange(x[0, 0].numel(), dtype=torch.float64)).reshape(x[0, 0].shape)
    return {"row": x[0, 1, 5], "squares": x.square().sum((-2, -1)), "sums": (x * weights).sum((-2, -1))}


if __name__ == "__main__":
    numbers = forward_and_gradients(ours("published"), torch.float64)
    kept = {name: {key: value.tolist() for key, value in summary(x).items()} for name, x in numbers.items()}
    GOLDEN.write_text(json.dumps(kept, indent=1) + "\n")
