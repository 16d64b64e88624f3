"""Skyformer's fused path, in the interpreter or on a GPU, against the formula in float64 and its autograd."""

import contextlib
import math

import pytest
import torch

from wellcond.attention import skyformer_attention, skyformer_fused
from wellcond.attention.landmarks import landmark_positions
from wellcond.attention.skyformer_fused import can_fuse, fused_skyformer
from wellcond.numerics.gaussian_weights import gaussian_weights

SHAPES = [(1, 2, 70, 70, 16, 16, 20), (2, 1, 33, 90, 8, 12, 32), (1, 1, 5, 7, 4, 4, 3), (2, 2, 200, 130, 20, 8, 70)]


def exact(q, k, v, rows, scale, gamma, keep=None, valid=None):
    """In the dtype of the tensors; landmarks that are not valid are left out."""
    weights, gram, left = (gaussian_weights(a, b, scale=scale) for a, b in ((rows, k), (rows, rows), (q, rows)))
    if keep is not None:
        weights = weights * keep[..., None, :]
    if valid is not None:
        weights, left = weights * valid[..., :, None], left * valid[..., None, :]
        gram = gram * valid[..., :, None] * valid[..., None, :]
    eye = torch.eye(rows.shape[-2], dtype=torch.bool, device=rows.device)
    return left @ torch.linalg.solve(gram.masked_fill(eye, 1 + gamma), weights @ v)


def assert_close(found, want, tolerance):
    for one, other in zip(found, want, strict=True):
        assert one.isfinite().all()
        assert (one.double() - other).norm() <= tolerance * other.norm()


TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def both_ways(tensors, fused, plain, tolerance):
    """Value and gradients of `fused(*tensors)` against `plain` of the same in float64."""
    out = fused(*tensors)
    weight = torch.randn(out.shape, device=out.device)
    gradients = torch.autograd.grad((out * weight).sum(), tensors)
    wide = [t.detach().double().requires_grad_() for t in tensors]
    want = plain(*wide)
    truth = torch.autograd.grad((want * weight.double()).sum(), wide)
    assert_close((out, *gradients), (want, *truth), tolerance)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_any_rows_are_landmarks(shape, masked, device):
    b, h, n, m, p, c, d = shape
    tensors = [
        torch.randn(s, device=device).requires_grad_() for s in ((b, h, n, p), (b, h, m, p), (b, h, m, c), (b, h, d, p))
    ]
    keep = (torch.rand(b, 1, m, device=device) > 0.3).expand(b, h, m) if masked else None
    valid = (torch.arange(d, device=device) < max(1, d - 2)).expand(b, h, d) if masked else None
    s = 1 / math.sqrt(p)

    def fused(q, k, v, rows):
        return fused_skyformer(q, k, v, keep, rows=rows, valid=valid, scale=s, gamma=0.125)

    both_ways(tensors, fused, lambda q, k, v, rows: exact(q, k, v, rows, s, 0.125, keep, valid), 1e-4)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["spread", "random"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tokens_are_landmarks(shape, method, dtype, device):
    if dtype == torch.bfloat16 and str(device) == "cpu":
        pytest.skip("Triton's interpreter cannot compute in bfloat16")
    b, h, n, m, p, c, d = shape
    sizes = ((b, h, n, p), (b, h, m, p), (b, h, m, c))
    tensors = [torch.randn(s, device=device).to(dtype).requires_grad_() for s in sizes]
    s = 1 / math.sqrt(p)
    at, of_queries = landmark_positions(tensors[0], tensors[1], d, method)
    at = at.expand(b, -1) if method == "random" else at[None]

    def plain(q, k, v):
        index = at.expand(b, -1)[:, None, :, None].expand(b, h, -1, p)
        rows = torch.cat([q.gather(2, index[:, :, :of_queries]), k.gather(2, index[:, :, of_queries:])], 2)
        return exact(q, k, v, rows, s, 0.125)

    both_ways(
        tensors,
        lambda q, k, v: fused_skyformer(q, k, v, positions=at, of_queries=of_queries, scale=s, gamma=0.125),
        plain,
        TOLERANCE[dtype],
    )


def test_any_strides_and_no_batch_mates(device):
    """1,100 tokens are two shares, in a batch of three as alone."""
    qkv = torch.randn(3, 1100, 3, 2, 8, device=device)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    at, of_queries = landmark_positions(q, k, 10, "spread")
    settings = {"positions": at[None], "of_queries": of_queries, "scale": 0.3, "gamma": 0.1}
    whole = fused_skyformer(q, k, v, **settings)
    assert torch.equal(whole, fused_skyformer(q.contiguous(), k.contiguous(), v.contiguous(), **settings))
    assert torch.equal(whole[1:2], fused_skyformer(q[1:2], k[1:2], v[1:2], **settings))


def test_masks_of_any_strides(device):
    q, k, v = (torch.randn(2, 2, 40, 16, device=device) for _ in range(3))
    keep, valid = (torch.rand(n, 2, device=device) > 0.5 for n in (40, 20))  # as those have them who put tokens first
    settings = {"rows": q[:, :, :20].contiguous(), "scale": 0.25, "gamma": 0.1}
    sideways = [mask.T[:, None, :].expand(2, 2, -1) for mask in (keep, valid)]
    found, want = (
        fused_skyformer(q, k, v, a, valid=b, **settings) for a, b in (sideways, [m.contiguous() for m in sideways])
    )
    assert torch.equal(found, want)


def ends_at(ends, m, device, holes=False):
    """A mask (b, 1, m) for each end; with holes in it, but never at the last key."""
    keep = torch.arange(m) < torch.tensor(ends)[:, None]
    if holes:
        keep &= torch.rand(len(ends), m, generator=torch.Generator().manual_seed(1)) > 0.4
        keep[[i for i, end in enumerate(ends) if end], [end - 1 for end in ends if end]] = True
    return keep[:, None].to(device)


@contextlib.contextmanager
def no_zeros_by_chance():
    """What is only allocated holds NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("m", "ends"),
    [(200, [0, 1, 64, 128, 150, 200]), (1100, [0, 640, 700, 1100])],  # one share; two, of 640 at most
)
@pytest.mark.parametrize("holes", [False, True])
def test_shares_end_with_the_last_key_that_counts(m, ends, holes, device):
    b, h, n, d = len(ends) // 2, 2, 40, 12
    keep = ends_at(ends, m, device, holes).view(b, h, m)
    q, k, v, rows = (torch.randn(b, h, t, 8, device=device).requires_grad_() for t in (n, m, m, d))
    at = torch.cat([torch.arange(6, device=device), torch.linspace(0, m - 1, 6, device=device).long()])
    weight = torch.randn(b, h, n, 8, device=device)
    for tensors, settings in (
        ((q, k, v, rows), {"rows": rows}),
        ((q, k, v), {"positions": at, "of_queries": 6}),  # tokens that are masked may be landmarks, with a gradient
    ):
        with no_zeros_by_chance():
            out = fused_skyformer(q, k, v, keep, **settings, scale=0.3, gamma=0.125)
            found = torch.autograd.grad((out * weight).sum(), tensors)
        wide = [t.detach().double().requires_grad_() for t in tensors]
        chosen = wide[3] if len(wide) > 3 else torch.cat([wide[0][:, :, at[:6]], wide[1][:, :, at[6:]]], 2)
        want = exact(*wide[:3], chosen, 0.3, 0.125, keep)
        truth = torch.autograd.grad((want * weight.double()).sum(), wide)
        for head in range(b * h):
            one, other = ([t.flatten(0, 1)[head] for t in all_of] for all_of in ((out, *found), (want, *truth)))
            assert_close(one, other, 1e-4)
        assert (found[2][~keep] == 0).all()
        assert len(tensors) == 3 or (found[1][~keep] == 0).all()


def test_what_does_not_count_may_be_anything(device):
    keep = ends_at([0, 100, 130], 200, device, holes=True)
    q, k, v, rows = (torch.randn(3, 1, t, 8, device=device) for t in (40, 200, 200, 12))
    results = []
    for anything in (0.0, torch.nan):
        tensors = [t.clone() for t in (q, k, v, rows)]
        tensors[1][~keep], tensors[2][~keep] = anything, anything
        tensors = [t.requires_grad_() for t in tensors]
        with no_zeros_by_chance():
            out = fused_skyformer(*tensors[:3], keep, rows=tensors[3], scale=0.3, gamma=0.1)
            results.append((out, *torch.autograd.grad(out.square().sum(), tensors)))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[0][0][0] == 0).all()


def test_more_padding_and_batch_mates_change_no_bit(device):
    """Up to 1,023 keys are one share."""
    keep = ends_at([100, 150, 0], 150, device, holes=True)
    given = [torch.randn(3, 1, t, 8, device=device) for t in (40, 150, 150, 12)]
    results = []
    for more, samples in ((0, slice(3)), (7, slice(3)), (106, slice(3)), (600, slice(1))):
        q, k, v, rows = (t[samples] for t in given)
        k, v = (torch.nn.functional.pad(t, (0, 0, 0, more)) for t in (k, v))
        tensors = [t.clone().requires_grad_() for t in (q, k, v, rows)]
        mask = torch.nn.functional.pad(keep[samples], (0, more))
        out = fused_skyformer(*tensors[:3], mask, rows=tensors[3], scale=0.3, gamma=0.1)
        results.append([t[:, :, :150] for t in (out, *torch.autograd.grad(out.square().sum(), tensors))])
    for other in results[1:]:
        assert all(torch.equal(a, b[: len(a)]) for a, b in zip(other, results[0], strict=True))


def test_only_where_the_kernels_can():
    q = torch.randn(1, 2, 10, 8)
    assert not can_fuse(q, q, q, landmarks=4, gamma=0.1)  # on a CPU


def test_only_what_the_kernels_can_address(monkeypatch):
    """Rows 2³⁰ numbers apart, and more heads than a grid has programs, are left to plain operations."""
    for name in ("fused_kernels", "large_programs"):
        monkeypatch.setattr(skyformer_fused, name, lambda _: True)
    q = torch.empty(1, device="meta").as_strided((2, 2, 10, 8), (320, 160, 8, 1))
    far, many = q.as_strided(q.shape, (1, 1, 2**30, 1)), q[:1].expand(40_000, 2, 10, 8)
    assert skyformer_fused.can_fuse(q, q, q, landmarks=4, gamma=0.1)
    assert not skyformer_fused.can_fuse(far, q, q, landmarks=4, gamma=0.1)
    assert not skyformer_fused.can_fuse(q, q, far, landmarks=4, gamma=0.1)
    assert not skyformer_fused.can_fuse(many, many, many, landmarks=4, gamma=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("width", "landmarks"), [(32, 128), (64, 128), (64, 40), (20, 70)])
def test_on_a_gpu(dtype, width, landmarks):
    tensors = [torch.randn(4, 2, 1000, width, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]
    assert can_fuse(*tensors, landmarks=landmarks, gamma=0.1) == (width <= 32 or dtype == torch.bfloat16)

    def attend(q, k, v):
        return skyformer_attention(q, k, v, num_landmarks=landmarks)

    both_ways(tensors, attend, attend, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("holes", [False, True])
def test_masks_that_end_anywhere_on_a_gpu(dtype, holes):
    keep = ends_at([0, 128, 700, 1024, 1500, 2048], 2048, "cuda", holes)
    tensors = [torch.randn(6, 2, 2048, 32, device="cuda", dtype=dtype).requires_grad_() for _ in range(3)]

    def attend(q, k, v):
        return skyformer_attention(q, k, v, keep[:, None], num_landmarks=64)

    both_ways(tensors, attend, attend, TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("landmarks", ["spread", "random", "segment"])
def test_compiled_is_the_same(landmarks):
    tensors = [torch.randn(4, 2, 600, 32, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    keep = torch.ones(4, 1, 1, 600, dtype=torch.bool, device="cuda")
    keep[1, ..., 100:] = False
    for mask in (None, keep):

        def attend(q, k, v, mask=mask):
            return skyformer_attention(q, k, v, mask, num_landmarks=64, landmarks=landmarks)

        found = []
        for function in (attend, torch.compile(attend, fullgraph=True)):
            torch.manual_seed(0)
            out = function(*tensors)
            found.append((out, *torch.autograd.grad(out.float().square().sum(), tensors)))
        if landmarks != "random":  # compiled code has random numbers of its own
            assert_close(found[0], [t.double() for t in found[1]], 2e-2)


@pytest.mark.gpu
def test_it_repeats_to_the_bit():
    tensors = [torch.randn(1, 2, 40000, 32, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in range(3)]
    once, again = (
        (out := skyformer_attention(*tensors), *torch.autograd.grad(out.float().square().sum(), tensors))
        for _ in range(2)
    )
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.parametrize("where", ["query", "key", "landmark"])
def test_nan_is_not_hidden(where, device):
    """A weight that is no number must not become a one: the sample that holds it shows it, and no other."""
    tensors = [torch.randn(2, 1, 40, 8, device=device) for _ in range(3)]
    at, of_queries = landmark_positions(tensors[0], tensors[1], 8, "spread")
    token = int(at[0]) if where == "landmark" else int(at[0]) + 1
    settings = {"positions": at, "of_queries": of_queries, "scale": 0.3, "gamma": 0.1}
    clean = fused_skyformer(*tensors, **settings)
    tensors[1 if where == "key" else 0][0, 0, token, 3] = torch.nan
    out = fused_skyformer(*tensors, **settings)
    assert out[0, 0, token].isnan().all()
    assert out[0].isnan().all() == (where != "query")
    assert torch.equal(out[1], clean[1])


def test_a_graph_that_is_kept_gives_the_same_again(device):
    """Nothing that the gradient needs is written to on the way back, and no more is kept than that."""
    b, h, n, d, p = 2, 3, 90, 64, 64
    tensors = [torch.randn(b, h, n, p, device=device).requires_grad_() for _ in range(3)]
    positions = torch.arange(d, device=device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = fused_skyformer(*tensors, positions=positions, of_queries=32, scale=0.125, gamma=0.1)
    first, again = (torch.autograd.grad(out.sum(), tensors, retain_graph=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    beside = sum(t.nbytes for t in kept if not any(t is given for given in (*tensors, positions)))
    assert beside < 1.05 * b * h * (8 * d * d + 2 * 4 * d * p)  # the inverse, landmarks and what was solved
