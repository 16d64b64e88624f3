"""Linear attention's kernels, in the interpreter or on a GPU, against the product in float64."""

import pytest
import torch

from wellcond.attention import linear_attention, linear_fused
from wellcond.attention.linear_fused import can_fuse, fused_linear, plain_linear
from wellcond.numerics.fastpaths import plain_twins
from wellcond.numerics.triton.linear import attend_short, plan_for, pull_short

# (b, h, n, m, p, c): more keys than queries and fewer, one token, several shares of the tokens, wide heads
SHAPES = [
    (1, 2, 70, 70, 16, 16), (2, 1, 33, 90, 8, 12), (1, 1, 1, 1, 4, 4), (2, 3, 130, 9, 20, 32), (1, 1, 40, 60, 64, 50),
    (1, 2, 1100, 1700, 4, 4),
]  # fmt: skip
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}


def tokens(shape, device, dtype=torch.float32):
    b, h, n, m, p, c = shape
    return [
        torch.randn(s, device=device).to(dtype).requires_grad_() for s in ((b, h, n, p), (b, h, m, p), (b, h, m, c))
    ]


def exact(q, k, v, factor):
    return q @ (k.mT @ v) * factor


def with_gradients(function, tensors, weight):
    out = function(*tensors)
    return (out, *torch.autograd.grad(out, tensors, weight.to(out.dtype)))


def assert_close(found, want, tolerance):
    for one, other in zip(found, want, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients(shape, dtype, device):
    if dtype == torch.bfloat16 and str(device) == "cpu":
        pytest.skip("Triton's interpreter cannot compute in bfloat16")
    tensors = tokens(shape, device, dtype)
    weight = torch.randn(*shape[:3], shape[5], device=device).to(dtype)
    found = with_gradients(lambda *t: fused_linear(*t, factor=0.3), tensors, weight)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    assert_close(found, with_gradients(lambda *t: exact(*t, factor=0.3), wide, weight), TOLERANCE[dtype])


@pytest.mark.parametrize("shape", SHAPES[:-1])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_program_a_head(shape, dtype, device):
    """What compiled code takes for short sequences; heads lie side by side, before and after."""
    if dtype == torch.bfloat16 and str(device) == "cpu":
        pytest.skip("Triton's interpreter cannot compute in bfloat16")
    tensors = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in tokens(shape, device, dtype)]
    weight = torch.randn(*shape[:3], shape[5], device=device).to(dtype)
    out = attend_short(*tensors, 0.3)
    assert out.transpose(1, 2).is_contiguous()
    wide = [t.double().requires_grad_() for t in tensors]
    want = with_gradients(lambda *t: exact(*t, factor=0.3), wide, weight)
    assert_close((out, *pull_short(weight, *tensors, 0.3)), want, TOLERANCE[dtype])


def test_shares_are_added_in_their_order_and_again(device):
    """Counters are zero again after a call: the next gives the same, to the bit, and no sample sees another."""
    q, k, v = (t.detach().requires_grad_() for t in tokens((2, 2, 1200, 1200, 4, 4), device))
    assert plan_for(q, k, v).key_shares > 1
    weight = torch.randn(2, 2, 1200, 4, device=device)
    once = with_gradients(lambda *t: fused_linear(*t, factor=0.3), (q, k, v), weight)
    again = with_gradients(lambda *t: fused_linear(*t, factor=0.3), (q, k, v), weight)
    one = [t.detach()[1:].requires_grad_() for t in (q, k, v)]
    alone = with_gradients(lambda *t: fused_linear(*t, factor=0.3), one, weight[1:])
    for a, b, c in zip(once, again, alone, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a[1:], c)


def test_any_strides(device):
    """Heads side by side, as one projection makes them; a gradient that is expanded."""
    packed = torch.randn(2, 20, 3, 2, 8, device=device).permute(2, 0, 3, 1, 4)
    tensors = [t.detach().requires_grad_() for t in packed]
    wide = [t.detach().double().requires_grad_() for t in tensors]
    for weight in (torch.randn(2, 2, 20, 8, device=device), torch.randn(1, device=device).expand(2, 2, 20, 8)):
        found = with_gradients(lambda *t: fused_linear(*t, factor=0.3), tensors, weight)
        assert_close(found, with_gradients(lambda *t: exact(*t, factor=0.3), wide, weight), TOLERANCE[torch.float32])


def test_it_has_second_derivatives(device):
    tensors = tokens((1, 2, 9, 11, 4, 5), device)

    def penalty(product, inputs):
        slopes = torch.autograd.grad(product(*inputs).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(s.square().sum() for s in slopes), inputs)  # pyright: ignore[reportCallIssue, reportArgumentType]

    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = penalty(lambda *t: exact(*t, factor=0.3), wide)
    assert_close(penalty(lambda *t: fused_linear(*t, factor=0.3), tensors), want, 1e-5)
    assert_close(penalty(lambda *t: plain_linear(*t, factor=0.3), tensors), want, 1e-5)


def test_a_batch_of_gradients(device):
    tensors = tokens((1, 2, 9, 11, 4, 5), device)
    weights = torch.randn(3, 1, 2, 9, 5, device=device)
    out = fused_linear(*tensors, factor=0.3)
    found = torch.autograd.grad(out, tensors, weights, is_grads_batched=True, retain_graph=True)
    for i, weight in enumerate(weights):
        one = torch.autograd.grad(out, tensors, weight, retain_graph=True)
        for a, b in zip(found, one, strict=True):
            torch.testing.assert_close(a[i], b)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_only_the_gradients_asked_for(which, device):
    tensors = [t.detach().requires_grad_(i == which) for i, t in enumerate(tokens((1, 1, 9, 11, 4, 5), device))]
    out = fused_linear(*tensors, factor=0.3)
    (found,) = torch.autograd.grad(out.sum(), tensors[which])
    wide = [t.detach().double().requires_grad_(i == which) for i, t in enumerate(tensors)]
    (want,) = torch.autograd.grad(exact(*wide, factor=0.3).sum(), wide[which])
    assert_close([found], [want], 1e-5)


def test_only_where_the_kernels_can(monkeypatch):
    q = torch.randn(1, 2, 10, 8)
    assert not can_fuse(q, q, q)  # on a CPU
    monkeypatch.setattr(linear_fused, "fused_kernels", lambda _: True)
    assert can_fuse(q, q, q)
    assert not can_fuse(q.double(), q.double(), q.double())
    assert not can_fuse(q, q, q.half())
    assert not can_fuse(q[0], q[0], q[0])
    wide = torch.randn(1, 1, 3, 65)
    assert not can_fuse(wide, wide, wide)
    none = q[:, :, :0]
    assert not can_fuse(none, q, q)
    far = torch.empty(1, device="meta").as_strided((2, 2, 10, 8), (1, 1, 2**30, 1))
    assert not can_fuse(far, far, far)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "width"), [(197, 64), (4096, 32), (40_000, 32), (1000, 20), (1000, 64)])
def test_on_a_gpu(n, width, dtype):
    tensors = tokens((2, 3, n, n, width, width), "cuda", dtype)
    weight = torch.randn(2, 3, n, width, device="cuda").to(dtype)
    assert can_fuse(*tensors)
    found = with_gradients(linear_attention, tensors, weight)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = with_gradients(lambda *t: exact(*t, factor=1 / 16), wide, weight)
    tolerance = 1e-5 if dtype == torch.float32 else TOLERANCE[dtype]
    assert_close(found, want, tolerance)
    for one, other in zip(with_gradients(linear_attention, tensors, weight), found, strict=True):
        assert torch.equal(one, other)
    with plain_twins():
        assert_close(with_gradients(linear_attention, tensors, weight), want, tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("n", "width"), [(65, 64), (197, 64), (49, 32), (50, 20), (300, 64)])
def test_compiled_on_a_gpu(n, width, dtype):
    packed = torch.randn(4, n, 3, 3, width, device="cuda").to(dtype).permute(2, 0, 3, 1, 4)
    tensors = [t.detach().requires_grad_() for t in packed]
    weight = torch.randn(4, 3, n, width, device="cuda").to(dtype)
    torch.compiler.reset()  # it counts how often a function is compiled, and gives up
    found = with_gradients(torch.compile(linear_attention, fullgraph=True), tensors, weight)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = with_gradients(lambda *t: exact(*t, factor=1 / 16), wide, weight)
    assert_close(found, want, 1e-5 if dtype == torch.float32 else TOLERANCE[dtype])
