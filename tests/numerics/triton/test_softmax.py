"""Softmax attention with dropout and masks of keys, in the interpreter or on a GPU, against float64 written out."""

import pytest
import torch
from torch.overrides import BaseTorchFunctionMode

from wellcond.attention import softmax_fused
from wellcond.attention.softmax_fused import fused_softmax
from wellcond.numerics.fastpaths import tokens_like
from wellcond.numerics.triton.softmax import backward, forward

SHAPES = [  # batch, heads, queries, keys, width, values
    (1, 2, 70, 50, 8, 8),
    (2, 1, 20, 200, 16, 5),
    (1, 1, 1, 1, 4, 4),
    (1, 1, 130, 130, 20, 32),
    (1, 1, 128, 128, 32, 32),  # whole tiles
    (1, 1, 65, 33, 64, 40),
]


def made(shape, device, dtype=torch.float32, seed=0):
    b, h, n, m, p, c = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((b, h, n, p), (b, h, m, p), (b, h, m, c))
    return [torch.randn(s, generator=generator).to(device, dtype).requires_grad_() for s in sizes]


def number(value, device):
    return torch.tensor([value], device=device)


def exact(q, k, v, keep, scale, stays=None, p=0.0):
    """In the dtype of the tensors; zeros without keys."""
    logits = q @ k.mT * scale
    if keep is not None:
        logits = logits.masked_fill(~keep[:, :, None], -torch.inf)
    weights = logits.softmax(-1).nan_to_num(0.0)
    return (weights if stays is None else weights * stays / (1 - p)) @ v


def check(tensors, keep, scale, tolerance, seed=None, p=0.0, stays=None):
    """Value and gradients of the kernels against float64."""
    out = fused_softmax(*tensors, keep, p, scale, seed=seed)
    g = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    found = torch.autograd.grad(out, tensors, g)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = exact(*wide, keep, scale, stays, p)
    truth = torch.autograd.grad(want, wide, g.double())
    for one, other in zip((out, *found), (want, *truth), strict=True):
        assert one.shape == other.shape
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm() + 1e-6
    return out, found


def stays_of(seed, p, b, h, n, m):
    """Which weights stay, seen through values that are unit vectors, 32 keys at a time."""
    device = seed.device
    parts = []
    for first in range(0, m, 32):
        v = torch.zeros(b, h, m, 32, device=device)
        count = min(32, m - first)
        v[:, :, first : first + count, :count] = torch.eye(count, device=device)
        q, k = torch.zeros(b, h, n, 4, device=device), torch.zeros(b, h, m, 4, device=device)
        parts.append(fused_softmax(q, k, v, None, p, 1.0, seed=seed)[..., :count])
    weights = torch.cat(parts, -1) * m * (1 - p)
    stays = weights > 0.5
    torch.testing.assert_close(weights, stays.float(), rtol=1e-5, atol=1e-6)
    return stays


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_product_and_gradient(shape, masked, device):
    tensors = made(shape, device)
    b, _, _, m, *_ = shape
    keep = None
    if masked:
        keep = torch.rand(b, 1, m, generator=torch.Generator().manual_seed(1)) > 0.4
        keep[:, :, m // 3] = True
        keep = keep.to(device)
    check(tensors, keep, 0.3, 2e-6)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_half_precision(shape, device):
    check(made(shape, device, torch.float16), None, 0.3, 2e-3)


def test_masks_of_any_kind(device):
    """Holes, whole tiles of them, ends in the middle of a tile, samples without a key, a mask by head, one for all."""
    tensors = made((4, 2, 40, 300, 8, 8), device)
    keep = torch.rand(4, 1, 300, generator=torch.Generator().manual_seed(1)) > 0.3
    keep[0, :, :150] = False
    keep[1, :, 77:] = False
    keep[2] = False
    keep[3, :, 20:280] = False
    keep = keep.to(device)
    out, found = check(tensors, keep, 0.3, 2e-6)
    assert (out[2] == 0).all()
    assert all((t[2] == 0).all() for t in found)
    assert all((t.masked_select(~keep[..., None].expand_as(t)) == 0).all() for t in found[1:])
    by_head = torch.rand(1, 2, 300, device=device) > 0.3
    check(tensors, by_head, 0.3, 2e-6)
    check(tensors, by_head[:, :1], 0.3, 2e-6)
    check(tensors, keep.mT.contiguous().mT, 0.3, 2e-6)


def test_what_does_not_count_may_be_anything(device):
    q, k, v = made((1, 1, 20, 100, 8, 8), device)
    keep = torch.arange(100, device=device)[None, None] < 80
    keep[:, :, 10:20] = False
    results = []
    for junk in (0.0, torch.nan, torch.inf):
        with torch.no_grad():
            for t in (k, v):
                t[:, :, 10:20], t[:, :, 80:] = junk, junk
        out = fused_softmax(q, k, v, keep, 0.1, 0.5, seed=number(3, device))
        results.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v))))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("size", [30.0, 1e3])
def test_large_logits(size, device):
    q, k, v = made((1, 2, 40, 90, 8, 8), device)
    tensors = [(size**0.5 * q).detach().requires_grad_(), (size**0.5 * k).detach().requires_grad_(), v]
    check(tensors, None, 1.0, 1e-5 * size)
    below = [t.detach() for t in (q - 3 * size, k * (0.3 / size) + 1, v)]  # all logits are far below zero
    want = exact(*(t.double() for t in below), None, 1.0)
    torch.testing.assert_close(fused_softmax(*below, None, 0.0, 1.0).double(), want, rtol=0, atol=1e-5 * size)


def test_any_strides(device):
    qkv = torch.randn(2, 70, 3, 2, 8, device=device)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # as one projection makes them
    seed = number(5, device)
    want = fused_softmax(q.contiguous(), k.contiguous(), v.contiguous(), None, 0.1, seed=seed)
    assert torch.equal(fused_softmax(q, k, v, None, 0.1, seed=seed), want)
    assert torch.equal(fused_softmax(q.mT.contiguous().mT, k, v, None, 0.1, seed=seed), want)
    assert want.transpose(1, 2).is_contiguous()
    assert tokens_like(q, 7).shape == (2, 2, 7, 8)
    tensors = [t.detach().requires_grad_() for t in (q, k, v)]
    out = fused_softmax(*tensors, None, 0.1, seed=seed)
    summed = torch.autograd.grad(out.sum(), tensors, retain_graph=True)  # a gradient without strides
    for one, other in zip(summed, torch.autograd.grad(out, tensors, torch.ones_like(out)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # the interpreter's maximum
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("p", [0.0, 0.5])
def test_a_nan_is_no_finite_number(which, p, device):
    tensors = [t.detach() for t in made((2, 1, 20, 70, 8, 8), device)]
    clean = fused_softmax(*tensors, None, p, seed=number(1, device))
    tensors[which][0, 0, 3, 2] = torch.nan
    out = fused_softmax(*tensors, None, p, seed=number(1, device))
    assert out[0, 0, 3, 2].isnan()
    assert out[0].isnan().all(-1).any(-1) if which < 2 else out[0, 0, :, 2].isnan().all()
    assert torch.equal(out[1], clean[1])


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_dropout_is_the_same_forward_and_backward(p, masked, device):
    b, h, n, m = shape = 2, 2, 70, 150
    tensors, seed = made((*shape, 8, 8), device), number(2**61 + 12345, device)
    keep = None
    if masked:
        keep = torch.rand(b, 1, m, device=device) > 0.3
        keep[0, :, 90:] = False
    stays = stays_of(seed, p, b, h, n, m)
    share = float((~stays).double().mean())
    assert abs(share - p) < 4 * (p * (1 - p) / stays.numel()) ** 0.5
    check(tensors, keep, 0.3, 2e-6, seed, p, stays.double())


def test_every_matrix_and_seed_drops_others(device):
    p, sizes = 0.5, (2, 2, 64, 128)
    first = stays_of(number(1, device), p, *sizes)
    assert torch.equal(stays_of(number(1, device), p, *sizes), first)
    others = [stays_of(number(seed, device), p, *sizes) for seed in (2, 1 + 2**32)]
    pairs = [(first, other) for other in others] + [(first[0, 0], first[0, 1]), (first[0, 0], first[1, 0])]
    pairs += [(first[..., 1:, :], first[..., :-1, :]), (first[..., 1:], first[..., :-1])]
    for one, other in pairs:
        assert abs(float((one == other).double().mean()) - 0.5) < 4 * 0.5 / one.numel() ** 0.5


def test_masks_look_random(device):
    """Correlations of rows and of columns are no larger than chance makes them, nor is the greatest singular value."""
    n = m = 256
    z = stays_of(number(77, device), 0.1, 1, 1, n, m)[0, 0].double().sub(0.9).div(0.3)
    for t in (z, z.mT):
        products = (t @ t.mT / m**0.5).masked_select(~torch.eye(n, dtype=torch.bool, device=t.device))
        assert 0.9 < products.square().mean() < 1.1
        assert 0.6 < t.sum(-1).var() / m < 1.5
    assert torch.linalg.matrix_norm(z, 2) < 1.1 * 2 * n**0.5


def test_tiles_change_nothing_of_what_is_dropped(device):
    q, k, v = (t.detach() for t in made((1, 2, 100, 130, 8, 8), device))
    keep = (torch.rand(1, 1, 130, device=device) > 0.3).contiguous()
    ends = softmax_fused.ends_of(keep)
    found = []
    for rows, columns in ((64, 64), (16, 32), (32, 16)):
        tiles = {"BM": rows, "BN": columns, "num_warps": 4, "num_stages": 2}
        settings = {"dropout_p": 0.4, "scale": 0.3}
        out, lse = forward(q, k, v, keep, ends, number(8, device), tiles=tiles, **settings)
        pulls = backward(
            v[:, :, :100], q, k, v, keep, ends, number(8, device), out, lse, tiles=(tiles, tiles), **settings
        )
        found.append((out, lse, *pulls))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_a_sample_does_not_see_its_batch_mates(p, device):
    q, k, v = made((3, 2, 70, 90, 8, 8), device)
    keep = torch.rand(3, 1, 90, device=device) > 0.3
    results = []
    for part in (slice(0, 3), slice(0, 1)):
        tensors = [t[part].detach().requires_grad_() for t in (q, k, v)]
        out = fused_softmax(*tensors, keep[part], p, seed=number(1, device))
        results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    assert all(torch.equal(whole[:1], alone) for whole, alone in zip(*results, strict=True))


def test_the_seed_is_drawn_from_torch(device):
    q, k, v = (t.detach() for t in made((1, 1, 20, 30, 8, 8), device))
    torch.manual_seed(3)
    once, then = fused_softmax(q, k, v, None, 0.3), fused_softmax(q, k, v, None, 0.3)
    torch.manual_seed(3)
    assert torch.equal(fused_softmax(q, k, v, None, 0.3), once)
    assert not torch.equal(once, then)


def test_only_first_derivatives(device):
    tensors = made((1, 1, 20, 30, 8, 8), device)
    out = fused_softmax(*tensors, None, 0.0)
    grads = torch.autograd.grad(out.square().sum(), tensors, create_graph=True)
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(grads[0].sum(), tensors)


def test_only_where_the_kernels_can(monkeypatch):
    q = torch.randn(2, 2, 10, 8)
    assert not softmax_fused.can_fuse(q, q, q)  # on a CPU
    monkeypatch.setattr(softmax_fused, "fused_kernels", lambda _: True)
    assert softmax_fused.can_fuse(q, q, q, dropout_p=0.1)
    for scale in (0.0, -1.0):
        assert not softmax_fused.can_fuse(q, q, q, scale=scale)
    assert not softmax_fused.can_fuse(q, q, q, dropout_p=1.0)
    with torch.device("cpu"):
        assert softmax_fused.can_fuse(q, q, q)
    with BaseTorchFunctionMode():  # whoever listens to torch's function shall hear it
        assert not softmax_fused.can_fuse(q, q, q)
    assert not softmax_fused.can_fuse(q.double(), q.double(), q.double())
    assert not softmax_fused.can_fuse(q, q, q.half())
    wide, none = torch.randn(2, 2, 10, 65), q[:, :, :0]
    assert not softmax_fused.can_fuse(wide.half(), wide.half(), wide.half())
    assert not softmax_fused.can_fuse(q, none, none)
    assert not softmax_fused.can_fuse(*[q[:1, :1].expand(40_000, 2, 10, 8)] * 3)
