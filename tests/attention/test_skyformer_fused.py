"""Skyformer's fused path, in the interpreter or on a GPU, against the formula in float64 and its autograd."""

import math

import pytest
import torch

from wellcond.attention.skyformer_fused import can_fuse, fused_skyformer
from wellcond.numerics.gaussian import gaussian_weights

SHAPES = [(1, 2, 70, 70, 16, 16, 20), (2, 1, 33, 90, 8, 12, 32), (1, 1, 5, 7, 4, 4, 3)]


def exact(q, k, v, rows, keep, scale, gamma):
    weights = gaussian_weights(rows, k, scale=scale)
    if keep is not None:
        weights = weights * keep[..., None, :]
    kernel = gaussian_weights(rows, rows, scale=scale) + gamma * torch.eye(rows.shape[-2], dtype=rows.dtype).to(
        rows.device
    )
    return gaussian_weights(q, rows, scale=scale) @ torch.linalg.solve(kernel, weights @ v)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_value_and_gradients(shape, masked, device):
    b, h, n, m, p, c, d = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((b, h, n, p), (b, h, m, p), (b, h, m, c), (b, h, d, p))
    tensors = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in sizes]
    keep = (torch.rand(b, 1, m, generator=generator) > 0.3).to(device).expand(b, h, m) if masked else None
    scale = 1 / math.sqrt(p)
    out = fused_skyformer(*tensors, keep, scale=scale, gamma=0.1)
    weight = torch.randn(out.shape, generator=generator).to(device)
    gradients = torch.autograd.grad((out * weight).sum(), tensors)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = exact(*wide, keep, scale, 0.1)
    truth = torch.autograd.grad((want * weight.double()).sum(), wide)
    for one, other in zip((out, *gradients), (want, *truth), strict=True):
        assert (one.double() - other).norm() < 1e-4 * other.norm()


def test_only_where_the_kernels_can():
    q = torch.randn(1, 2, 10, 8)
    assert not can_fuse(q, q, q, gamma=0.1)  # on a CPU


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-4), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_on_a_gpu(dtype, tolerance):
    q, k, v = (torch.randn(4, 2, 1000, 32, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    rows = torch.cat([q[:, :, ::16], k[:, :, ::16]], 2)[:, :, :128]
    assert can_fuse(q, v, rows, gamma=0.1)
    out = fused_skyformer(q, k, v, rows, None, scale=32**-0.5, gamma=0.1)
    weight = torch.randn_like(out)
    gradients = torch.autograd.grad((out * weight).sum(), (q, k, v))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    landmarks = torch.cat([wide[0][:, :, ::16], wide[1][:, :, ::16]], 2)[:, :, :128]
    want = exact(*wide, landmarks, None, 32**-0.5, 0.1)
    truth = torch.autograd.grad((want * weight.double()).sum(), wide)
    for one, other in zip((out, *gradients), (want, *truth), strict=True):
        assert (one.double() - other).norm() < tolerance * other.norm()
