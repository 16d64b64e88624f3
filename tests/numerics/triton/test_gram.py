"""Gram matrices against torch's in float64, and the largest eigenvalue against LAPACK's."""

import pytest
import torch

from wellcond.numerics.fused import tokens_of
from wellcond.numerics.triton.geometry import Geometry
from wellcond.numerics.triton.gram import gram, largest_eigenvalue

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # the interpreter's maximum


def gram_in_float64(tokens):
    tokens = tokens.double()
    return tokens @ tokens.mT if tokens.shape[-2] <= tokens.shape[-1] else tokens.mT @ tokens


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (33, 40), (50, 33), (32, 32), (1, 7), (7, 1)], ids=str)
def test_gram_of_matrices(device, shape):
    x = torch.randn(2, *shape, device=device)
    m = min(shape)
    got = gram(x, *shape, Geometry.of_matrices(*shape))[:, :m, :m]
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, gram_in_float64(x), rtol=1e-13, atol=1e-13)
    assert torch.equal(got, got.mT)


@pytest.mark.parametrize(
    ("channels", "height", "width", "patch"),
    [(3, 16, 24, (8, 8)), (3, 12, 20, (4, 4)), (1, 15, 14, (3, 7)), (2, 8, 16, (8, 2))],
)
def test_gram_of_images(device, channels, height, width, patch):
    images = torch.randn(2, channels, height, width, device=device)
    tokens = tokens_of(images, *patch)
    n, d = tokens.shape[1:]
    got = gram(images, n, d, Geometry.of_images(height, width, patch))[:, : min(n, d), : min(n, d)]
    torch.testing.assert_close(got, gram_in_float64(tokens), rtol=1e-13, atol=1e-13)


def test_gram_keeps_scales_apart_and_a_nan_in_its_image(device):
    x = torch.randn(4, 6, 10, device=device)
    x[1] *= 1e-15
    x[2] *= 1e15
    x[3, 2, 2] = torch.nan
    got = gram(x, 6, 10, Geometry.of_matrices(6, 10))[:, :6, :6]
    torch.testing.assert_close(got[:3], gram_in_float64(x[:3]), rtol=1e-13, atol=0)
    assert got[3, 2].isnan().all()


def padded_into(g, ld=32):
    out = g.new_zeros(g.shape[0], ld, ld)
    out[:, : g.shape[1], : g.shape[2]] = g
    return out


def with_eigenvalues(values, device):
    values = torch.as_tensor(values, dtype=torch.float64)
    q, _ = torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))
    return ((q * values) @ q.mT).to(device)


def test_the_largest_eigenvalue(device):
    m = 20
    spread = torch.logspace(0, -8, m, dtype=torch.float64)
    g = torch.stack([
        with_eigenvalues(spread, device),
        with_eigenvalues(torch.ones(m), device),  # every vector is an eigenvector
        with_eigenvalues([1.0, 1.0, *[0.0] * (m - 2)], device),
        with_eigenvalues([1.0, 0.999, *spread[2:]], device),  # a pair that power iteration cannot tell apart
        with_eigenvalues(spread, device) * 1e-30,
        with_eigenvalues(spread, device) * 1e30,
        torch.zeros(m, m, dtype=torch.float64, device=device),
    ])  # fmt: skip
    got, _ = largest_eigenvalue(padded_into(g), m)
    want = torch.linalg.eigvalsh(g)[:, -1]
    assert got.dtype == torch.float64
    assert got[-1] == 0
    # An error δ here moves every singular value by (1 − ε)/2 · δ only.
    assert (got[:-1] / want[:-1] - 1).abs().max() < 1e-3


@pytest.mark.parametrize("m", [1, 2, 31, 33, 64])
def test_the_largest_eigenvalue_at_any_size(device, m):
    x = torch.randn(2, m, m + 3, dtype=torch.float64, device=device)
    g = x @ x.mT
    got, _ = largest_eigenvalue(padded_into(g, -(-m // 32) * 32), m)
    assert (got / torch.linalg.eigvalsh(g)[:, -1] - 1).abs().max() < 1e-3


def test_no_vector_hides_from_the_starts(device):
    """Orthogonal to all of them before they are rounded to float16, which is what shows it."""
    place = torch.arange(64)[:, None] * 16 + torch.arange(16)
    starts = (0.1 + 0.05 * torch.cos(place.float() * 12.9898 + 0.7)).double()
    basis = torch.linalg.qr(torch.cat([starts, torch.randn(64, 48, dtype=torch.float64)], 1))[0]
    basis[:, :-1] @= torch.linalg.qr(torch.randn(63, 63, dtype=torch.float64))[0]
    for top in (1.1, 2.0):
        values = torch.linspace(0.2, 0.1, 64, dtype=torch.float64)
        values[0], values[-1] = 1.0, top
        got, _ = largest_eigenvalue(padded_into((basis * values @ basis.mT)[None].to(device), 64), 64)
        assert got.item() == pytest.approx(top, rel=1e-3)


def test_a_nan_stays_in_its_matrix(device):
    g = torch.eye(10, dtype=torch.float64, device=device).repeat(3, 1, 1)
    g[1, 4, 4] = torch.nan
    got, _ = largest_eigenvalue(padded_into(g), 10)
    assert (got[[0, 2]] - 1).abs().max() < 1e-3
