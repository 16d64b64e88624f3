"""Solves and inverses against float64 truth, and the laws that the iteration obeys."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wellcond.numerics.inverse import invert_by_iteration, normalize_spd, solve_spd, transposed_start


def spd(*lead: int, d: int = 12, gamma: float = 0.1, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Gaussian kernel matrices plus γI."""
    x = torch.randn(*lead, d, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return ((-torch.cdist(x, x).square() / 2).exp() + gamma * torch.eye(d, dtype=torch.float64)).to(dtype)


@given(d=st.integers(1, 20), c=st.integers(1, 7), b=st.integers(0, 3), seed=st.integers(0, 99))
def test_solve_solves(d: int, c: int, b: int, seed: int) -> None:
    w = spd(b, d=d, seed=seed)
    u = torch.randn(b, d, c, dtype=torch.float64)
    y = solve_spd(w, u, smallest=0.1)
    torch.testing.assert_close(w @ y, u, rtol=1e-10, atol=1e-10)
    y32 = solve_spd(w.float(), u.float(), smallest=0.1)
    assert y32.dtype == torch.float32
    torch.testing.assert_close(y32.double(), y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("smallest", [0.1, 1e-6, 0.0])
def test_solve_keeps_its_accuracy_as_the_smallest_eigenvalue_falls(smallest: float) -> None:
    values = torch.logspace(0, -7 if smallest < 0.1 else -1, 10, dtype=torch.float64).clamp_min(smallest)
    basis = torch.linalg.qr(torch.randn(10, 10, dtype=torch.float64)).Q
    w, y = basis * values @ basis.mT, torch.randn(10, 2, dtype=torch.float64)
    torch.testing.assert_close(solve_spd(w, w @ y, smallest=smallest), y, rtol=1e-6, atol=1e-6)


def test_a_singular_matrix_gets_its_pseudo_inverse() -> None:
    x = torch.randn(8, 3, dtype=torch.float64)
    w, u = x @ x.mT, torch.randn(8, 2, dtype=torch.float64)
    torch.testing.assert_close(solve_spd(w, u, smallest=0.0), torch.linalg.pinv(w, hermitian=True) @ u)


@pytest.mark.parametrize("smallest", [0.1, 0.0])
def test_solve_gradients(smallest: float) -> None:
    root = torch.randn(2, 5, 5, dtype=torch.float64, requires_grad=True)
    u = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)

    def solved(root: Tensor, u: Tensor) -> Tensor:
        return solve_spd(root @ root.mT + torch.eye(5, dtype=torch.float64), u, smallest=smallest)

    assert torch.autograd.gradcheck(solved, (root, u), check_forward_ad=True, check_batched_grad=False)


def test_solve_in_half_precision_and_autocast_is_float32() -> None:
    w, u = spd(dtype=torch.float32), torch.randn(12, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = solve_spd(w, u, smallest=0.1), invert_by_iteration(w / 8), normalize_spd(w)[0]
    outside = solve_spd(w, u, smallest=0.1), invert_by_iteration(w / 8), normalize_spd(w)[0]
    for a, b in zip(inside, outside, strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)
    assert solve_spd(w.bfloat16(), u.bfloat16(), smallest=0.1).dtype == torch.float32


@pytest.mark.parametrize("smallest", [0.1, 0.0])
def test_a_nan_stays_a_nan_and_in_its_own_matrix(smallest: float) -> None:
    w, u = spd(3), torch.randn(3, 12, 2, dtype=torch.float64)
    good = solve_spd(w, u, smallest=smallest)
    w[1, 4, 4] = torch.nan
    bad = solve_spd(w, u, smallest=smallest)
    assert bad[1].isnan().all()
    assert torch.equal(bad[[0, 2]], good[[0, 2]])


def test_normalised_spectrum_ends_at_one() -> None:  # Lemma 3, with the correction that the largest is 1
    w = spd(4, d=30)
    n, r = normalize_spd(w)
    values = torch.linalg.eigvalsh(n)
    torch.testing.assert_close(values[:, -1], torch.ones(4, dtype=torch.float64), rtol=0, atol=1e-12)
    assert (values[:, 0] >= 0.1 / w.sum(-1).amax(-1)).all()
    assert (torch.linalg.matrix_norm(torch.eye(30, dtype=torch.float64) - n, 2) < 1).all()
    torch.testing.assert_close(n / r[..., :, None] / r[..., None, :], w)


@pytest.mark.parametrize("from_transpose", [False, True])
def test_the_residual_law(from_transpose: bool) -> None:
    n = normalize_spd(spd(3))[0]
    start = transposed_start(n) if from_transpose else None
    eye = torch.eye(12, dtype=torch.float64)
    for steps in range(4):
        r = eye - n @ invert_by_iteration(n, num_iterations=steps, start=start)
        after = eye - n @ invert_by_iteration(n, num_iterations=steps + 1, start=start)
        torch.testing.assert_close(after, r @ r @ r @ (3 * eye + r) / 4, rtol=1e-9, atol=1e-11)


def test_iteration_converges_to_the_inverse_and_to_the_pseudo_inverse() -> None:
    n = normalize_spd(spd(3))[0]
    torch.testing.assert_close(invert_by_iteration(n, num_iterations=8), torch.linalg.inv(n))
    a = torch.randn(2, 4, 7, dtype=torch.float64)
    found = invert_by_iteration(a, num_iterations=15, start=transposed_start(a))
    torch.testing.assert_close(found, torch.linalg.pinv(a))


def test_iteration_is_a_filter() -> None:
    # What six steps from N/c leave of an eigenvalue, λ·f(λ), for c = 1.1
    for eigenvalue, left in ((0.3, 1.0), (0.1, 1.0), (0.03, 0.61), (0.01, 0.10), (0.003, 0.01)):
        n = torch.tensor([[eigenvalue]], dtype=torch.float64)
        assert float(n * invert_by_iteration(n, start=n / 1.1)) == pytest.approx(left, abs=0.02)


def test_a_shared_start_couples_the_batch_and_the_other_does_not() -> None:
    small, large = torch.randn(1, 5, 5), 10 * torch.randn(1, 5, 5)
    both = torch.cat([small, large])
    assert torch.equal(transposed_start(both)[:1], transposed_start(small))
    assert not torch.allclose(transposed_start(both, shared=True)[:1], transposed_start(small, shared=True))


def test_iteration_gradients() -> None:
    root = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def inverted(root: Tensor) -> Tensor:
        n = normalize_spd((root @ root.mT).abs() + 3 * torch.eye(4, dtype=torch.float64))[0]
        return invert_by_iteration(n, num_iterations=3)

    assert torch.autograd.gradcheck(inverted, (root,), check_forward_ad=True)


@pytest.mark.parametrize(
    ("start", "shape"),
    [("identity", (4, 4)), ("identity", (2, 3, 3))]
    + [(start, shape) for start in ("transpose", "free") for shape in ((4, 4), (2, 3, 3), (2, 2, 4), (2, 4, 2))],
    ids=str,
)
def test_iteration_gradients_from_every_start(start: str, shape: tuple[int, ...]) -> None:
    a = (torch.randn(*shape, dtype=torch.float64) / 4 + torch.eye(*shape[-2:], dtype=torch.float64)).requires_grad_()
    z = (torch.randn(*a.mT.shape, dtype=torch.float64) / 9).requires_grad_()

    def inverted(a: Tensor, z: Tensor) -> Tensor:
        begin = {"identity": None, "transpose": transposed_start(a), "free": z}[start]
        return invert_by_iteration(a, num_iterations=3, start=begin)

    assert torch.autograd.gradcheck(inverted, (a, z), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(inverted, (a, z))


def test_iteration_gradients_of_one_factor_alone() -> None:
    a, z = (torch.randn(2, 3, 3, dtype=torch.float64) / 4 for _ in range(2))
    for wanted in (a, z):
        wanted.requires_grad_()
        assert torch.autograd.gradcheck(lambda a, z: invert_by_iteration(a, num_iterations=2, start=z), (a, z))
        wanted.requires_grad_(False)


@pytest.mark.parametrize("from_transpose", [False, True])
def test_iteration_is_its_formula(from_transpose: bool) -> None:
    n = normalize_spd(spd(3, 2))[0].requires_grad_()
    start = transposed_start(n) if from_transpose else None
    eye = torch.eye(12, dtype=torch.float64)
    z = eye if start is None else start
    for _ in range(6):
        nz = n @ z
        z = z @ (13 * eye - nz @ (15 * eye - nz @ (7 * eye - nz))) / 4
    found = invert_by_iteration(n, start=start)
    torch.testing.assert_close(found, z, rtol=1e-9, atol=1e-9)
    over = torch.randn_like(z)
    expected = torch.autograd.grad(z, n, over, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(found, n, over), expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("from_transpose", [False, True])
def test_iteration_compiles_whole(from_transpose: bool) -> None:
    torch.compiler.reset()

    def inverted(n: Tensor) -> Tensor:
        return invert_by_iteration(n, num_iterations=3, start=transposed_start(n) if from_transpose else None)

    n = normalize_spd(spd(2, d=5))[0].requires_grad_()
    compiled = torch.compile(inverted, backend="aot_eager", fullgraph=True)(n)
    torch.testing.assert_close(compiled, inverted(n))
    over = torch.randn_like(compiled)
    torch.testing.assert_close(torch.autograd.grad(compiled, n, over), torch.autograd.grad(inverted(n), n, over))


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="expected"):
        solve_spd(torch.eye(3), torch.ones(4, 1), smallest=1.0)
    with pytest.raises(ValueError, match="transposed_start"):
        invert_by_iteration(torch.ones(3, 4))
    with pytest.raises(ValueError, match="num_iterations"):
        invert_by_iteration(torch.eye(3), num_iterations=-1)


def solve_with_itself(matrix):
    return solve_spd(matrix, matrix.square(), smallest=0.1)


def iterate_from_its_transpose(matrix):
    return invert_by_iteration(matrix, num_iterations=4, start=transposed_start(matrix))


@pytest.mark.parametrize("invert", [solve_with_itself, iterate_from_its_transpose])
def test_a_compiled_gradient_stays_wide_under_autocast(invert):
    """Compilers run the backward pass under the autocast around the call, though ours is off inside."""
    a = torch.randn(2, 16, 16)
    spd = a @ a.mT / 8 + torch.eye(16) / 2
    torch.compiler.reset()
    compiled = torch.compile(invert, backend="aot_eager", fullgraph=True)
    x, wide = spd.clone().requires_grad_(), spd.double().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = compiled(x)
    weight = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, x, weight)
    (want,) = torch.autograd.grad(invert(wide), wide, weight.double())
    assert (found - want).norm() < 1e-5 * want.norm()
