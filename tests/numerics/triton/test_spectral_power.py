"""The fused spectral power against an SVD in float64: small ones in Triton's interpreter, photographs on a GPU."""

import pytest
import torch

from wellcond.numerics.fused import tokens_of, untokens
from wellcond.numerics.power_fit import folded_fit
from wellcond.numerics.spectral import floor_of
from wellcond.numerics.triton.geometry import Geometry
from wellcond.numerics.triton.spectral_power import spectral_power_in_place_layout

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # the interpreter's maximum


def fused(x, patch=None, *, epsilon=0.95, restore_scale=True):
    """Of matrices (b, n, d), or with `patch` of images."""
    if patch is None:
        n, d = x.shape[1:]
        geometry = Geometry.of_matrices(n, d)
    else:
        n, d = tokens_of(x, *patch).shape[1:]
        geometry = Geometry.of_images(*x.shape[2:], patch)
    fit = folded_fit(epsilon, floor_of("products", torch.float32, n, d))
    return spectral_power_in_place_layout(x.contiguous(), n, d, geometry, fit, restore_scale=restore_scale)


def exact(x, epsilon=0.95, restore_scale=True):
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    top = s[:, :1].clamp_min(1e-300)
    f = (s / top) ** epsilon * (top if restore_scale else 1)
    return (u * f[:, None, :]) @ vh


def matrices(values, n, d, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k = min(n, d)
    u, _ = torch.linalg.qr(torch.randn(n, k, dtype=torch.float64, generator=generator))
    v, _ = torch.linalg.qr(torch.randn(d, k, dtype=torch.float64, generator=generator))
    return ((u * torch.as_tensor(values, dtype=torch.float64)) @ v.mT).float().to(device)


def relative(got, want):
    return torch.linalg.matrix_norm(got.double() - want) / torch.linalg.matrix_norm(want)


def spectra(k):
    log_spaced = torch.logspace(0, -5, k, dtype=torch.float64)
    upper = torch.arange(k) < (k + 1) // 2
    return {
        "log-spaced to 1e-5": log_spaced,
        "two clusters, 1 and 1e-5": torch.where(upper, 1.0, 1e-5),
        "one large": torch.cat([torch.ones(1), torch.full((k - 1,), 1e-3)]),
        "equal": torch.ones(k),
    }


@pytest.mark.parametrize("shape", [(20, 44), (44, 20), (24, 24), (35, 40)], ids=str)
def test_singular_values_become_their_powers(device, shape):
    """Every spectrum in one batch: Frobenius error 6e-4 and every singular value within a hundredth."""
    values = torch.stack(list(spectra(min(shape)).values()))
    x = torch.stack([matrices(s, *shape, device, seed) for seed, s in enumerate(values)])
    got = fused(x)
    assert relative(got, exact(x)).max() < 6e-4
    s = torch.linalg.svdvals(x.double())
    want = s[:, :1] * (s / s[:, :1]) ** 0.95
    assert (torch.linalg.svdvals(got.double()) / want - 1).abs().max() < 1e-2


@pytest.mark.parametrize("epsilon", [0.5, 0.7])
def test_smaller_epsilons(device, epsilon):
    x = torch.stack([matrices(s, 20, 44, device, seed) for seed, s in enumerate(spectra(20).values())])
    got = fused(x, epsilon=epsilon)
    s = torch.linalg.svdvals(x.double())
    want = s[:, :1] * (s / s[:, :1]) ** epsilon
    assert (torch.linalg.svdvals(got.double()) / want - 1).abs().max() < 2e-2
    assert relative(got, exact(x, epsilon)).max() < 2e-3


@pytest.mark.parametrize("shape", [(20, 44), (44, 20)], ids=str)
def test_zero_singular_values_stay_small_and_zero_matrices_zero(device, shape):
    k = min(shape)
    x = torch.stack([
        matrices(torch.where(torch.arange(k) < 5, 1.0, 0.0), *shape, device),
        matrices(torch.where(torch.arange(k) < 1, 1.0, 0.0), *shape, device),
        torch.zeros(shape, device=device),
    ])  # fmt: skip
    got = fused(x)
    assert got.isfinite().all()
    assert relative(got[:2], exact(x[:2])).max() < 6e-4
    assert torch.linalg.svdvals(got[0].double())[5] < 1e-5
    assert torch.linalg.svdvals(got[1].double())[1] < 1e-5
    assert (got[2] == 0).all()


@pytest.mark.parametrize(
    ("channels", "height", "width", "patch"),
    [(2, 16, 32, (16, 16)), (3, 16, 12, (4, 4)), (1, 15, 14, (3, 7)), (2, 10, 9, (2, 3))],
)
def test_images_are_read_and_written_in_place(device, channels, height, width, patch):
    images = torch.randn(2, channels, height, width, device=device)
    got = fused(images, patch)
    assert got.shape == images.shape
    want = untokens(exact(tokens_of(images, *patch)), images.shape, *patch)
    assert relative(got.flatten(1)[:, None], want.flatten(1)[:, None]).max() < 6e-4


def test_scales_keep_apart_and_a_nan_stays_in_its_matrix(device):
    base = torch.randn(10, 14, device=device)
    scales = torch.tensor([1e-3, 1e-12, 1e12, 1.0, 1.0], device=device)
    x = base * scales[:, None, None]
    x[3, 3, 7] = torch.nan
    x[4, 0, 0] = torch.inf
    for restore_scale in (True, False):
        got = fused(x, restore_scale=restore_scale)
        assert relative(got[:3], exact(x[:3], restore_scale=restore_scale)).max() < 6e-4
        assert got[3:].isnan().all()


def test_a_matrix_does_not_see_its_batch(device):
    x = torch.randn(2, 12, 20, device=device)
    together = fused(x)
    for i in range(2):
        assert torch.equal(fused(x[i : i + 1])[0], together[i])


def test_half_precision_in_and_out(device):
    dtypes = (
        [torch.float16] if device == "cpu" else [torch.float16, torch.bfloat16]
    )  # the interpreter's bfloat16 is wrong
    for dtype in dtypes:
        x = torch.randn(2, 14, 22, device=device).to(dtype)
        got = fused(x)
        assert got.dtype == dtype
        assert relative(got, exact(x)).max() < 6e-4 + torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("patch", [16, 4])
@pytest.mark.parametrize("epsilon", [0.5, 0.7, 0.9, 0.95, 0.97])
def test_photographs(device, photographs, patch, epsilon):
    images = photographs.to(device)
    tokens = tokens_of(images, patch, patch)
    s = torch.linalg.svdvals(tokens.double())
    got = tokens_of(fused(images, (patch, patch), epsilon=epsilon), patch, patch)
    values = torch.linalg.svdvals(got.double())
    want = s[:, :1] * (s / s[:, :1]) ** epsilon
    assert ((values[:, 0] / values[:, -1]) / (s[:, 0] / s[:, -1]) ** epsilon - 1).abs().max() < 0.02
    assert (values / want - 1).abs()[s > 1e-5 * s[:, :1]].max() < 0.02
    assert relative(got, exact(tokens, epsilon)).max() < 1e-3


@pytest.mark.gpu
def test_more_matrices_than_one_chunk(device):
    x = torch.randn(600, 20, 24, device=device)
    assert relative(fused(x), exact(x)).max() < 6e-4
