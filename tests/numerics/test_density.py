"""The estimated distribution against all singular values."""

import torch
from torch import Tensor
from torch.testing import assert_close

from wellcond.numerics.density import SpectralDensity, spectral_density
from wellcond.numerics.linearize import Linearization


def matrix(a: Tensor) -> Linearization:
    return Linearization(lambda x: a @ x, torch.zeros(a.shape[1], dtype=a.dtype))


def with_singular_values(sigma: Tensor, m: int, n: int) -> Tensor:
    u = torch.linalg.qr(torch.randn(m, m, dtype=torch.float64)).Q[:, : len(sigma)]
    v = torch.linalg.qr(torch.randn(n, n, dtype=torch.float64)).Q[:, : len(sigma)]
    return u * sigma @ v.mT


def log_uniform(count: int = 150) -> tuple[Tensor, Linearization]:
    sigma = torch.logspace(0, -3, count, dtype=torch.float64)
    return sigma, matrix(with_singular_values(sigma, count, count + 30))


def test_moments_lie_within_the_error() -> None:
    sigma, operator = log_uniform()
    density = spectral_density(operator, probes=30, steps=40)
    truth = sigma.square().sum()
    assert_close(density.weights.sum(-1), torch.ones(30, dtype=torch.float64))
    value, error = density.frobenius_squared()
    assert (value - truth).abs() < 3 * error
    assert error < 0.2 * truth
    value, error = density.expectation(lambda s: s**4)
    assert (value - (sigma**4).mean()).abs() < 3 * error


def test_the_error_falls_with_the_probes() -> None:
    _, operator = log_uniform()
    few, many = (spectral_density(operator, probes=probes, steps=20).frobenius_squared()[1] for probes in (4, 64))
    assert many < few
    assert spectral_density(operator, probes=1, steps=20).frobenius_squared()[1].isnan()


def test_a_probe_is_exact_along_its_direction() -> None:
    """A Gauss rule of few nodes has the first moments to the last bits: ‖Aᵀz‖² for the z it started from."""
    _, operator = log_uniform()
    density = spectral_density(operator, probes=1, steps=5, seed=7)
    z = torch.randn(150, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    z /= z.norm()
    a = operator.matrix()
    gram = a @ a.mT
    for power in (1, 2, 3):
        moment = (density.weights * density.nodes ** (2 * power)).sum()
        assert_close(moment, z @ torch.linalg.matrix_power(gram, power) @ z, rtol=1e-12, atol=0)


def test_quantiles_and_cumulative_shares() -> None:
    sigma, operator = log_uniform()
    density = spectral_density(operator, probes=30, steps=60)
    shares = torch.tensor([0.5, 0.6, 0.75, 0.9], dtype=torch.float64)  # above σmax/60, which 60 steps resolve
    found, truth = density.quantile(shares), torch.quantile(sigma, shares)
    assert (found.log() - truth.log()).abs().max() < 0.15  # of a log σ that spans 6.9
    value, error = density.cumulative(truth)
    assert ((value - shares).abs() < 4 * error + 0.01).all()
    ends, _ = density.cumulative(torch.tensor([0.0, 2.0], dtype=torch.float64))
    assert_close(ends, torch.tensor([0.0, 1.0], dtype=torch.float64))
    outermost = density.quantile(torch.tensor([0.0, 1.0]))
    assert torch.equal(outermost, torch.stack([density.nodes.min(), density.nodes.max()]))


def test_a_single_node_is_every_quantile() -> None:
    density = spectral_density(matrix(torch.full((1, 4), 0.5, dtype=torch.float64)), probes=1)
    assert_close(density.quantile(torch.tensor([0.0, 0.5, 1.0])), torch.ones(3, dtype=torch.float64))


def test_batches_are_kept_apart() -> None:
    parts = [spectral_density(matrix(scale * torch.randn(30, 40, dtype=torch.float64))) for scale in (1.0, 10.0)]
    both = SpectralDensity(
        nodes=torch.stack([p.nodes for p in parts]), weights=torch.stack([p.weights for p in parts]), count=30
    )
    grid = torch.tensor([1.0, 5.0, 20.0], dtype=torch.float64)
    for i, part in enumerate(parts):
        assert_close(both.quantile(torch.tensor([0.3, 0.6]))[i], part.quantile(torch.tensor([0.3, 0.6])))
        assert_close(both.cumulative(grid)[0][i], part.cumulative(grid)[0])
        assert_close(both.frobenius_squared()[0][i], part.frobenius_squared()[0])


def test_the_same_seed_gives_the_same_bits() -> None:
    _, operator = log_uniform(40)
    first, again, other = (spectral_density(operator, probes=2, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.nodes, again.nodes)
    assert not torch.equal(first.weights, other.weights)
