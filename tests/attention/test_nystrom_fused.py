"""Nyström attention's fused path, in the interpreter or on a GPU, against the plain path in float64."""

import math

import pytest
import torch
import triton
import triton.language as tl

from wellcond.attention import nystrom_attention, nystrom_fused
from wellcond.attention.nystrom_fused import can_fuse, fused_nystrom
from wellcond.numerics.fastpaths import plain_twins
from wellcond.numerics.triton.plans import Kept

# (b, h, n, m, p, c, d): lengths that the segments do not divide, more keys than queries and fewer, one segment, as many
# segments as tokens, more than one share of the tokens
SHAPES = [
    (1, 2, 70, 70, 16, 16, 20), (2, 1, 33, 90, 8, 12, 32), (1, 1, 40, 37, 4, 4, 3), (1, 1, 9, 140, 20, 8, 1),
    (1, 1, 36, 36, 8, 8, 36), (1, 1, 300, 150, 4, 4, 8),
]  # fmt: skip
# Errors beside a small eigenvalue grow as it does, by 3.25 in each of six steps: 1e-7 becomes 1e-4.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}


def tokens(shape, device, dtype=torch.float32):
    b, h, n, m, p, c, _ = shape
    sizes = ((b, h, n, p), (b, h, m, p), (b, h, m, c))
    return [torch.randn(s, device=device).to(dtype).requires_grad_() for s in sizes]


def plain(q, k, v, d, iterations=6, scale=None):
    """The plain path, for as many landmarks as keys too."""
    from wellcond.attention.nystrom import _by_segments

    with plain_twins():
        return _by_segments(q, k, v, None, None, scale or 1 / math.sqrt(q.shape[-1]), d, iterations)


def plain_masked(q, k, v, keep, d, iterations=6, scale=0.3):
    from wellcond.attention.masks import KeyMask
    from wellcond.attention.nystrom import _by_segments

    with plain_twins():
        return _by_segments(q, k, v, KeyMask(keep=keep), keep, scale, d, iterations)


def masks(m, *kinds):
    """(b, 1, m): of each kind a row; a number is a length, "holes" a mask with many, "late" one that begins late."""
    rows = []
    for kind in kinds:
        row = torch.arange(m) < kind if isinstance(kind, int) else torch.rand(m) < 0.6
        if kind == "late":
            row = torch.arange(m) >= 2 * m // 3
        rows.append(row)
    return torch.stack(rows)[:, None]


def assert_close(found, want, tolerance):
    for one, other in zip(found, want, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm()


def with_gradients(function, tensors, weight=None):
    out = function(*tensors)
    weight = torch.randn(out.shape, device=out.device) if weight is None else weight.to(out.dtype)
    return weight, (out, *torch.autograd.grad((out * weight).sum(), tensors))


def both_ways(tensors, fused, truth, tolerance):
    """Value and gradients of `fused(*tensors)` against `truth` of the same in float64."""
    weight, found = with_gradients(fused, tensors)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    assert_close(found, with_gradients(truth, wide, weight)[1], tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_values_and_gradients(shape, dtype, device):
    if dtype == torch.bfloat16 and str(device) == "cpu":
        pytest.skip("Triton's interpreter cannot compute in bfloat16")
    d, s = shape[-1], 1 / math.sqrt(shape[4])
    both_ways(
        tokens(shape, device, dtype),
        lambda q, k, v: fused_nystrom(q, k, v, num_landmarks=d, num_iterations=6, scale=s),
        lambda q, k, v: plain(q, k, v, d),
        TOLERANCE[dtype],
    )


def test_many_tokens_and_segments(device):
    """197 tokens, a prime, as a ViT has them, and the default of 64 segments."""
    both_ways(
        tokens((2, 2, 197, 197, 16, 16, 64), device),
        lambda q, k, v: fused_nystrom(q, k, v, num_landmarks=64, num_iterations=6, scale=0.25),
        lambda q, k, v: nystrom_attention(q, k, v, num_landmarks=64),
        TOLERANCE[torch.float32],
    )


@pytest.mark.parametrize("iterations", [0, 1, 3])
@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_any_number_of_steps_and_any_scale(iterations, scale, device):
    both_ways(
        tokens((1, 1, 50, 41, 8, 8, 7), device),
        lambda q, k, v: fused_nystrom(q, k, v, num_landmarks=7, num_iterations=iterations, scale=scale),
        lambda q, k, v: plain(q, k, v, 7, iterations, scale),
        3 * TOLERANCE[torch.float32],
    )


@pytest.mark.parametrize(("dtype", "tolerance"), {**TOLERANCE, torch.float32: 3e-4}.items(), ids=str)
def test_as_many_steps_as_there_may_be(dtype, tolerance, device):
    """Rounding has grown by 3.25 in each, 12,000 times in eight: in float32 it is seen, and below half precision's."""
    if dtype == torch.bfloat16 and str(device) == "cpu":
        pytest.skip("Triton's interpreter cannot compute in bfloat16")
    steps = nystrom_fused.MOST_STEPS
    both_ways(
        tokens((1, 2, 150, 140, 16, 16, 40), device, dtype),
        lambda q, k, v: fused_nystrom(q, k, v, num_landmarks=40, num_iterations=steps, scale=0.25),
        lambda q, k, v: plain(q, k, v, 40, steps, 0.25),
        tolerance,
    )


MASKS = {
    "lengths": (300, 8, 8, 12, (300, 151, 40, 13)),
    "holes": (150, 8, 12, 10, ("holes", "late", 150, "holes")),
    "few": (70, 8, 8, 20, (20, 19, 1, 0, 21)),
    "none": (40, 4, 4, 5, (0,)),
    "beyond a share": (1100, 4, 4, 6, (1100, 3, 500, "late")),
    "one landmark": (50, 4, 4, 1, (50, 1, 0, "holes")),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("kind", MASKS)
def test_masks(kind, dtype, device):
    """Each sample by itself: errors of one are not hidden by another's size."""
    m, p, c, d, rows = MASKS[kind]
    keep = masks(m, *rows).to(device)
    tensors = tokens((len(rows), 1, m, m, p, c, d), device, dtype)
    weight, found = with_gradients(
        lambda *t: fused_nystrom(*t, keep, num_landmarks=d, num_iterations=2, scale=0.3), tensors
    )
    wide = [t.detach().double().requires_grad_() for t in tensors]
    _, want = with_gradients(lambda *t: plain_masked(*t, keep, d, 2), wide, weight)
    for b in range(len(rows)):
        assert_close([t[b] for t in found], [t[b] for t in want], max(3e-4, TOLERANCE[dtype]))  # as without masks
    gone = ~keep[..., None].expand_as(tensors[1][..., :1])
    for gradient in found[2:]:
        assert (gradient * gone == 0).all()


def test_few_tokens_are_softmax(device):
    from wellcond.attention import softmax_attention

    keep = masks(60, 9, 16, 1).to(device)
    both_ways(
        tokens((3, 2, 60, 60, 8, 8, 16), device),
        lambda *t: fused_nystrom(*t, keep, num_landmarks=16, num_iterations=6, scale=0.3),
        lambda *t: softmax_attention(*t, keep[:, :, None], scale=0.3),
        1e-6,
    )


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
def test_masks_of_any_shape_and_no_batch_mates(shape, device):
    """Of each head, of each sample, one for all; what is masked may be anything."""
    keep = torch.rand(*shape, 50, device=device) < 0.5
    tensors = tokens((2, 2, 50, 50, 8, 8, 7), device)
    settings = {"num_landmarks": 7, "num_iterations": 2, "scale": 0.3}
    weight, found = with_gradients(lambda *t: fused_nystrom(*t, keep, **settings), tensors)
    every = keep.expand(2, 2, 50)
    _, same = with_gradients(lambda *t: fused_nystrom(*t, every, **settings), tensors, weight)
    assert all(torch.equal(a, b) for a, b in zip(found, same, strict=True))
    one = [t.detach()[1:2].requires_grad_() for t in tensors]
    _, alone = with_gradients(lambda *t: fused_nystrom(*t, every[1:2], **settings), one, weight[1:2])
    assert all(torch.equal(a[1:2], b) for a, b in zip(found, alone, strict=True))
    hidden = [t.detach().masked_fill(~every[..., None], torch.nan) for t in tensors[1:]]
    out = fused_nystrom(tensors[0].detach(), *hidden, keep, **settings)
    assert torch.equal(out, found[0])


def test_a_mask_that_keeps_all(device):
    tensors = tokens((2, 2, 70, 70, 8, 8, 10), device)
    settings = {"num_landmarks": 10, "num_iterations": 2, "scale": 0.3}
    keep = torch.ones(2, 1, 70, dtype=torch.bool, device=device)
    weight, found = with_gradients(lambda *t: fused_nystrom(*t, keep, **settings), tensors)
    _, same = with_gradients(lambda *t: fused_nystrom(*t, **settings), tensors, weight)
    assert_close(found, [t.double() for t in same], 1e-6)


def test_many_tokens_are_numbered_in_blocks(device, monkeypatch):
    from wellcond.numerics.triton import nystrom_plan

    keep = masks(150, "holes", 100, 0, "late").to(device)
    tensors = tokens((4, 1, 150, 150, 4, 4, 6), device)
    settings = {"num_landmarks": 6, "num_iterations": 4, "scale": 0.3}
    weight, whole = with_gradients(lambda *t: fused_nystrom(*t, keep, **settings), tensors)
    monkeypatch.setattr(nystrom_plan, "MOST_RANKS", 32)
    monkeypatch.setattr(nystrom_plan, "_plans", Kept(9))
    _, found = with_gradients(lambda *t: fused_nystrom(*t, keep, **settings), tensors, weight)
    assert all(torch.equal(a, b) for a, b in zip(whole, found, strict=True))


def test_masks_in_the_operators_of_compiled_code(device):
    keep = masks(45, 45, 30, 3, 0).to(device)
    tensors = tokens((4, 1, 45, 45, 8, 12, 6), device)
    settings = (keep, 6, 3, 0.3)
    weight, eager = with_gradients(
        lambda *t: fused_nystrom(*t, keep, num_landmarks=6, num_iterations=3, scale=0.3), tensors
    )  # fmt: skip
    for wanted in (True, False):
        _, compiled = with_gradients(lambda *t: nystrom_fused._forward_op(*t, *settings, wanted)[0], tensors, weight)  # noqa: B023
        assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
        torch.library.opcheck(
            nystrom_fused._forward_op, (*tensors, *settings, wanted), test_utils=("test_schema", "test_faketensor")
        )  # fmt: skip


def test_which_masks_the_kernels_get(device, monkeypatch):
    """Boolean ones of keys that are the queries' too; all others are left to plain operations."""
    from wellcond.attention import nystrom

    called = []

    def fused(*given, **settings):
        called.append(given[3])
        return fused_nystrom(*given, **settings)

    monkeypatch.setattr(nystrom, "can_fuse", lambda *_, **__: True)
    monkeypatch.setattr(nystrom, "fused_nystrom", fused)
    q, k, v = (t.detach() for t in tokens((2, 2, 30, 30, 8, 8, 4), device))
    keep = masks(30, 30, 11).to(device)[:, None]
    out = nystrom_attention(q, k, v, keep, num_landmarks=4)
    assert len(called) == 1
    assert called[0].shape == (2, 1, 30)
    assert_close([out], [nystrom_attention(*(t.double() for t in (q, k, v)), keep.clone(), num_landmarks=4)], 1e-4)
    called.clear()
    nystrom_attention(q, k, v, torch.zeros(30, device=device), num_landmarks=4)
    nystrom_attention(q, k, v, keep, num_landmarks=4, query_mask=keep)
    nystrom_attention(q, k, v, num_landmarks=4, query_mask=keep)
    nystrom_attention(q[:, :, :20], k, v, keep, num_landmarks=4)
    assert not called


@pytest.mark.parametrize("larger", [1e3, 1e6])
@pytest.mark.parametrize("which", ["gradient", "value", "key"])
def test_small_channels_beside_a_large_one(which, larger, device):
    """Each channel has an exponent of its own: the small ones lose no digits."""
    q, k, v = tokens((1, 2, 70, 60, 8, 6, 32), device)
    weight = torch.randn(1, 2, 70, 6, device=device)
    with torch.no_grad():
        if which == "key":  # beside queries that are as much smaller there, so that logits stay
            k[..., 0] *= larger
            q[..., 0] /= larger
        else:
            {"gradient": weight, "value": v}[which][..., 0] *= larger
    out = fused_nystrom(q, k, v, num_landmarks=32, num_iterations=6, scale=0.35)
    found = (out, *torch.autograd.grad(out, (q, k, v), weight))
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    out = plain(*wide, 32, scale=0.35)
    for one, other in zip(found, (out, *torch.autograd.grad(out, wide, weight.double())), strict=True):
        errors = (one - other).norm(dim=-2) / other.norm(dim=-2)
        assert errors.max() < 5 * TOLERANCE[torch.float32]


@pytest.mark.parametrize("zero", ["value", "gradient", "both", "one head's"])
def test_zeros_have_no_scale(zero, device):
    q, k, v = tokens((1, 2, 40, 40, 8, 6, 16), device)
    weight = torch.randn(1, 2, 40, 6, device=device)
    with torch.no_grad():
        if zero in ("value", "both"):
            v.zero_()
        if zero in ("gradient", "both"):
            weight.zero_()
        if zero == "one head's":
            v[:, 0] = weight[:, 0] = 0
    out = fused_nystrom(q, k, v, num_landmarks=16, num_iterations=6, scale=0.35)
    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    exact = plain(*wide, 16, scale=0.35)
    found, want = torch.autograd.grad(out, (q, k, v), weight), torch.autograd.grad(exact, wide, weight.double())
    for one, other in zip((out, *found), (exact, *want), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-3, atol=1e-4)


def test_large_logits_keep_their_sums(device):
    """Equal tokens of norm 1,000: weights are equal, however large the logits."""
    one = torch.randn(1, 1, 1, 16, device=device)
    same = (1000 * one / one.norm()).expand(1, 1, 60, 16).contiguous()
    tensors = [same.clone().requires_grad_(), same.clone().requires_grad_(), torch.randn(1, 1, 60, 16, device=device)]
    tensors[2].requires_grad_()
    out = fused_nystrom(*tensors, num_landmarks=8, num_iterations=6, scale=0.25)
    dv = torch.autograd.grad(out, tensors[2], torch.ones_like(out))[0]
    torch.testing.assert_close(dv, torch.ones_like(dv), rtol=1e-3, atol=1e-3)


def test_a_batch_of_gradients_is_refused(device):
    tensors = tokens((1, 1, 20, 20, 8, 8, 4), device)
    out = fused_nystrom(*tensors, num_landmarks=4, num_iterations=2, scale=0.3)
    with pytest.raises(RuntimeError, match="vectorize=True"):
        torch.autograd.grad(out, tensors, torch.randn(3, *out.shape, device=device), is_grads_batched=True)


def test_without_a_gradient_it_is_the_same(device):
    tensors = tokens((1, 2, 70, 60, 8, 8, 10), device)
    settings = {"num_landmarks": 10, "num_iterations": 5, "scale": 0.3}
    with torch.no_grad():
        alone = fused_nystrom(*tensors, **settings)
    assert torch.equal(alone, fused_nystrom(*tensors, **settings))


@triton.jit
def bfloat16_parts(a):
    """Two parts of 8 bits each, as bfloat16 would hold them, in float32."""
    bits = a.to(tl.int32, bitcast=True)
    high = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    bits = (a - high).to(tl.int32, bitcast=True)
    return high, ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has bfloat16 itself")
@pytest.mark.parametrize("kind", ["rough", "smooth", "masked"])
def test_what_bfloat16_parts_lose(kind, monkeypatch):
    """The kernels for bfloat16, which the interpreter has not: its values in float32, in the same two parts.

    Nothing but the rounding of results may be left to err: 100 times less than bfloat16's own, 1.7e-3.
    """
    from wellcond.numerics.triton import landmark_sides, nystrom_plan, nystrom_sides

    make = nystrom_plan.Plan._make_launches

    def make_in_parts(self, longer):
        self.tokens = {"PARTS": True}
        make(self, longer)

    monkeypatch.setattr(nystrom_plan.Plan, "_make_launches", make_in_parts)
    monkeypatch.setattr(nystrom_plan, "_plans", Kept(9))
    for module in (landmark_sides, nystrom_sides):
        monkeypatch.setattr(module, "two_parts", bfloat16_parts)
    n = 180 if kind == "masked" else 210
    tensors = [t.detach() for t in tokens((1, 1, n, 180, 32, 32, 50), "cpu")]
    if kind == "smooth":  # neighbours alike, as segments hope
        tensors = [t.cumsum(2) / 8 for t in tensors]
    keep = masks(180, 150) if kind == "masked" else None
    both_ways(
        [t.bfloat16().float().requires_grad_() for t in tensors],
        lambda q, k, v: fused_nystrom(q, k, v, keep, num_landmarks=50, num_iterations=6, scale=0.18),
        lambda q, k, v: plain(q, k, v, 50, scale=0.18) if keep is None else plain_masked(q, k, v, keep, 50, 6, 0.18),
        5e-5,
    )


def test_equal_columns_share_their_gradient(device):
    """The first two segments of keys are alike, and near to all queries: two columns have the largest sum."""
    q, k, v = (t.detach() for t in tokens((1, 1, 20, 24, 4, 4, 6), device))
    q[..., 0] += 2
    k[:, :, :8] = torch.tensor([2.0, 0.0, 0.5, 0.0], device=device)
    both_ways(
        [t.requires_grad_() for t in (q, k, v)],
        lambda q, k, v: fused_nystrom(q, k, v, num_landmarks=6, num_iterations=2, scale=0.5),
        lambda q, k, v: plain(q, k, v, 6, 2, 0.5),
        TOLERANCE[torch.float32],
    )


def test_large_logits_are_finite(device):
    """Logits in the thousands: maxima are taken away before anything is raised to a power."""
    q, k, v = tokens((1, 1, 40, 150, 8, 8, 4), device)
    q, k = ((100 * t).detach().requires_grad_() for t in (q, k))
    _, found = with_gradients(
        lambda *t: fused_nystrom(*t, num_landmarks=4, num_iterations=6, scale=0.35), [q, k, v]
    )  # fmt: skip
    assert all(t.isfinite().all() for t in found)
    assert_close(found[:1], [plain(q.double(), k.double(), v.double(), 4, 6, 0.35)], 1e-2)


def test_any_strides_and_no_batch_mates(device):
    qkv = torch.randn(2, 40, 3, 2, 8, device=device, requires_grad=True)
    settings = {"num_landmarks": 9, "num_iterations": 2, "scale": 0.3}

    def attend(q, k, v):
        return fused_nystrom(q, k, v, **settings)

    parts = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    dense = [t.contiguous() for t in parts]
    weight, whole = with_gradients(attend, parts)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2)  # gradients have strides, too
    for one, other in zip(whole, with_gradients(attend, dense, weight)[1], strict=True):
        assert torch.equal(one, other)
    alone = with_gradients(attend, [t[1:2] for t in dense], weight[1:2])[1]
    for one, other in zip(whole, alone, strict=True):
        assert torch.equal(one[1:2], other)


def test_the_operators_of_compiled_code(device):
    """What compiled code calls: the same to the bit, and what it says of its shapes is true."""
    tensors = tokens((1, 2, 45, 38, 8, 12, 6), device)
    weight, eager = with_gradients(
        lambda *t: fused_nystrom(*t, num_landmarks=6, num_iterations=3, scale=0.3), tensors
    )  # fmt: skip
    _, compiled = with_gradients(lambda *t: nystrom_fused._forward_op(*t, None, 6, 3, 0.3, True)[0], tensors, weight)
    assert all(torch.equal(a, b) for a, b in zip(eager, compiled, strict=True))
    with torch.no_grad():
        out, *nothing = nystrom_fused._forward_op(*tensors, None, 6, 3, 0.3, False)
    assert torch.equal(out, eager[0])
    assert not any(t.numel() for t in nothing)
    for wanted, given in ((True, tensors), (False, [t.detach() for t in tensors])):
        torch.library.opcheck(
            nystrom_fused._forward_op, (*given, None, 6, 3, 0.3, wanted), test_utils=("test_schema", "test_faketensor")
        )  # fmt: skip


def test_a_graph_compiled_without_a_gradient_may_get_one(device):
    """Exported under no_grad, or a region compiled there and called elsewhere: the forward pass is run once more."""
    tensors = tokens((1, 2, 45, 38, 8, 12, 6), device)
    weight, want = with_gradients(lambda *t: nystrom_fused._forward_op(*t, None, 6, 3, 0.3, True)[0], tensors)
    _, found = with_gradients(lambda *t: nystrom_fused._forward_op(*t, None, 6, 3, 0.3, False)[0], tensors, weight)
    assert all(torch.equal(a, b) for a, b in zip(want, found, strict=True))


def test_inference_mode_with_gradients_asked_for(device):
    tensors = tokens((1, 2, 45, 38, 8, 12, 6), device)
    settings = {"num_landmarks": 6, "num_iterations": 3, "scale": 0.3}
    with torch.inference_mode(), torch.enable_grad():
        out = fused_nystrom(*tensors, **settings)
    assert torch.equal(out, fused_nystrom(*tensors, **settings))


@pytest.mark.parametrize("size", [1e-35, 1e-33, 1e33])
def test_values_of_any_size(size, device):
    both_ways(
        [
            *tokens((1, 1, 40, 40, 8, 8, 10), device)[:2],
            (torch.randn(1, 1, 40, 8, device=device) * size).requires_grad_(),
        ],
        lambda q, k, v: fused_nystrom(q, k, v, num_landmarks=10, num_iterations=6, scale=0.3) / size,
        lambda q, k, v: plain(q, k, v, 10, scale=0.3) / size,
        TOLERANCE[torch.float32],
    )


def test_a_graph_that_is_kept_gives_the_same_again(device):
    """Nothing that the gradient needs is written to on the way back."""
    tensors = tokens((1, 2, 70, 60, 8, 8, 10), device)
    out = fused_nystrom(*tensors, num_landmarks=10, num_iterations=5, scale=0.3)
    first, again = (torch.autograd.grad(out.sum(), tensors, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_what_is_kept_for_the_gradient(device):
    """A large matrix for A and each step, a narrow one for each step: twelve layers have all that at once."""
    tensors = tokens((2, 3, 197, 197, 64, 64, 64), device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        fused_nystrom(*tensors, num_landmarks=64, num_iterations=6, scale=0.125)
    beside = sum(t.nbytes for t in kept if not any(t is given for given in tensors)) / 6  # of a head
    large, narrow = 4 * 64 * 64, 4 * 64 * 64
    assert beside < 1.05 * (7 * large + (4 + 6) * narrow)


def test_only_where_the_kernels_can():
    q = torch.randn(1, 2, 10, 8)
    assert not can_fuse(q, q, q, num_landmarks=4, num_iterations=6)  # on a CPU
    with pytest.raises(ValueError, match="num_iterations"):
        fused_nystrom(q, q, q, num_landmarks=4, num_iterations=-1, scale=1.0)


def test_only_what_the_kernels_can_do(monkeypatch):
    """Rows 2³⁰ numbers apart, and more heads than a grid has programs, are left to plain operations."""
    for name in ("fused_kernels", "large_programs"):
        monkeypatch.setattr(nystrom_fused, name, lambda _: True)
    q = torch.empty(1, device="meta", dtype=torch.bfloat16).as_strided((2, 2, 10, 8), (320, 160, 8, 1))
    far, many = q.as_strided(q.shape, (1, 1, 2**30, 1)), q[:1].expand(40_000, 2, 10, 8)
    assert nystrom_fused.can_fuse(q, q, q, num_landmarks=4, num_iterations=8)
    assert not nystrom_fused.can_fuse(q, q, q, num_landmarks=4, num_iterations=9)  # where errors have grown
    assert not nystrom_fused.can_fuse(*[q.float()] * 3, num_landmarks=4, num_iterations=6)
    assert not nystrom_fused.can_fuse(far, q, q, num_landmarks=4, num_iterations=6)
    assert not nystrom_fused.can_fuse(q, q, far, num_landmarks=4, num_iterations=6)
    assert not nystrom_fused.can_fuse(many, many, many, num_landmarks=4, num_iterations=6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("n", "width", "landmarks"),
    [(1000, 32, 128), (1000, 64, 64), (1000, 20, 70), (4096, 64, 128), (197, 32, 64), (500, 32, 20)],
)
def test_on_a_gpu(dtype, n, width, landmarks):
    tensors = [torch.randn(4, 2, n, width, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    fits = dtype == torch.bfloat16 or (dtype == torch.float16 and (width <= 32 or landmarks <= 64))
    assert can_fuse(*tensors, num_landmarks=landmarks, num_iterations=6) == fits

    def attend(q, k, v):
        return nystrom_attention(q, k, v, num_landmarks=landmarks)

    both_ways(tensors, attend, attend, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("n", "landmarks"), [(777, 128), (2048, 64)])
def test_masks_on_a_gpu(dtype, n, landmarks):
    tensors = [torch.randn(4, 2, n, 32, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    keep = masks(n, n, n // 3, landmarks // 2, "holes").cuda()[:, None]

    def attend(q, k, v):
        return nystrom_attention(q, k, v, keep, num_landmarks=landmarks)

    both_ways(tensors, attend, attend, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("conv", [False, True])
def test_compiled_is_the_same(conv):
    tensors = [torch.randn(4, 2, 600, 32, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    kernel = torch.randn(2, 5, device="cuda", dtype=torch.bfloat16) if conv else None

    def attend(q, k, v):
        return nystrom_attention(q, k, v, num_landmarks=64, conv_kernel=kernel)

    weight, eager = with_gradients(attend, tensors)
    faster = torch.compile(attend, fullgraph=True)
    _, compiled = with_gradients(faster, tensors, weight)
    assert_close(compiled, [t.double() for t in eager], 1e-2)
    with torch.no_grad():
        assert_close([faster(*tensors)], [eager[0].double()], 1e-2)


@pytest.mark.gpu
def test_it_repeats_to_the_bit():
    tensors = [torch.randn(1, 2, 40000, 32, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    weight, once = with_gradients(lambda *t: nystrom_attention(*t, num_landmarks=128), tensors)
    _, again = with_gradients(lambda *t: nystrom_attention(*t, num_landmarks=128), tensors, weight)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
