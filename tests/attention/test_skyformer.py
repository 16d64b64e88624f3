"""Skyformer against its formula in float64, and against the kernelized attention that it approximates."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wellcond.attention import (
    SkyformerAttention,
    kernelized_attention,
    skyformer,
    skyformer_attention,
    softmax_attention,
)
from wellcond.attention.landmarks import choose_landmarks
from wellcond.attention.skyformer import SkyformerCore


def written_out(kernel, q: Tensor, k: Tensor, v: Tensor, rows: Tensor, gamma: float) -> Tensor:
    matrix = kernel(rows, rows) + gamma * torch.eye(rows.shape[-2], dtype=torch.float64)
    return kernel(q, rows) @ torch.linalg.pinv(matrix, hermitian=True) @ (kernel(rows, k) @ v.double())


# ---- golden numbers


@pytest.mark.parametrize("solver", ["cholesky", "iteration"])  # six steps from the identity equal the exact solve
def test_golden_numbers(golden, golden_landmarks, assert_golden, solver: str) -> None:
    out = skyformer_attention(*golden, landmarks=golden_landmarks, solver=solver)
    assert_golden(out, [0.836060, 2.888805, 2.057836, 1.014203], 31.908509, 8.801095)


def test_golden_numbers_without_gamma(golden, golden_landmarks, assert_golden) -> None:
    out = skyformer_attention(*golden, landmarks=golden_landmarks, gamma=0.0)
    assert_golden(out, [0.851926, 2.944710, 2.115997, 1.060686], 32.588447, 9.100907)
    torch.testing.assert_close(out[[0, 3, 5]], kernelized_attention(*golden)[[0, 3, 5]])  # sampled rows are exact


# ---- against the formula


@given(
    n=st.integers(1, 9), m=st.integers(1, 9), p=st.integers(1, 6), c=st.integers(1, 6), d=st.integers(1, 20),
    solver=st.sampled_from(["cholesky", "iteration"]), landmarks=st.sampled_from(["spread", "segment"]),
)  # fmt: skip
def test_the_formula(kernel, n: int, m: int, p: int, c: int, d: int, solver: str, landmarks: str) -> None:
    torch.manual_seed(1000 * n + 100 * m + 10 * p + c)
    q, k, v = (torch.randn(2, 3, *s, dtype=torch.float64) for s in ((n, p), (m, p), (m, c)))
    out = skyformer_attention(q, k, v, num_landmarks=d, landmarks=landmarks, solver=solver, gamma=0.2, num_iterations=9)
    rows = choose_landmarks(q, k, d, landmarks).rows
    torch.testing.assert_close(out, written_out(kernel, q, k, v, rows, 0.2), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("lead", [(), (3,), (2, 2), (2, 2, 2)])
def test_all_rows_without_gamma_are_kernelized_attention(lead: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(*lead, *s, dtype=torch.float64) for s in ((7, 3), (5, 3), (5, 4)))
    for count in (12, 50):
        out = skyformer_attention(q, k, v, num_landmarks=count, gamma=0.0)
        torch.testing.assert_close(out, kernelized_attention(q, k, v), rtol=1e-6, atol=1e-7)


def test_all_rows_of_the_softmax_kernel_are_softmax_attention() -> None:
    q, k, v = (torch.randn(2, 3, *s, dtype=torch.float64) for s in ((7, 4), (6, 4), (6, 5)))
    mask = torch.tensor([[1, 1, 0, 1, 1, 1], [1, 0, 0, 1, 1, 1]], dtype=torch.bool)[:, None, None]
    bias = torch.randn(2, 1, 1, 6, dtype=torch.float64)
    for attn_mask in (None, mask, bias):
        out = skyformer_attention(q, k, v, attn_mask, num_landmarks=20, gamma=0.0, kernel="softmax")
        torch.testing.assert_close(out, softmax_attention(q, k, v, attn_mask), rtol=1e-6, atol=1e-7)


def test_numbers_in_a_mask_are_factors_of_keys(kernel) -> None:
    q, k, v = (torch.randn(2, 3, 6, 4, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 1, 1, 6, dtype=torch.float64)
    out = skyformer_attention(q, k, v, bias, num_landmarks=12, gamma=0.0)
    torch.testing.assert_close(out, kernelized_attention(q, k, v, bias), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("gamma", [0.0, 1e-12, 2e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-3])
@pytest.mark.parametrize("settings", [{}, {"solver": "iteration", "num_iterations": 60}], ids=str)
@pytest.mark.parametrize("width", [1, 4])
def test_any_gamma_in_float32(gamma: float, settings: dict, width: int) -> None:
    q, k = (0.3 * torch.randn(2, 2, 60, width) for _ in range(2))  # so near that κ(L, L) is singular to float64, too
    v = torch.randn(2, 2, 60, 3)
    parts = [t.requires_grad_() for t in (q, k, v)]
    out = skyformer_attention(*parts, gamma=gamma, num_landmarks=40, **settings)
    assert all(t.isfinite().all() for t in torch.autograd.grad(out.square().sum(), parts))
    exact = skyformer_attention(*(t.detach().double() for t in parts), gamma=gamma, num_landmarks=40)
    assert (out.double() - exact).norm() < 0.05 * exact.norm()


@pytest.mark.parametrize(("gamma", "taken"), [(0.1, True), (1e-5, True), (1e-7, False), (1e-9, False)])
def test_float32_kernels_get_no_gamma_that_float32_cannot_see(gamma: float, taken: bool, device, monkeypatch) -> None:
    q, k, v = (torch.randn(1, 1, 60, 2, device=device) for _ in range(3))
    calls = []
    fused = skyformer.fused_skyformer
    monkeypatch.setattr(skyformer, "can_fuse", lambda *_, **__: True)
    monkeypatch.setattr(skyformer, "fused_skyformer", lambda *a, **s: calls.append(1) or fused(*a, **s))
    out = skyformer_attention(q, k, v, gamma=gamma, num_landmarks=40)
    assert bool(calls) == taken
    monkeypatch.undo()
    exact = skyformer_attention(q.double(), k.double(), v.double(), gamma=gamma, num_landmarks=40)
    assert (out.double() - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_many_steps_without_gamma(dtype: torch.dtype) -> None:
    x = torch.randn(1, 1, 64, 2, dtype=dtype)
    for count in (128, 20):
        out = skyformer_attention(x, x, x, gamma=0.0, num_landmarks=count, solver="iteration", num_iterations=60)
        exact = skyformer_attention(x.double(), x.double(), x.double(), gamma=0.0, num_landmarks=count)
        assert (out.double() - exact).norm() < 0.02 * exact.norm()


def test_loewner_order(kernel) -> None:  # 0 ⪯ C̃ ⪯ C on the completion, also with γ, and closer with more landmarks
    x = torch.randn(20, 3, dtype=torch.float64)
    full, eye = kernel(x, x), torch.eye(20, dtype=torch.float64)
    errors = []
    for count in (3, 6, 12, 20):
        near = skyformer_attention(x, x, eye, landmarks=x[:count], gamma=0.0)
        for gamma in (0.0, 0.1):
            low = skyformer_attention(x, x, eye, landmarks=x[:count], gamma=gamma)
            assert torch.linalg.eigvalsh(low)[0] > -1e-9
            assert torch.linalg.eigvalsh(full - low)[0] > -1e-9
        errors.append(float(torch.linalg.matrix_norm(full - near, 2)))
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9


# ---- what must not matter


def test_duplicate_landmarks(kernel) -> None:
    q, k, v = (torch.randn(6, 3, dtype=torch.float64) for _ in range(3))
    rows = torch.cat([q[:3], q[:3], k[:1]])
    for gamma in (0.1, 0.0):
        out = skyformer_attention(q, k, v, landmarks=rows, gamma=gamma)
        torch.testing.assert_close(out, written_out(kernel, q, k, v, rows, gamma), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("solver", ["cholesky", "iteration"])
@pytest.mark.parametrize("kernel_name", ["gaussian", "softmax"])
@pytest.mark.parametrize("norm", [1e-6, 1.0, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_finite_with_gradients_at_any_norm(solver: str, kernel_name: str, norm: float, dtype: torch.dtype) -> None:
    q, k = (torch.nn.functional.normalize(torch.randn(2, 2, 9, 4), dim=-1).mul(norm).to(dtype) for _ in range(2))
    v = torch.randn(2, 2, 9, 4).to(dtype)
    parts = [t.requires_grad_() for t in (q, k, v)]
    if kernel_name == "softmax" and norm > 100:  # exp(−10⁸): nothing is left of any row
        with pytest.raises(ValueError, match="lost in rounding"):
            skyformer_attention(*parts, num_landmarks=6, solver=solver, kernel=kernel_name)
        return
    out = skyformer_attention(*parts, num_landmarks=6, solver=solver, kernel=kernel_name)
    assert out.dtype == dtype
    assert out.isfinite().all()
    out.float().square().sum().backward()
    assert all(t.grad.isfinite().all() for t in parts)


def test_half_precision_rounds_the_input_and_the_output_only(kernel) -> None:
    q, k, v = (torch.randn(2, 2, 40, 8).bfloat16() for _ in range(3))
    out = skyformer_attention(q, k, v, num_landmarks=24)
    exact = skyformer_attention(q.double(), k.double(), v.double(), num_landmarks=24)
    assert (out.double() - exact).abs().max() < 1e-2 * exact.abs().max()


def test_gradients_through_solve_landmarks_and_masks() -> None:
    q, k, v = (torch.randn(2, 1, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 1, 1, 1]], dtype=torch.bool)[:, None, None]
    for settings in (
        {}, {"landmarks": "segment"}, {"solver": "iteration"}, {"kernel": "softmax"},
        {"landmarks": "segment", "solver": "iteration"},
    ):  # fmt: skip
        for attn_mask in (None, mask):

            def out(*parts: Tensor, attn_mask=attn_mask, settings=settings) -> Tensor:
                return skyformer_attention(*parts, attn_mask, num_landmarks=4, **settings)

            assert torch.autograd.gradcheck(out, (q, k, v))


def test_forward_mode_and_functional_derivatives_agree_with_backward() -> None:
    q, k, v = (torch.randn(6, 3, dtype=torch.float64) for _ in range(3))

    def out(q: Tensor) -> Tensor:
        return skyformer_attention(q, k, v, num_landmarks=4)

    rows = torch.func.jacrev(out)(q)
    torch.testing.assert_close(torch.func.jacfwd(out)(q), rows)
    torch.testing.assert_close(torch.autograd.functional.jacobian(out, q), rows)


def test_queries_that_are_padding_need_a_mask_of_their_own_across_lengths() -> None:
    q, k = torch.randn(1, 2, 7, 4, dtype=torch.float64), torch.randn(1, 2, 5, 4, dtype=torch.float64)
    v, keep = torch.randn(1, 2, 5, 4, dtype=torch.float64), torch.tensor([1, 1, 1, 0, 1, 0, 1], dtype=torch.bool)
    alone = skyformer_attention(q[:, :, keep], k, v, num_landmarks=4)
    q[:, :, ~keep] = 3.0
    for mask in (keep[None, None], keep[None, None, None]):
        out = skyformer_attention(q, k, v, num_landmarks=4, query_mask=mask)
        torch.testing.assert_close(out[:, :, keep], alone)


# ---- the module's core


def test_training_draws_and_evaluation_repeats() -> None:
    core = SkyformerCore(num_landmarks=4)
    q, k, v = (torch.randn(2, 2, 12, 4) for _ in range(3))
    assert not torch.equal(core(q, k, v), core(q, k, v))
    core.eval()
    assert torch.equal(core(q, k, v), core(q, k, v))
    assert torch.equal(core(q, k, v), skyformer_attention(q, k, v, num_landmarks=4))
    compat = SkyformerCore(num_landmarks=4, compat=True).eval()
    assert not torch.equal(compat(q, k, v), compat(q, k, v))


def test_settings_build_it_again() -> None:
    core = SkyformerCore(num_landmarks=7, gamma=0.3, solver="iteration", num_iterations=3, landmarks="segment")
    assert SkyformerCore(**core.settings).settings == core.settings
    assert core.settings["gamma"] == 0.3
    assert "num_landmarks=7" in repr(core)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"solver": "lu"}, "cholesky"), ({"kernel": "cosine"}, "gaussian"), ({"gamma": -1.0}, "gamma"),
        ({"num_landmarks": 0}, "at least one"), ({"landmarks": "kmeans"}, "spread"), ({"dropout_p": 0.1}, "dropout_p"),
        ({"is_causal": True}, "causal"), ({"compat": True, "kernel": "softmax"}, "compat"),
        ({"num_landmarks": "64"}, "num_landmarks='64'"), ({"num_landmarks": 4.5}, "whole number"),
        ({"num_iterations": -3}, "num_iterations=-3"), ({"compat": True, "solver": "iteration"}, "solver="),
        ({"compat": True, "landmarks": "segment"}, "landmarks="), ({"compat": True, "num_landmarks": 0}, "one"),
    ],
)  # fmt: skip
def test_mistakes_are_named(settings: dict, word: str) -> None:
    x = torch.randn(2, 6, 4)
    with pytest.raises(ValueError, match=word):
        skyformer_attention(x, x, x, **settings)
    if not settings.keys() & {"dropout_p", "is_causal"}:
        with pytest.raises(ValueError, match=word):
            SkyformerCore(**settings)


@pytest.mark.parametrize("shape", [(4, 3), (4,), (5, 3, 2, 4), (0, 4), (1, 2, 3, 2, 4)])
def test_landmarks_that_do_not_fit(shape: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 6, 4)
    with pytest.raises(ValueError, match="do not fit queries"):
        skyformer_attention(x, x, x, landmarks=torch.randn(shape))


def test_a_mask_by_query_raises() -> None:
    x = torch.randn(2, 3, 6, 4)
    with pytest.raises(ValueError, match="masks of keys"):
        skyformer_attention(x, x, x, torch.ones(6, 6, dtype=torch.bool))


@pytest.mark.parametrize("std", [0.001, 0.02, 0.05, 0.15, 0.3, 1.0])  # from tokens that are all alike to none that are
@pytest.mark.parametrize("width", [8, 64])
@pytest.mark.parametrize(("centred", "most"), [(False, {6: 1e-3, 8: 1e-6}), (True, {6: 0.4, 8: 1.3e-4, 9: 1e-10})])
def test_how_near_the_iteration_comes(std: float, width: int, centred: bool, most: dict[int, float]) -> None:
    """What docs/attention.md says of it, for γ = 0.1 and 128 landmarks."""
    q, k, v = (torch.randn(1, 1, 512, width, dtype=torch.float64) for _ in range(3))
    q, k, v = q * std, k * std, v - v.mean(-2, keepdim=True) if centred else v + 0.1
    exact = skyformer_attention(q, k, v, num_landmarks=128, gamma=0.1)
    for steps, error in most.items():
        found = skyformer_attention(q, k, v, num_landmarks=128, gamma=0.1, solver="iteration", num_iterations=steps)
        assert (found - exact).norm() < error * exact.norm()


def far_apart(norm: float, p: int, dtype: torch.dtype, twins: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values whose tokens have this norm; twins are tokens that are nearly the same."""
    q, k = (norm * torch.nn.functional.normalize(torch.randn(1, 2, 24, p, dtype=torch.float64), dim=-1) for _ in "qk")
    if twins:
        q[..., ::2, :] = q[..., 1::2, :] + 1e-5 * torch.randn(1, 2, 12, p, dtype=torch.float64)
    return q.to(dtype), k.to(dtype), torch.randn(1, 2, 24, 5, dtype=dtype)


@pytest.mark.parametrize("norm", [1.0, 5.0, 10.0, 15.0, 20.0, 25.0, 40.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_softmax_kernel_of_large_tokens(norm: float, dtype: torch.dtype) -> None:
    q, k, v = far_apart(norm, 64, dtype)
    exact = softmax_attention(*(t.double() for t in (q, k, v)))
    out = skyformer_attention(q, k, v, num_landmarks=48, gamma=0.0, kernel="softmax")
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    few = skyformer_attention(q, k, v, num_landmarks=16, kernel="softmax")
    assert (few != 0).any(-1).all()
    assert few.abs().max() < 10 * v.abs().max()
    alone = skyformer_attention(q[:, :1], k[:, :1], v[:, :1], num_landmarks=16, kernel="softmax")
    torch.testing.assert_close(few[:, :1], alone)


@pytest.mark.parametrize("twins", [False, True])
@pytest.mark.parametrize("p", [2, 8, 64])
def test_the_softmax_kernel_is_right_or_refuses(p: int, twins: bool) -> None:
    refused = 0
    for norm in (1, 3, 8, 12, 16, 20, 25, 30, 40, 60, 100, 300):
        q, k, v = far_apart(norm, p, torch.float64, twins)
        try:
            out = skyformer_attention(q, k, v, num_landmarks=48, gamma=0.0, kernel="softmax")
        except ValueError:
            refused += 1
            continue
        assert (out - softmax_attention(q, k, v)).abs().max() < 0.02, norm
    assert 1 <= refused <= 10


def test_rows_of_padding_refuse_nothing() -> None:
    q, k, v = far_apart(10.0, 8, torch.float64)
    keep = torch.arange(24) < 20
    q[..., 20:, :] *= 100  # each is its own landmark, and no other is anywhere near
    settings = {"landmarks": torch.cat([q, k], -2), "kernel": "softmax"}
    with pytest.raises(ValueError, match="8 of 48 row sums are lost"):
        skyformer_attention(q, k, v, **settings)
    out = skyformer_attention(q, k, v, **settings, query_mask=keep)
    again = skyformer_attention(q[..., :20, :], k, v, **settings)
    torch.testing.assert_close(out[..., :20, :], again)
    assert (out[..., 20:, :] == 0).all()
    none = skyformer_attention(q, k, v, torch.zeros(24, dtype=torch.bool), **settings)
    assert (none == 0).all()


def test_in_compiled_code_lost_rows_are_nan() -> None:
    q, k, v = far_apart(10.0, 8, torch.float64)
    q[..., 20:, :] *= 100
    rows = torch.cat([q, k], -2)
    attend = torch.compile(
        lambda q: skyformer_attention(q, k, v, landmarks=rows, kernel="softmax"), fullgraph=True, backend="eager"
    )
    assert (attend(q).isnan().all(-1) == (torch.arange(24) >= 20)).all()
    assert attend(q)[..., :20, :].isfinite().all()


@pytest.mark.parametrize("settings", [{}, {"compat": True}])
def test_an_empty_batch_has_its_gradients(settings):
    layer = SkyformerAttention(8, num_heads=2, **settings)
    layer(torch.randn(0, 5, 8)).sum().backward()
    assert layer.qkv.weight.grad.eq(0).all()
