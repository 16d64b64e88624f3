"""Linear layers by float16 parts: as exact as float32, on any scale of rows, and taken only where they may be."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from wellcond.numerics import split_linear as module
from wellcond.numerics.split_linear import linear_by_parts, split_linear


def error(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> float:
    """Root mean square against float64, in units of ‖x‖·‖w‖."""
    truth = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    unit = x.double().norm(dim=-1, keepdim=True) * weight.double().norm(dim=-1)
    return float(((y.double() - truth) / unit).square().mean().sqrt())


def layer(k: int, m: int, rows: int, device: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, k, device=device) * torch.logspace(-6, 6, rows, device=device)[:, None]
    x[:, 3] *= 300  # an outlier channel, as transformers have
    return x, torch.randn(m, k, device=device) * torch.logspace(-3, 0, m, device=device)[:, None]


@pytest.mark.parametrize("k", [8, 64, 192, 768, 3072])
def test_it_is_as_exact_as_float32(k, device):
    x, weight = layer(k, 48, 200, device)
    ours = error(split_linear(x, weight), x, weight, None)
    assert ours < 1.2 * error(F.linear(x, weight), x, weight, None) + 2e-8
    assert ours < 1e-7


def test_the_bias_the_shape_and_strides(device):
    x, weight = layer(64, 24, 35, device)
    bias = torch.randn(24, device=device)
    for given in (x.view(5, 7, 64), x.T.contiguous().T, x[::5]):
        y = split_linear(given, weight, bias)
        assert y.shape == (*given.shape[:-1], 24)
        torch.testing.assert_close(
            y.double(), F.linear(given.double(), weight.double(), bias.double()), rtol=1e-5, atol=1e-5
        )


def test_zeros_tiny_and_huge_rows_and_what_is_not_finite(device):
    x = torch.randn(6, 64, device=device)
    x[1], x[2], x[3] = 0.0, x[2] * 1e-30, x[3] * 1e30
    x[4, 5], x[5, 7] = torch.nan, torch.inf
    weight = torch.randn(16, 64, device=device)
    y = split_linear(x, weight)
    truth = F.linear(x.double(), weight.double())
    assert torch.equal(y[1], torch.zeros_like(y[1]))
    torch.testing.assert_close(y[:4].double(), truth[:4], rtol=1e-4, atol=0.0)
    assert not y[4:].isfinite().any()


def test_long_sums_are_cut_into_equal_parts():
    for k in (8, 64, 192, 768, 1000, 3072, 4096):
        parts = module._parts(k)
        assert k % parts == 0
        assert k // parts <= module.CHUNK or parts == 1
    assert module._parts(3072) == 8


def test_a_cpu_keeps_its_own_product():
    x, weight = torch.randn(512, 1024), torch.randn(512, 1024)
    with torch.no_grad(), linear_by_parts():
        assert torch.equal(F.linear(x, weight), x @ weight.T) or torch.allclose(F.linear(x, weight), x @ weight.T)
    assert not module._suits(x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize(("k", "m"), [(768, 2304), (3072, 768), (192, 576)])
def test_on_a_gpu_it_is_no_less_exact_than_the_librarys_float32(k, m):
    x, weight = layer(k, m, 4096, "cuda")
    bias = torch.randn(m, device="cuda")
    plain = F.linear(x, weight, bias)
    with torch.no_grad(), linear_by_parts():
        ours = F.linear(x, weight, bias)
    assert not torch.equal(ours, plain)  # else it was not taken
    assert error(ours, x, weight, bias) <= 1.05 * error(plain, x, weight, bias)


@pytest.mark.gpu
def test_it_is_taken_only_where_it_may_be():
    x, weight = torch.randn(4096, 768, device="cuda"), nn.Parameter(torch.randn(768, 768, device="cuda"))
    with torch.no_grad():
        assert module._suits(x, weight)
        assert not module._suits(x[:4], weight)
        assert not module._suits(x.half(), weight)
        assert not module._suits(x.double(), weight.double())
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert not module._suits(x, weight)
    assert not module._suits(x, weight)  # a gradient may be asked for


@pytest.mark.parametrize("settings", [{}, {"padding": "valid"}, {"bias": False}])
def test_patches_side_by_side_are_a_linear_layer(settings, device, monkeypatch):
    monkeypatch.setattr(module, "_suits", lambda *_: True)
    conv = nn.Conv2d(3, 16, (4, 8), stride=(4, 8), **settings).to(device)
    images = torch.randn(2, 3, 12, 16, device=device)
    with torch.no_grad():
        plain = conv(images)
        with linear_by_parts():
            ours = conv(images)
    assert not torch.equal(ours, plain)  # else it was not taken
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv2d(3, 8, 4, stride=2),
        nn.Conv2d(3, 8, 4, stride=4, padding=2),
        nn.Conv2d(3, 6, 4, stride=4, groups=3),
        nn.Conv2d(3, 8, 2, stride=2, dilation=2),
        nn.Conv2d(3, 8, 5, stride=5),
    ],
)
def test_other_convolutions_are_left_alone(conv, monkeypatch):
    monkeypatch.setattr(module, "_suits", lambda *_: True)
    images = torch.randn(2, 3, 12, 16)
    with torch.no_grad(), linear_by_parts():
        ours = conv(images)
    assert torch.equal(ours, conv(images))
