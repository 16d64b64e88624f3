"""The Gaussian product and its gradients against weights written out in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from wellcond.numerics import gaussian
from wellcond.numerics.fastpaths import plain_twins
from wellcond.numerics.gaussian import gaussian_product
from wellcond.numerics.gaussian_weights import gaussian_weights


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_long_products_store_no_weights(dynamic, monkeypatch):
    """They are an operator of the graph; short ones are plain operations, which the compiler fuses."""
    monkeypatch.setattr(gaussian, "DIRECT", 500)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(gaussian_product, backend=backend, fullgraph=True, dynamic=dynamic)
    for n, operator in ((10, False), (40, True)):
        x, y, v = (torch.randn(1, 2, n, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
        found, want = (f(x, y, v, scale=0.5) for f in (compiled, gaussian_product))
        assert_close(found, want)
        for a, b in zip(*(torch.autograd.grad(out.sum(), (x, y, v)) for out in (found, want)), strict=True):
            assert_close(a, b)
        assert ("gaussian_product" in graphs[-1].code) is operator
    torch.compiler.reset()


def exact(x, y, v, scale, keep=None, is_causal=False):
    """Every distance by itself, in float64."""
    weights = (-scale / 2 * (x.double()[..., :, None, :] - y.double()[..., None, :, :]).square().sum(-1)).exp()
    if keep is not None:
        weights = weights * keep.double()[..., None, :]
    if is_causal:
        weights = weights.tril()
    return weights @ v.double()


shapes = st.tuples(
    st.sampled_from([(), (2,), (2, 3), (1, 2, 2)]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 6),
)


@pytest.mark.parametrize("chunked", [False, True])
@given(shapes=shapes, causal=st.booleans(), masked=st.booleans(), seed=st.integers(0, 2**31))
def test_value_and_gradients(chunked, shapes, causal, masked, seed):
    lead, n, m, p, c = shapes
    g = torch.Generator().manual_seed(seed)
    x, y, v = (
        torch.randn(*lead, a, b, generator=g, dtype=torch.float64).requires_grad_() for a, b in ((n, p), (m, p), (m, c))
    )
    keep = torch.rand(*lead, m, generator=g) > 0.4 if masked else None
    direct, chunk = gaussian.DIRECT, gaussian.CHUNK
    try:
        if chunked:
            gaussian.DIRECT, gaussian.CHUNK = 0, 7
        got = gaussian_product(x, y, v, scale=0.7, keep=keep, is_causal=causal)
        weight = torch.randn(got.shape, generator=g, dtype=torch.float64)
        gradients = torch.autograd.grad((got * weight).sum(), (x, y, v))
    finally:
        gaussian.DIRECT, gaussian.CHUNK = direct, chunk
    want = exact(x, y, v, 0.7, keep, causal)
    assert_close(got, want)
    for one, other in zip(gradients, torch.autograd.grad((want * weight).sum(), (x, y, v)), strict=True):
        assert_close(one, other)


def test_gradcheck_of_the_streaming_form(monkeypatch):
    monkeypatch.setattr(gaussian, "DIRECT", 0)
    monkeypatch.setattr(gaussian, "CHUNK", 10)
    x, y, v = (torch.randn(1, 2, 4, 3, dtype=torch.float64).requires_grad_() for _ in range(3))
    keep = torch.tensor([True, False, True, True]).expand(1, 2, 4)
    assert torch.autograd.gradcheck(lambda *t: gaussian_product(*t, scale=0.5, keep=keep), (x, y, v))


@pytest.mark.parametrize("norm", [1e-6, 1.0, 1e2, 1e3, 1e4, 1e8])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_weights_are_right_at_any_norm(dtype, norm):
    """Of 64 tokens of 32, so that rounding does not cancel; half of them near others, so that weights lie between."""
    x = torch.nn.functional.normalize(torch.randn(2, 64, 32), dim=-1) * norm
    x[:, 1::2] = x[:, ::2] + 0.5 * torch.randn(2, 32, 32)
    x = x.clamp(-6e4, 6e4).to(dtype)
    got = gaussian_weights(x, x, scale=32**-0.5)
    want = exact(x, x, torch.eye(64).expand(2, 64, 64), 32**-0.5)
    assert got.dtype == torch.float32
    assert (got <= 1).all()
    assert_close(got.double(), want, rtol=1e-4, atol=1e-6)
    out = gaussian_product(x, x, torch.eye(64, dtype=dtype).expand(2, 64, 64), scale=32**-0.5)
    assert torch.equal(out, got.to(dtype))


@pytest.mark.parametrize("direct", [0, 2**22])
def test_gradients_are_right_at_large_norms(direct, monkeypatch):
    monkeypatch.setattr(gaussian, "DIRECT", direct)
    near = torch.nn.functional.normalize(torch.randn(2, 16, 32), dim=-1) * 1e4
    x, y = (near + 0.5 * torch.randn(2, 16, 32) for _ in range(2))
    v, g = torch.randn(2, 16, 8), torch.randn(2, 16, 8)
    inputs = [t.requires_grad_() for t in (x, y, v)]
    found = torch.autograd.grad(gaussian_product(*inputs, scale=32**-0.5), inputs, g)
    wide = [t.detach().double().requires_grad_() for t in inputs]
    for one, other in zip(found, torch.autograd.grad(exact(*wide, 32**-0.5), wide, g.double()), strict=True):
        assert_close(one.double(), other, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("direct", [0, 2**22])
@pytest.mark.parametrize("huge", [1e3, 1e4, 1e20, 1e37])
def test_the_future_changes_nothing(direct, huge, monkeypatch):
    monkeypatch.setattr(gaussian, "DIRECT", direct)
    tensors = [torch.randn(2, 20, 8) for _ in range(3)]
    later = [t.index_fill(1, torch.arange(15, 20), huge).requires_grad_() for t in tensors]
    first = [t[:, :15].clone().requires_grad_() for t in tensors]
    got = gaussian_product(*later, scale=0.3, is_causal=True)[:, :15]
    want = gaussian_product(*first, scale=0.3, is_causal=True)
    assert_close(got, want)
    g = torch.randn(want.shape)
    for one, other in zip(torch.autograd.grad(got, later, g), torch.autograd.grad(want, first, g), strict=True):
        assert_close(one[:, :15], other)
        assert torch.equal(one[:, 15:], torch.zeros_like(one[:, 15:]))


def test_a_common_offset_changes_nothing():
    """Distances do not depend on the origin, though the difference of large squares does."""
    x, y, v = torch.randn(4, 8), torch.randn(6, 8), torch.randn(6, 3)
    want = exact(x, y, v, 0.4)
    got = gaussian_product(x + 1000, y + 1000, v, scale=0.4)
    assert_close(got.double(), exact(x + 1000, y + 1000, v, 0.4), rtol=1e-5, atol=1e-6)
    assert_close(got.double(), want, rtol=2e-3, atol=1e-4)  # as far as float32 tokens of this size can tell


def test_where_float64_is_slow_the_exponent_has_the_error_that_is_said(monkeypatch):
    """As the kernels, and as `gaussian.py` says of both: good to 1 % up to scale · ‖x‖² = 3e4."""
    monkeypatch.setattr("wellcond.numerics.gaussian_weights.fast_double", lambda _: False)
    scale = 32**-0.5
    x = torch.nn.functional.normalize(torch.randn(64, 32), dim=-1) * (3e4 / scale) ** 0.5
    own = gaussian_weights(x, x, scale=scale).diagonal()
    assert (own >= 0.99).all()
    assert (own < 1).any(), "then the kernels' twins are better than is said"


def test_nothing_kept_gives_zeros():
    x, v = torch.randn(2, 5, 4), torch.randn(2, 5, 3)
    out = gaussian_product(x, x, v, scale=1.0, keep=torch.zeros(2, 5, dtype=torch.bool))
    assert torch.equal(out, torch.zeros_like(out))


def test_what_does_not_count_may_be_anything():
    x, y, v = (torch.randn(2, 5, 4, dtype=torch.float64).requires_grad_() for _ in range(3))
    keep = torch.tensor([True, True, True, False, True]).expand(2, 5)
    bad = [torch.where(keep[..., None], t, torch.nan) for t in (y, v)]
    got = gaussian_product(x, *bad, scale=1.0, keep=keep)
    assert_close(got, exact(x, y, v, 1.0, keep))
    assert all(t.isfinite().all() for t in torch.autograd.grad(got.sum(), (x, y, v)))


def ends_at(ends, m, holes):
    """A mask (b, 1, m) for each end; with holes in it, but never at the last key."""
    keep = torch.arange(m) < torch.tensor(ends)[:, None]
    if holes:
        keep &= torch.rand(len(ends), m, generator=torch.Generator().manual_seed(1)) > 0.4
        keep[[i for i, end in enumerate(ends) if end], [end - 1 for end in ends if end]] = True
    return keep[:, None]


@pytest.mark.parametrize("direct", [0, 2**22])
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lengths_that_differ_in_a_batch(direct, holes, is_causal, monkeypatch):
    """What the kernels do with them, the plain twins do too."""
    monkeypatch.setattr(gaussian, "DIRECT", direct)
    monkeypatch.setattr(gaussian, "CHUNK", 500)
    x, y, v = (torch.randn(4, 2, 70, 6).requires_grad_() for _ in range(3))
    keep = ends_at([0, 1, 64, 70], 70, holes).expand(4, 2, 70)
    got = gaussian_product(x, y, v, scale=0.4, keep=keep, is_causal=is_causal)
    g = torch.randn(got.shape)
    found = torch.autograd.grad(got, (x, y, v), g)
    wide = [t.detach().double().requires_grad_() for t in (x, y, v)]
    want = exact(*wide, 0.4, keep, is_causal)
    for one, other in zip((got, *found), (want, *torch.autograd.grad(want, wide, g.double())), strict=True):
        assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert all((t[~keep] == 0).all() for t in found[1:])
    assert (got[0] == 0).all()


def test_forward_mode_and_functional_transforms_work():
    x, y, v = (torch.randn(3, 4, dtype=torch.float64) for _ in range(3))

    def f(t):
        return gaussian_product(t, y, v, scale=0.5)

    forward = torch.func.jacfwd(f)(x)
    assert_close(forward, torch.func.jacrev(f)(x))
    assert_close(forward, torch.autograd.functional.jacobian(f, x))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [(((3, 4), (5, 6), (5, 2)), "same width"), (((3, 4), (5, 4), (6, 2)), "same number of tokens")],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        gaussian_product(*(torch.randn(s) for s in shapes), scale=1.0)


def test_integers_and_masks_of_numbers_are_refused():
    x = torch.randn(3, 4)
    with pytest.raises(ValueError, match="floating-point"):
        gaussian_product(x.long(), x, x, scale=1.0)
    with pytest.raises(ValueError, match="keep must be boolean"):
        gaussian_product(x, x, x, scale=1.0, keep=torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_on_a_gpu(dtype, tolerance, compiled):
    shape = ((2, 2, 300, 32), (2, 2, 700, 32), (2, 2, 700, 48))
    x, y, v = (torch.randn(s, device="cuda", dtype=dtype).requires_grad_() for s in shape)
    keep = (torch.rand(2, 1, 700, device="cuda") > 0.2).expand(2, 2, 700)
    f = torch.compile(gaussian_product, fullgraph=True) if compiled else gaussian_product
    got = f(x, y, v, scale=32**-0.5, keep=keep)
    weight = torch.randn_like(got)
    gradients = torch.autograd.grad((got * weight).sum(), (x, y, v))
    wide = [t.detach().double().requires_grad_() for t in (x, y, v)]
    want = exact(*wide, 32**-0.5, keep)
    truth = torch.autograd.grad((want * weight.double()).sum(), wide)
    for one, other in zip((got, *gradients), (want, *truth), strict=True):
        assert (one.double() - other).norm() < tolerance * other.norm()
    with plain_twins():
        plain = gaussian_product(x, y, v, scale=32**-0.5, keep=keep)
    assert (plain.double() - want).norm() < tolerance * want.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("holes", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
def test_lengths_that_differ_in_a_batch_on_a_gpu(dtype, tolerance, holes):
    ends = [0, 1, 64, 128, 500, 777]
    x, y, v = (torch.randn(6, 2, 777, 32, device="cuda", dtype=dtype).requires_grad_() for _ in range(3))
    keep = ends_at(ends, 777, holes).cuda()
    got = gaussian_product(x, y, v, scale=32**-0.5, keep=keep)
    g = torch.randn_like(got)
    found = torch.autograd.grad(got, (x, y, v), g)
    wide = [t.detach().double().requires_grad_() for t in (x, y, v)]
    want = gaussian_product(*wide, scale=32**-0.5, keep=keep)
    truth = torch.autograd.grad(want, wide, g.double())
    for one, other in zip((got, *found), (want, *truth), strict=True):
        for sample in range(len(ends)):
            assert (one[sample].double() - other[sample]).norm() <= tolerance * other[sample].norm()
