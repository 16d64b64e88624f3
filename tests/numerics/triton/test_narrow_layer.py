"""What a narrow layer does around its attention, in the interpreter or on a GPU, against float64 written out."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch.nn import functional as F
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

from wellcond.numerics import narrow_layer
from wellcond.numerics.narrow_layer import can_fuse, enter, leave
from wellcond.numerics.triton import narrow_layer as kernels
from wellcond.numerics.triton.narrow_layer import _gelu

SHAPES = [  # batch, tokens, width
    (3, 37, 16),
    (2, 64, 32),  # whole blocks
    (1, 130, 64),
    (3, 1, 16),
    (1, 1, 32),
]
ENDS = {37: (37, 5, 0), 64: (0, 64), 130: (67,), 1: (1, 0, 1)}
EPS = 1e-5
SEED = 2**61 + 12345


def made(shape, device, dtype=torch.float32, scale=0.5):
    """Tokens, what attention made of them, and the weights before and after it."""
    b, n, w = shape
    generator = torch.Generator().manual_seed(1)
    sizes = [(w,), (w,), (3 * w, w), (3 * w,), (w, w), (w,), (w,), (w,), (2 * w, w), (2 * w,), (w, 2 * w), (w,)]
    x, a, *weights = (torch.randn(s, generator=generator).mul(scale) for s in [(b, n, w), (b, n, w), *sizes])
    for place, weight in enumerate(weights):
        weight.mul_((16 / w) ** 0.5 if weight.ndim == 2 else 1.0).add_(1.0 if place in (0, 6) else 0.0)
    x, *weights = (t.to(device).requires_grad_() for t in (x, *weights))
    return x, a.to(device, dtype).requires_grad_(), weights[:4], weights[4:]


def ends_for(shape, device):
    return torch.tensor(ENDS[shape[1]][: shape[0]], dtype=torch.int32, device=device)


def kept(x, ends):
    """Which rows count, as numbers."""
    n = x.shape[1]
    lengths = torch.full((len(x),), n, device=x.device) if ends is None else ends
    return (torch.arange(n, device=x.device) < lengths[:, None]).double()[..., None]


def exact_before(x, before, ends):
    gamma, beta, weight, bias = before
    qkv = F.linear(F.layer_norm(x, x.shape[-1:], gamma, beta, EPS), weight, bias)
    return (qkv * kept(x, ends)).split(x.shape[-1], -1)


def exact_after(a, x, after, ends, drops=(1.0, 1.0, 1.0)):
    """With what dropout multiplies with after proj, gelu and down."""
    proj, proj_bias, gamma, beta, up, up_bias, down, down_bias = after
    y = x + F.linear(a, proj, proj_bias) * drops[0]
    m = F.gelu(F.linear(F.layer_norm(y, x.shape[-1:], gamma, beta, EPS), up, up_bias)) * drops[1]
    return ((y + F.linear(m, down, down_bias) * drops[2]) * kept(x, ends),)


def pulls(like):
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(t.shape, generator=generator).to(t) for t in like]


def compare(out, want, inputs, wide, tolerance):
    """Values and all gradients; what comes out and the gradients."""
    grads = pulls(out)
    found = (*out, *torch.autograd.grad(out, inputs, grads))
    truth = (*want, *torch.autograd.grad(want, wide, [g.double() for g in grads]))
    for one, other in zip(found, truth, strict=True):
        assert one.shape == other.shape
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm()
    return found


def check_enter(x, before, ends, tolerance):
    inputs = [x, *before]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    return compare(enter(x, before, ends, eps=EPS), exact_before(wide[0], wide[1:], ends), inputs, wide, tolerance)


def check_leave(a, x, after, ends, tolerance, seed=None, p=0.0, drops=(1.0, 1.0, 1.0)):
    inputs = [a, x, *after]
    wide = [t.detach().double().requires_grad_() for t in inputs]
    out = leave(a, x, after, seed, ends, dropout_p=p, eps=EPS)
    return compare((out,), exact_after(wide[0], wide[1], wide[2:], ends, drops), inputs, wide, tolerance)


BITS = 2**32 - 1


def mixed(x):
    """MurmurHash3's last step, in Python's numbers."""
    x = (x ^ x >> 16) * 0x85EBCA6B & BITS
    x = (x ^ x >> 13) * 0xC2B2AE35 & BITS
    return x ^ x >> 16


def stays_of(seed, p, place, rows, width):
    """Which numbers of (rows, width) stay at one of the four places, by the hash written out."""
    of_rows = mixed(seed & BITS ^ mixed(seed >> 32 ^ mixed(place + 1)))
    of_columns = mixed(of_rows + 0x165667B1 & BITS)
    one = np.arange(rows, dtype=np.uint64) * 0x9E3779B9 + of_rows & BITS
    other = np.arange(width, dtype=np.uint64) * 0x85157AF5 + of_columns & BITS
    x = (one[:, None] ^ other) * 0x85EBCA6B & BITS
    x = (x ^ x >> 15) * 0xC2B2AE35 & BITS
    signed = x.astype(np.int64) - (x >> 31 << 32).astype(np.int64)
    return signed < (round((1 - p) * 2**32) - 2**31) | 3


def drops_of(x, p, seed=SEED):
    """What dropout multiplies with after proj, gelu and down: 0, or 1 / (1 − p)."""
    b, n, w = x.shape
    first, *halves, last = (stays_of(seed, p, place, b * n, w) for place in range(4))
    stays = [torch.from_numpy(s).to(x.device) for s in (first, np.concatenate(halves, 1), last)]
    return [s.double().view(b, n, -1) / (1 - p) for s in stays]


def results(x, a, before, after, ends, p=0.0):
    """All values and gradients of both."""
    seed = torch.tensor([SEED], device=x.device) if p else None
    q, k, v = enter(x, before, ends, eps=EPS)
    y = leave(a, x, after, seed, ends, dropout_p=p, eps=EPS)
    out = (q, k, v, y)
    return *out, *torch.autograd.grad(out, (x, a, *before, *after), pulls(out))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_values_and_gradients(shape, masked, device):
    x, a, before, after = made(shape, device)
    ends = ends_for(shape, device) if masked else None
    for found, tokens in ((check_enter(x, before, ends, 1e-6), 4), (check_leave(a, x, after, ends, 1e-6), 3)):
        beyond = (kept(x, ends) == 0).expand_as(x)
        assert all((t[beyond] == 0).all() for t in found[:tokens])  # of values and of the gradients of tokens


def test_half_precision(device):
    """In autocast's dtype, sums and skips in float32."""
    with torch.autocast(device, torch.float16):
        x, a, before, after = made((2, 37, 32), device, torch.float16)
        q, *_ = check_enter(x, before, None, 1e-3)
        y, da, dx, *_ = check_leave(a, x, after, torch.tensor([20, 37], dtype=torch.int32, device=device), 1e-3)
    assert q.dtype == da.dtype == torch.float16
    assert y.dtype == dx.dtype == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(3, 200, 64), (4, 1024, 64)])
def test_half_precision_on_a_gpu(shape, dtype):
    with torch.autocast("cuda", dtype):
        x, a, before, after = made(shape, "cuda", dtype)
        ends = torch.tensor([200, 0, 77, 130][: shape[0]], dtype=torch.int32, device="cuda")
        for those in (None, ends):
            check_enter(x, before, those, 1e-2)
            check_leave(a, x, after, those, 1e-2)
        seed = torch.tensor([SEED], device="cuda")
        check_leave(a, x, after, ends, 1e-2, seed, 0.1, drops_of(x, 0.1))


@pytest.mark.parametrize(("shape", "p"), [((3, 37, 16), 0.1), ((2, 64, 32), 0.5), ((1, 130, 64), 0.9)])
@pytest.mark.parametrize("masked", [False, True])
def test_dropout_follows_from_the_hash(shape, p, masked, device):
    x, a, _, after = made(shape, device)
    ends = ends_for(shape, device) if masked else None
    check_leave(a, x, after, ends, 2e-6, torch.tensor([SEED], device=device), p, drops_of(x, p))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_share_that_is_dropped_is_p(p):
    found = [stays_of(seed, p, place, 4096, 64) for seed in (SEED, SEED + 1) for place in range(4)]
    for stays in found:
        assert abs((~stays).mean() - p) < 4 * (p * (1 - p) / stays.size) ** 0.5
    for number, one in enumerate(found):  # and at every place, and with every seed, others are
        for other in found[:number]:
            alike = p**2 + (1 - p) ** 2
            assert abs((one == other).mean() - alike) < 4 * (alike * (1 - alike) / one.size) ** 0.5


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_what_comes_after_the_end_may_be_anything(p, device):
    x, a, before, after = made((3, 37, 16), device)
    ends = ends_for(x.shape, device)
    beyond = (kept(x, ends) == 0).expand_as(x)
    found = []
    for junk in (0.0, torch.nan, torch.inf):
        with torch.no_grad():
            x[beyond], a[beyond] = junk, junk
        found.append(results(x, a, before, after, ends, p))
    for other in found[1:]:
        assert all(torch.equal(one, two) for one, two in zip(found[0], other, strict=True))


def test_other_tiles_change_nothing_but_rounding(device, monkeypatch):
    x, a, before, after = made((3, 67, 16), device)
    ends = torch.tensor([67, 20, 0], dtype=torch.int32, device=device)
    found = [results(x, a, before, after, ends, 0.1)]
    for rows, programs in ((16, 3), (32, 1), (128, 500)):
        other = {name: tiles | {"ROWS": rows, "programs": programs} for name, tiles in kernels.TILES.items()}
        monkeypatch.setattr(kernels, "TILES", other)
        found.append(results(x, a, before, after, ends, 0.1))
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5 * float(one.detach().abs().max()))


def test_results_repeat_to_the_bit(device):
    given = *made((3, 37, 16), device), torch.tensor([37, 5, 0], dtype=torch.int32, device=device), 0.1
    assert all(torch.equal(one, two) for one, two in zip(results(*given), results(*given), strict=True))


def test_any_strides(device):
    x, a, before, after = made((3, 37, 16), device)
    want = results(x, a, before, after, None)
    turned = [t.detach().mT.contiguous().mT.requires_grad_() if t.ndim > 1 else t for t in (x, a, *before, *after)]
    assert not turned[0].is_contiguous()
    found = results(turned[0], turned[1], turned[2:6], turned[6:], None)
    for one, other in zip(want, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    out = leave(a, x, after, None, None, dropout_p=0.0, eps=EPS)
    summed = torch.autograd.grad(out.sum(), x, retain_graph=True)[0]  # a gradient without strides
    assert torch.equal(summed, torch.autograd.grad(out, x, torch.ones_like(out))[0])


def test_some_outputs_may_be_left_alone(device):
    x, _, before, _ = made((3, 37, 16), device)
    _, k, _ = enter(x, before, None, eps=EPS)
    wide = [t.detach().double().requires_grad_() for t in (x, *before)]
    want = exact_before(wide[0], wide[1:], None)[1]
    found = torch.autograd.grad(k.square().sum(), (x, *before))
    for one, other in zip(found, torch.autograd.grad(want.square().sum(), wide), strict=True):
        assert (one.double() - other).norm() <= 1e-6 * other.norm()


def test_a_batch_of_gradients(device):
    x, a, before, after = made((2, 37, 16), device)
    inputs = [x, a, *before, *after]
    q, k, v = enter(x, before, None, eps=EPS)
    y = leave(a, x, after, None, None, dropout_p=0.0, eps=EPS)
    out = y + q * k + v
    grads = torch.randn(2, *out.shape, device=device)
    together = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    for row, grad in enumerate(grads):
        for one, other in zip(torch.autograd.grad(out, inputs, grad, retain_graph=True), together, strict=True):
            torch.testing.assert_close(one, other[row], rtol=1e-5, atol=1e-4)


def test_passes_may_be_made_anew_for_the_gradient(device):
    x, a, before, after = made((2, 37, 16), device)

    def layer(x, a):
        q, k, v = enter(x, before, None, eps=EPS)
        return leave(a + q * k * v, x, after, None, None, dropout_p=0.0, eps=EPS)

    want = torch.autograd.grad(layer(x, a).square().sum(), (x, a, *before, *after))
    found = torch.autograd.grad(checkpoint(layer, x, a, use_reentrant=False).square().sum(), (x, a, *before, *after))
    assert all(torch.equal(one, two) for one, two in zip(want, found, strict=True))


def test_only_first_derivatives(device):
    x, a, before, after = made((1, 5, 16), device)
    for out in (enter(x, before, None, eps=EPS)[0], leave(a, x, after, None, None, dropout_p=0.0, eps=EPS)):
        grad = torch.autograd.grad(out.square().sum(), x, create_graph=True)[0]
        with pytest.raises(RuntimeError, match="second derivative"):
            torch.autograd.grad(grad.sum(), x)


def test_compilers_are_told_the_right_shapes(device):
    x, a, before, after = made((2, 70, 16), device)
    ends, seed = torch.tensor([70, 3], dtype=torch.int32, device=device), torch.tensor([SEED], device=device)
    x, a, *weights = (t.detach() for t in (x, a, *before, *after))
    before, after = weights[:4], weights[4:]
    calls = [
        (narrow_layer._enter_op, (x, *before, ends, EPS, torch.float32)),
        (narrow_layer._enter_back_op, (x, x, x, x, *before[:3], ends, EPS)),
        (narrow_layer._leave_op, (a, x, *after, seed, ends, 0.1, EPS)),
        (narrow_layer._leave_back_op, (x, a, x, *after[:7], seed, ends, 0.1, EPS)),
    ]
    for operator, given in calls:
        torch.library.opcheck(operator, given, test_utils=("test_schema", "test_faketensor"))


@triton.jit
def gelu_kernel(u, value, slope, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    one, other = _gelu(tl.load(u + at))
    tl.store(value + at, one)
    tl.store(slope + at, other)


def test_gelu_and_its_slope_err_by_less_than_a_millionth(device):
    u = torch.linspace(-12, 12, 8192, device=device)
    u[:4] = torch.tensor([0.0, -0.0, 1e4, -1e4])
    value, slope = torch.empty_like(u), torch.empty_like(u)
    gelu_kernel[(8,)](u, value, slope, BLOCK=1024)
    wide = u.double().requires_grad_()
    want = F.gelu(wide)
    of_slope = torch.autograd.grad(want.sum(), wide)[0]
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert (value.double() - want).abs().max() < 1e-6
    assert (slope.double() - of_slope).abs().max() < 1e-6


def test_only_where_the_kernels_can(monkeypatch):
    x, _, before, after = made((2, 10, 16), "cpu")
    weights = [*before, *after]
    with torch.autocast("cpu", torch.bfloat16):
        assert not can_fuse(x, weights)  # on a CPU
        monkeypatch.setattr(narrow_layer, "fused_kernels", lambda _: True)
        assert can_fuse(x, weights)
        for other in (x.double(), x.bfloat16(), x[0], x[:0], x[:, :0], torch.zeros(2, 10, 48)):
            assert not can_fuse(other, weights)
        for place, weight in enumerate(weights):
            for other in (None, weight.detach().double(), weight.detach().repeat(2, *[1] * (weight.ndim - 1))):
                assert not can_fuse(x, [*weights[:place], other, *weights[place + 1 :]])
        assert not can_fuse(torch.empty(1).expand(2**16, 2**10, 16), weights)  # numbers that 32 bits do not count
        with BaseTorchFunctionMode():  # whoever listens to torch's functions shall hear them
            assert not can_fuse(x, weights)
        seen = []
        torch.func.grad(lambda weight: seen.append(can_fuse(x, [*weights[:-1], weight])) or weight.sum())(weights[-1])
        assert seen == [False]  # also if it is a weight whose derivative is asked for
    assert not can_fuse(x, weights)
