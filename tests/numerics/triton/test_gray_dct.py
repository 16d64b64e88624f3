"""Fused DCT graying against the formula in float64: small images in Triton's interpreter, photographs on a GPU."""

import pytest
import torch

from wellcond.numerics.dct import dct_power
from wellcond.numerics.fused import tokens_of, untokens
from wellcond.numerics.triton import gray_dct
from wellcond.numerics.triton.geometry import Geometry

pytestmark = pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # the interpreter's maximum


def fused(x, patch=None, *, epsilon=0.95, restore_scale=True):
    """Of matrices (b, n, d), or with `patch` of images."""
    if patch is None:
        n, d = x.shape[1:]
        geometry = Geometry.of_matrices(n, d)
    else:
        n, d = tokens_of(x, *patch).shape[1:]
        geometry = Geometry.of_images(*x.shape[2:], patch)
    return gray_dct.gray_dct_images(x.contiguous(), n, d, geometry, epsilon, restore_scale=restore_scale)


def exact(x, patch=None, *, epsilon=0.95, restore_scale=True):
    if patch is None:
        return dct_power(x.double(), epsilon, restore_scale=restore_scale)
    tokens = dct_power(tokens_of(x.double(), *patch), epsilon, restore_scale=restore_scale)
    return untokens(tokens, x.shape, *patch)


def relative(got, want):
    error = (got.double() - want).flatten(1)
    return error.norm(dim=1) / want.flatten(1).norm(dim=1)


@pytest.mark.parametrize(
    ("channels", "height", "width", "patch"),
    [(3, 32, 48, (16, 16)), (3, 12, 20, (4, 4)), (1, 15, 14, (3, 7)), (2, 10, 9, (2, 3)), (3, 4, 4, (4, 4))],
)
def test_images(device, channels, height, width, patch):
    images = torch.randn(2, channels, height, width, device=device) + 0.5
    got = fused(images, patch)
    assert (got.shape, got.dtype) == (images.shape, images.dtype)
    assert relative(got, exact(images, patch)).max() < 1e-3


@pytest.mark.parametrize("shape", [(7, 9), (9, 7), (17, 40), (1, 5), (5, 1), (33, 33)], ids=str)
def test_matrices(device, shape):
    x = torch.randn(2, *shape, device=device)
    assert relative(fused(x), exact(x)).max() < 1e-3


def test_scales_keep_apart_zero_stays_zero_and_a_nan_stays_in_its_image(device):
    base = torch.randn(3, 8, 8, device=device)
    scales = torch.tensor([1e-3, 1.0, 1e4, 0.0, 1.0, 1.0], device=device)
    x = base * scales[:, None, None, None]
    x[4, 1, 3, 3] = torch.nan
    x[5, 0, 0, 0] = torch.inf
    for restore_scale in (True, False):
        got = fused(x, (4, 4), restore_scale=restore_scale)
        assert relative(got[:3], exact(x[:3], (4, 4), restore_scale=restore_scale)).max() < 1e-3
        assert (got[3] == 0).all()
        assert got[4:].isnan().all()


def test_tokens_of_very_different_sizes_in_one_image(device):
    x = torch.randn(1, 12, 24, device=device) * torch.logspace(-4, 4, 12, device=device)[:, None]
    assert relative(fused(x), exact(x)).max() < 1e-3


@pytest.mark.parametrize("epsilon", [0.9, 0.97, 1.0])
def test_other_epsilons(device, epsilon):
    x = torch.randn(2, 11, 26, device=device)
    assert relative(fused(x, epsilon=epsilon), exact(x, epsilon=epsilon)).max() < 1e-3


def test_an_image_does_not_see_its_batch(device):
    images = torch.randn(3, 3, 8, 12, device=device)
    together = fused(images, (4, 4))
    for i in range(3):
        assert torch.equal(fused(images[i : i + 1], (4, 4))[0], together[i])


def test_half_precision_in_and_out(device):
    dtypes = (
        [torch.float16] if device == "cpu" else [torch.float16, torch.bfloat16]
    )  # the interpreter's bfloat16 is wrong
    for dtype in dtypes:
        images = torch.randn(2, 3, 8, 8, device=device).to(dtype)
        got = fused(images, (4, 4))
        assert got.dtype == dtype
        assert relative(got, exact(images, (4, 4))).max() < 1e-3 + torch.finfo(dtype).eps


@pytest.mark.gpu
@pytest.mark.parametrize("patch", [16, 4])
@pytest.mark.parametrize("epsilon", [0.9, 0.95, 0.97])
def test_photographs(device, photographs, patch, epsilon):
    images = photographs.to(device)
    got = fused(images, (patch, patch), epsilon=epsilon)
    assert relative(got, exact(images, (patch, patch), epsilon=epsilon)).max() < 1e-3


@pytest.mark.parametrize("images_at_once", [1, 2])
def test_a_batch_too_large_for_one_chunk(device, monkeypatch, images_at_once):
    images = torch.randn(3, 3, 8, 12, device=device)
    whole = fused(images, (4, 4))
    in_flight = 4 * ((6 + 31) // 2) * ((48 + 31) // 2)  # both sides of 6 × 48 are padded
    monkeypatch.setattr(gray_dct, "LARGEST_CHUNK", images_at_once * in_flight)
    assert torch.equal(fused(images, (4, 4)), whole)
