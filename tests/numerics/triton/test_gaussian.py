"""The streaming kernels, in the interpreter or on a GPU, against float64 weights written out."""

import pytest
import torch

from wellcond.numerics import gaussian as whole
from wellcond.numerics.gaussian_weights import gaussian_weights
from wellcond.numerics.triton import gaussian
from wellcond.numerics.triton.gaussian import ends_of, pull, stream

SHAPES = [  # batch, heads, rows, columns, width, values
    (1, 2, 70, 50, 8, 8),
    (2, 1, 20, 1200, 16, 5),  # few rows, many columns: shared out
    (1, 1, 1, 3, 4, 4),
    (1, 1, 130, 130, 20, 32),
    (1, 1, 65, 33, 70, 16),  # wider than one tile
]


def made(shape, device, seed=0):
    b, h, n, m, p, c = shape
    generator = torch.Generator().manual_seed(seed)
    sizes = ((b, h, n, p), (b, h, m, p), (b, h, m, c), (b, h, n, c))
    return [torch.randn(s, generator=generator).to(device) for s in sizes]


def weights(x, y, scale, keep, causal):
    w = (-scale / 2 * torch.cdist(x.double(), y.double(), compute_mode="donot_use_mm_for_euclid_dist").square()).exp()
    if keep is not None:
        w = w * keep[..., None, :]
    return {0: w, 1: w.tril(), -1: w.triu()}[causal]


ENDS = [0, 1, 64, 70, 128, 140]  # before, at and inside blocks of 64 and 128 columns


def masks(ends, heads, m, device, holes=False):
    """(b, heads, m): a sample for each end, the same for all heads; with holes in it, but never at the last key."""
    keep = torch.arange(m) < torch.tensor(ends)[:, None]
    if holes:
        keep &= torch.rand(len(ends), m, generator=torch.Generator().manual_seed(1)) > 0.4
        keep[[i for i, end in enumerate(ends) if end], [end - 1 for end in ends if end]] = True
    return keep[:, None].to(device).expand(-1, heads, -1)


def close(got, want, tolerance=2e-6):
    return (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_product_and_pull_back(shape, masked, device):
    x, y, v, g = made(shape, device)
    b, h, _, m, *_ = shape
    keep = (torch.rand(b, 1, m) > 0.3).to(device).expand(b, h, m) if masked else None
    for causal in (0, 1, -1) if shape[2] == m else (0,):
        w = weights(x, y, 0.3, keep, causal)
        assert close(stream(x, y, v, scale=0.3, keep=keep, causal=causal), w @ v.double())
        dx, out = pull(x, y, g, v, scale=0.3, keep=keep, causal=causal, product=True)
        pulls = w * (g.double() @ v.double().mT)
        want = 0.3 * (pulls @ y.double() - pulls.sum(-1, keepdim=True) * x.double())
        assert close(dx, want, 1e-5)
        assert close(out, w @ v.double())


def test_columns_are_shared_out_and_added_in_the_same_order(device):
    x, y, v, _ = made(SHAPES[1], device)
    rows, shares, each = gaussian.grid_of(20, 1200, gaussian.tiles_for(16, 5))
    assert rows == 1
    assert shares > 1
    assert shares * each >= 1200
    assert torch.equal(stream(x, y, v, scale=0.3), stream(x, y, v, scale=0.3))


def test_any_strides(device):
    x, y, v, _ = made((2, 3, 10, 10, 8, 8), device)
    want = stream(x, y, v, scale=0.5)
    packed = torch.stack([x, y, v], 0).permute(1, 3, 0, 2, 4).contiguous()  # as one projection makes them
    xs, ys, vs = (packed[:, :, i].transpose(1, 2) for i in range(3))
    assert torch.equal(stream(xs, ys, vs, scale=0.5), want)
    assert torch.equal(stream(x.mT.contiguous().mT, y, v, scale=0.5), want)


def test_a_sample_does_not_see_its_batch_mates(device):
    x, y, v, g = made((3, 2, 20, 40, 8, 8), device)
    whole = pull(x, y, g, v, scale=0.5)[0]
    assert torch.equal(pull(x[1:2], y[1:2], g[1:2], v[1:2], scale=0.5)[0], whole[1:2])


def test_what_does_not_count_may_be_anything(device):
    x, y, v, g = made((1, 1, 20, 40, 8, 8), device)
    keep = torch.arange(40, device=device).expand(1, 1, 40) < 30
    want = pull(x, y, g, v, scale=0.5, keep=keep, product=True)
    y[:, :, 30:], v[:, :, 35:] = torch.nan, torch.inf
    for one, other in zip(pull(x, y, g, v, scale=0.5, keep=keep, product=True), want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("holes", [False, True])
def test_ends_of_masks(holes, device):
    keep = masks(ENDS, 2, 140, device, holes)
    for mask in (keep, keep.contiguous(), keep.transpose(0, 1).contiguous().transpose(0, 1)):
        ends = ends_of(mask)
        assert ends.dtype == torch.int32
        assert ends.tolist() == [[end, end] for end in ENDS]
    assert ends_of(keep[2:3].expand(5, 2, 140)).tolist() == [[64, 64]] * 5
    assert ends_of(torch.stack([keep[2, 0], keep[4, 0]])[None].expand(3, 2, 140)).tolist() == [[64, 128]] * 3


@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("causal", [0, 1, -1])
def test_columns_and_rows_end_with_the_last_that_counts(causal, holes, device):
    x, y, v, g = made((len(ENDS), 1, 140, 140, 8, 8), device)
    keep = masks(ENDS, 1, 140, device, holes)
    w = weights(x, y, 0.3, keep, causal)
    out = stream(x, y, v, scale=0.3, keep=keep, causal=causal)
    dx, again = pull(x, y, g, v, scale=0.3, keep=keep, causal=causal, product=True)
    pulls = w * (g.double() @ v.double().mT)
    want = 0.3 * (pulls @ y.double() - pulls.sum(-1, keepdim=True) * x.double())
    settings = {"scale": 0.3, "keep": keep, "of_rows": True, "causal": -causal}
    y[~keep], v[~keep] = torch.nan, torch.inf
    dv = stream(y, x, g, **settings)
    dy, same = pull(y, x, v, g, product=True, **settings)
    y, v = (t.double().masked_fill(~keep[..., None], 0) for t in (y, v))
    truth = 0.3 * (pulls.mT @ x.double() - pulls.sum(-2)[..., None] * y)
    for sample in range(len(ENDS)):
        assert close(out[sample], (w @ v)[sample])
        assert close(again[sample], (w @ v)[sample])
        assert close(dx[sample], want[sample], 1e-5)
        assert close(dy[sample], truth[sample], 1e-5)
        assert close(dv[sample], (w.mT @ g.double())[sample])
        assert close(same[sample], (w.mT @ g.double())[sample])
    assert all((t[~keep] == 0).all() for t in (dy, dv, same))


@pytest.mark.parametrize(("n", "m"), [(20, 1200), (200, 200)])
def test_nobody_goes_beyond_the_end(n, m, device):
    """Half norms that are NaN there would show it."""
    x, y, v, g = made((3, 1, n, m, 8, 8), device)
    keep = masks([0, 64, 130], 1, m, device, holes=True)
    y_half = gaussian.half_norms(y, y, keep, scale=0.3)[1]
    beyond = torch.arange(m, device=device) >= ends_of(keep)[..., None]
    found, want = (
        (stream(x, y, v, **settings), *pull(x, y, g, v, product=True, **settings))
        for halves in (y_half.masked_fill(beyond, torch.nan), y_half)
        for settings in ({"scale": 0.3, "keep": keep, "y_half": halves},)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


def test_rows_beyond_the_end_look_at_no_column(device):
    """NaN among the columns would show it in the rows that count, and does."""
    x, y, v, g = made((1, 1, 300, 40, 8, 8), device)
    keep = masks([130], 1, 300, device)
    y[0, 0, 7], v[0, 0, 7] = torch.nan, torch.nan
    dx, out = pull(x, y, g, v, scale=0.3, keep=keep, of_rows=True, product=True)
    for t in (dx, out, stream(x, y, v, scale=0.3, keep=keep, of_rows=True)):
        assert t[0, 0, :130].isnan().all()
        assert (t[0, 0, 130:] == 0).all()


@pytest.mark.parametrize("huge", [1e3, 1e4, 1e18])
def test_the_future_changes_nothing(huge, device):
    x, y, v, g = made((1, 2, 20, 20, 8, 8), device)
    g[:, :, 15:] = 0
    found = []
    for size in (1.0, huge):
        for t in (x, y, v):
            t[:, :, 15:] = size
        dx, out = pull(x, y, g, v, scale=0.3, causal=1, product=True)
        dy, dv = pull(y, x, v, g, scale=0.3, causal=-1, product=True)
        assert torch.equal(stream(x, y, v, scale=0.3, causal=1), out)
        assert all(t.isfinite().all() for t in (out, dx, dy, dv))
        found.append([t[:, :, :15] for t in (out, dx, dy, dv)])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_weights_are_good_to_a_percent_up_to_the_norm_that_is_said(device):
    scale = 32**-0.5
    x = torch.nn.functional.normalize(torch.randn(1, 1, 64, 32), dim=-1).to(device) * (3e4 / scale) ** 0.5
    y = x + 0.3 * torch.randn(1, 1, 64, 32).to(device)
    own = stream(x, y, torch.eye(64, device=device)[None, None], scale=scale)[0, 0].diagonal()
    want = (-scale / 2 * (x.double() - y.double()).square().sum(-1)).exp()[0, 0]
    assert ((own / want - 1).abs() <= 0.01).all()
    own = stream(1e3 * x, 1e3 * x, torch.eye(64, device=device)[None, None], scale=scale)
    assert ((own >= 0) & (own <= 1)).all()  # wrong there, but never large


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_nan_is_no_finite_number(which, device):
    tensors = made((1, 1, 20, 20, 8, 8), device)
    tensors[which][0, 0, 3, 2] = torch.nan
    out = stream(*tensors[:3], scale=0.3)
    assert out[0, 0, 3, 2].isnan()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_function_as_a_whole(masked, is_causal, device, monkeypatch):
    """`gaussian_product` with its kernels: what they share between forward and backward pass fits together."""
    monkeypatch.setattr(whole, "fused_kernels", lambda _: True)
    x, y, v = (torch.randn(2, 2, n, 8, device=device).requires_grad_() for n in (20, 33, 33))
    if is_causal:
        y, v = (torch.randn(2, 2, 20, 8, device=device).requires_grad_() for _ in range(2))
    keep = (torch.rand(2, 1, y.shape[2], device=device) > 0.3) if masked else None
    out = whole.gaussian_product(x, y, v, scale=0.3, keep=keep, is_causal=is_causal)
    g = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, y, v), g)
    wide = [t.detach().double().requires_grad_() for t in (x, y, v)]
    weights = gaussian_weights(wide[0], wide[1], scale=0.3)
    weights = weights if keep is None else weights * keep[..., None, :]
    want = (weights.tril() if is_causal else weights) @ wide[2]
    for one, other in zip((out, *found), (want, *torch.autograd.grad(want, wide, g.double())), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("n", "m", "is_causal", "needed"),
    [
        (130, 130, False, (0, 1, 2)),
        (130, 130, False, (0,)),
        (130, 130, False, (1,)),
        (130, 130, False, (2,)),
        (130, 130, True, (0, 1, 2)),
        (130, 130, True, (2,)),
        (20, 1200, False, (0, 1, 2)),  # columns are shared out, here and in the gradients of the next
        (1200, 20, False, (0, 1, 2)),
        (1200, 20, False, (2,)),
    ],
)
def test_the_function_with_masks_that_end_anywhere(n, m, is_causal, needed, device, monkeypatch):
    monkeypatch.setattr(whole, "fused_kernels", lambda _: True)
    x, y, v, g = made((3, 1, n, m, 8, 8), device)
    keep = masks([0, m // 2, m], 1, m, device, holes=True)
    y[~keep] = torch.nan
    tensors = [t.requires_grad_(i in needed) for i, t in enumerate((x, y, v))]
    asked = [tensors[i] for i in needed]
    out = whole.gaussian_product(*tensors, scale=0.3, keep=keep, is_causal=is_causal)
    found = torch.autograd.grad(out, asked, g)
    wide = [t.detach().double() for t in (x, y, v)]
    wide[1] = wide[1].masked_fill(~keep[..., None], 0)
    asked = [wide[i].requires_grad_() for i in needed]
    w = gaussian_weights(wide[0], wide[1], scale=0.3) * keep[..., None, :]
    want = (w.tril() if is_causal else w) @ wide[2]
    for one, other in zip((out, *found), (want, *torch.autograd.grad(want, asked, g.double())), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=2e-5)
    assert all((t[~keep] == 0).all() for i, t in zip(needed, found, strict=True) if i)
    if needed == (0, 1, 2):
        as_operator = whole.gradients_op(g, *(t.detach() for t in tensors), keep, 0.3, is_causal)
        assert all(torch.equal(a, b) for a, b in zip(as_operator, found, strict=True))


def test_more_padding_changes_no_bit(device, monkeypatch):
    monkeypatch.setattr(whole, "fused_kernels", lambda _: True)
    given = made((3, 1, 70, 70, 8, 8), device)
    keep, results = masks([70, 30, 0], 1, 70, device, holes=True), []
    for more in (0, 5, 58, 130):
        x, y, v, g = (torch.nn.functional.pad(t, (0, 0, 0, more)) for t in given)
        tensors = [t.requires_grad_() for t in (x, y, v)]
        out = whole.gaussian_product(*tensors, scale=0.3, keep=torch.nn.functional.pad(keep, (0, more)))
        results.append([t[:, :, :70] for t in (out, *torch.autograd.grad(out, tensors, g))])
    for longer in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(longer, results[0], strict=True))


def test_only_what_the_kernels_can_address(monkeypatch):
    monkeypatch.setattr(whole, "fused_kernels", lambda _: True)
    x = torch.empty(1, device="meta").as_strided((2, 2, 10, 8), (320, 160, 8, 1))
    far, many = x.as_strided(x.shape, (1, 1, 2**30, 1)), x[:1].expand(40_000, 2, 10, 8)
    assert whole._fused(x, x, x)
    assert not whole._fused(far, x, x)
    assert not whole._fused(x, x, far)
    assert not whole._fused(many, many, many)
