"""Singular values and condition numbers against matrices whose singular values are known, or a float64 SVD."""

import contextlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from wellcond.numerics import singular
from wellcond.numerics.cores import on_cores
from wellcond.numerics.fastpaths import plain_twins
from wellcond.numerics.singular import (
    CHUNK_BYTES,
    Conditioning,
    condition_number,
    effective_rank,
    explain_method,
    measure_conditioning,
    singular_values,
    stable_rank,
)

HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
CEILING = {torch.float16: 2**10, torch.bfloat16: 2**7, torch.float32: 2**23, torch.float64: 2**52}

shapes = st.tuples(st.integers(1, 24), st.integers(1, 24))
batches = st.sampled_from([(), (1,), (3,), (2, 2), (0,), (2, 0)])
methods = st.sampled_from(["auto", "svd", "gram"])
seeds = st.integers(0, 2**32 - 1)


def orthonormal(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator, dtype=torch.float64))[0]


def with_values(values: Tensor, n: int, d: int, seed: int = 0) -> Tensor:
    """A random (n, d) float64 matrix with these min(n, d) singular values."""
    generator = torch.Generator().manual_seed(seed)
    m = values.numel()
    return (orthonormal(n, m, generator) * values) @ orthonormal(d, m, generator).mT


def spread(kappa: float, m: int) -> Tensor:
    return torch.logspace(0, -math.log10(kappa), m, dtype=torch.float64)


def true_kappa(x: Tensor) -> Tensor:
    s = torch.linalg.svdvals(x.double())
    return s[..., 0] / s[..., -1]


# Values


@given(shapes, batches, st.sampled_from(DTYPES), methods, seeds)
def test_values_are_those_of_a_float64_svd(shape, batch, dtype, method, seed):
    x = torch.randn(*batch, *shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    truth = torch.linalg.svdvals(x.double())
    found = singular_values(x, method=method)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_close(found.double(), truth, rtol=1e-4, atol=1e-7)
    assert (found[..., :-1] >= found[..., 1:]).all()
    kappa = condition_number(x, method=method)
    assert kappa.shape == batch
    truth = true_kappa(x)
    seen = truth <= CEILING[dtype]
    assert_close(kappa[seen].double(), truth[seen], rtol=1e-4, atol=0)
    assert kappa[~seen].isinf().all()


@pytest.mark.parametrize("method", ["svd", "gram"])
@pytest.mark.parametrize("shape", [(197, 192), (40, 130), (150, 400), (300, 20), (64, 64), (130, 130)])
@pytest.mark.parametrize("log10", [0, 0.5, 2, 4, 5, 5.5, 6, 6.5, 6.9])
def test_known_condition_numbers_in_float32(shape, log10, method):
    exact = with_values(spread(10**log10, min(shape)), *shape)
    x = exact.float()
    truth = true_kappa(x)  # of the rounded matrix: rounding itself moves κ by about 1e-7·κ
    assert_close(truth, torch.tensor(10.0**log10).double(), rtol=max(1e-6, 10**log10 * 1e-6), atol=0)
    if truth <= 2**23:
        assert_close(condition_number(x, method=method).double(), truth, rtol=5e-4 if 5 < log10 <= 6 else 1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(100, 1000), (197, 768), (255, 600), (300, 768)])
def test_flat_spectra_whose_gram_matrix_rounds_worst(shape, dtype):
    """All values equal but one or two, so that λmin is a small difference of large numbers: float32 entries bias it."""
    for kappa in (2e5, 4.9e5, 6e5, 1.09e6):
        for low in (1, 2):
            values = torch.ones(min(shape), dtype=torch.float64)
            values[-low:] = 1 / kappa
            x = with_values(values, *shape, seed=low).to(dtype)
            tolerance = 1e-4 if kappa == 2e5 else 5e-4 if kappa < 5e5 else 2e-3
            assert_close(condition_number(x).double(), true_kappa(x.double()), rtol=tolerance, atol=0)
            truth = torch.linalg.svdvals(x.double())
            assert_close(singular_values(x, method="gram").double(), truth, rtol=tolerance, atol=0)


@pytest.mark.parametrize("method", ["svd", "gram"])
@pytest.mark.parametrize("shape", [(60, 130), (150, 140)])
@pytest.mark.parametrize("log10", [1, 6, 7, 8, 9, 10, 11, 12])
def test_known_condition_numbers_in_float64(shape, log10, method):
    x = with_values(spread(10**log10, min(shape)), *shape)
    # Float64 itself holds κ to about 1e-16·κ.
    tolerance = max(5e-4 if log10 == 6 else 1e-4, 1e-15 * 10**log10)
    assert_close(condition_number(x, method=method), torch.tensor(10.0**log10).double(), rtol=tolerance, atol=0)


@pytest.mark.parametrize("m", [12, 40, 140])
def test_the_ceiling_is_a_sharp_edge(m):
    """Powers of two on a diagonal are exact in every dtype, so κ is known to the last bit on both sides of the edge."""
    for dtype in (torch.float32, torch.float64, *HALVES):
        for factor, status in ((0.5, "ok"), (1, "ok"), (2, "ceiling"), (4, "ceiling"), (2**20, "ceiling")):
            # In float64 the computation rounds as the input does, and the edge lies where that begins to show.
            kappa = CEILING[dtype] * factor / (16 if dtype == torch.float64 and factor <= 1 else 1)
            values = torch.ones(m, dtype=torch.float64)
            values[m // 2] = 1 / kappa
            x = torch.diag(values.to(dtype)) if dtype in HALVES else torch.diag(values).to(dtype)
            if not (x.diagonal() > 0).all():
                continue  # float16 has no such number
            for method in ("svd", "gram"):
                found = measure_conditioning(x, method=method)
                expected = "low_precision" if dtype in HALVES and status == "ok" else status
                assert found.status_names() == [expected], (dtype, factor, method)
                assert_close(found.kappa.item(), float(min(kappa, CEILING[dtype])), rtol=1e-4, atol=0)
                assert condition_number(x, method=method).isinf() == (status == "ceiling")


@pytest.mark.parametrize("method", ["svd", "gram"])
@pytest.mark.parametrize("shape", [(10, 60), (60, 10), (50, 50), (140, 200), (200, 140), (1500, 30)])
def test_rank_deficient_matrices_are_beyond_the_ceiling(shape, method):
    n, d = shape
    generator = torch.Generator().manual_seed(1)
    low_rank = torch.randn(n, 4, generator=generator, dtype=torch.float64) @ torch.randn(
        4, d, generator=generator, dtype=torch.float64
    )
    duplicated = torch.randn(n, d, generator=generator)
    if n <= d:
        duplicated[n // 2] = duplicated[0]
    else:
        duplicated[:, d // 2] = duplicated[:, 0]
    empty = torch.randn(n, d, generator=generator)
    (empty if n <= d else empty.mT)[min(n, d) // 3] = 0
    for x in (low_rank, duplicated, duplicated.double(), empty, empty.double(), torch.ones(n, d)):
        assert condition_number(x, method=method).isinf()
        found = measure_conditioning(x, method=method)
        assert found.status_names() == ["ceiling"]
        assert found.kappa == found.ceiling == CEILING[x.dtype]
        assert_close(found.log_kappa.item(), math.log(CEILING[x.dtype]))
        assert found.sigma_min * found.ceiling <= found.sigma_max * (
            math.sqrt(max(n, d)) if x.dtype == torch.float64 else 1
        )


@pytest.mark.parametrize("width", [0, 1e-9, 1e-6, 1e-4, 1e-3, 1e-2, 0.1, 1])
@pytest.mark.parametrize("m", [60, 140])
def test_close_singular_values_at_either_end(m, width):
    """Where an iteration is slow: many values, or two, within `width` of the smallest, of the largest, or of both."""
    for count in (2, m // 3):
        near = 1 + width * torch.linspace(0, 1, count, dtype=torch.float64)
        middle = torch.logspace(-1, -2, m - 2 * count, dtype=torch.float64)
        for floor in (1e-3, 1e-6):
            x = with_values(torch.cat([1 / near, middle, floor * near.flip(0)]), m, m + 7)
            tolerance = 5e-4 if floor == 1e-6 else 1e-4
            assert_close(condition_number(x, method="gram").item(), 1 / floor, rtol=tolerance, atol=0)
    assert_close(condition_number(with_values(torch.ones(m).double(), m, 2 * m)), torch.ones(()).double())


@given(st.integers(1, 40), st.sampled_from(DTYPES), methods, seeds)
def test_one_token_has_no_condition_number(d, dtype, method, seed):
    x = torch.randn(2, 1, d, generator=torch.Generator().manual_seed(seed)).to(dtype) + 1e-3
    for tokens in (x, x.mT):
        found = measure_conditioning(tokens, method=method)
        assert found.status_names() == ["single", "single"]
        assert found.kappa.isnan().all()
        assert found.log_kappa.isnan().all()
        length = tokens.double().flatten(1).norm(dim=1)
        assert_close(found.sigma_max.double(), length, rtol=1e-5, atol=0)
        assert_close(found.sigma_min, found.sigma_max)
        assert (condition_number(tokens, method=method) == 1).all()
        assert_close(stable_rank(tokens), torch.ones(2, dtype=stable_rank(tokens).dtype))
        assert_close(effective_rank(tokens), torch.ones(2, dtype=stable_rank(tokens).dtype))


@given(
    st.sampled_from([(torch.float32, -44, 37), (torch.float64, -320, 307), (torch.bfloat16, -36, 37)]),
    st.floats(0, 1),
    st.sampled_from(["svd", "gram"]),
)
def test_scale_does_not_matter(range_, position, method):
    dtype, low, high = range_
    exponent = math.floor((low + position * (high - low)) * math.log2(10))
    whole = torch.randint(-64, 65, (6, 9), generator=torch.Generator().manual_seed(3)).double()
    scale = 2.0 ** (exponent // 2)
    x = (whole / 64 * scale * 2.0 ** (exponent - exponent // 2)).to(dtype)
    back = x.double() / scale / 2.0 ** (exponent - exponent // 2)  # what is left of it in this dtype
    expected = measure_conditioning(back, method="svd")
    found = measure_conditioning(x, method=method)
    if expected.kappa > CEILING[dtype]:
        assert found.status_names() == ["ceiling"]
        return
    assert_close(found.kappa.double(), expected.kappa, rtol=1e-5, atol=0)
    assert_close(stable_rank(x).double(), stable_rank(back), rtol=1e-5, atol=0)
    assert_close(effective_rank(x).double(), effective_rank(back), rtol=1e-5, atol=0)
    assert found.sigma_max.isfinite()
    rescaled = found.sigma_max.double() / scale / 2.0 ** (exponent - exponent // 2)
    assert_close(rescaled, expected.sigma_max, rtol=1e-5 if abs(exponent) < 120 else 0.2, atol=0)


# What is not a number


@given(shapes, st.sampled_from(DTYPES), methods, st.sampled_from([math.nan, math.inf, -math.inf]), st.data())
def test_one_bad_value_spoils_its_matrix_and_no_other(shape, dtype, method, bad, data):
    x = torch.randn(4, *shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    clean = measure_conditioning(x, method=method)
    spoiled = x.clone()
    spoiled[1, data.draw(st.integers(0, shape[0] - 1)), data.draw(st.integers(0, shape[1] - 1))] = bad
    spoiled[2] = 0
    found = measure_conditioning(spoiled, method=method)
    assert [found.status_names()[i] for i in (1, 2)] == ["non_finite", "zero"]
    for value in (found.kappa, found.log_kappa, found.sigma_max, found.sigma_min):
        assert value[1].isnan()
    assert found.kappa[2].isnan()
    assert found.log_kappa[2].isnan()
    assert found.sigma_max[2] == found.sigma_min[2] == 0
    kappa = condition_number(spoiled, method=method)
    assert kappa[1].isnan()
    assert kappa[2].isinf()
    values = singular_values(spoiled, method=method)
    assert values[1].isnan().all()
    assert (values[2] == 0).all()
    for rank in (stable_rank(spoiled), effective_rank(spoiled)):
        assert rank[1].isnan()
        assert rank[2] == 0
    for i in (0, 3):
        assert found.status[i] == clean.status[i]
        assert_close(found.kappa[i], clean.kappa[i], rtol=0, atol=0, equal_nan=min(shape) == 1)
        assert torch.equal(singular_values(spoiled, method=method)[i], singular_values(x, method=method)[i])


@pytest.mark.parametrize("method", ["svd", "gram"])
def test_a_matrix_does_not_see_its_batch(method):
    """Slow, fast, hopeless, broken neighbours: the bits are the same as alone."""
    m, d = 140, 150
    kinds = [with_values(spread(kappa, m), m, d, seed=i) for i, kappa in enumerate((1, 1e3, 1e5, 1e6, 5e6, 1e9))]
    clustered = torch.cat([torch.ones(70), 1e-3 * torch.linspace(1.001, 1, 70)]).double()
    batch = torch.stack([*kinds, with_values(clustered, m, d), torch.zeros(m, d), torch.full((m, d), math.nan)]).float()
    together = measure_conditioning(batch, method=method)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    shuffled = measure_conditioning(batch[order], method=method)
    for name in ("kappa", "log_kappa", "sigma_max", "sigma_min", "status"):
        assert torch.equal(getattr(together, name)[order].nan_to_num(-1), getattr(shuffled, name).nan_to_num(-1)), name
    for i, x in enumerate(batch):
        alone = measure_conditioning(x, method=method)
        assert alone.status_names() == [together.status_names()[i]]
        assert_close(alone.kappa, together.kappa[i], rtol=1e-7, atol=0, equal_nan=True)


def test_chunks_change_nothing(monkeypatch):
    x = torch.randn(7, 20, 33)
    x[3], x[5, 0, 0] = 0, math.nan
    wide = torch.randn(5, 130, 131)

    def everything() -> list[Tensor]:
        results = []
        for tensor in (x, wide):
            for method in ("svd", "gram"):
                found = measure_conditioning(tensor, method=method)
                results += [found.kappa, found.log_kappa, found.sigma_max, found.sigma_min, found.status]
                results.append(singular_values(tensor, method=method))
            results += [stable_rank(tensor), effective_rank(tensor)]
        return results

    whole = everything()
    for size in (1, 120_000, 3_000_000):
        monkeypatch.setitem(CHUNK_BYTES, "cpu", size)
        for expected, found in zip(whole, everything(), strict=True):
            assert_close(found, expected, rtol=1e-7, atol=0, equal_nan=True)


@pytest.mark.parametrize("method", ["svd", "gram"])
def test_several_cores_change_nothing(monkeypatch, method):
    x = torch.randn(11, 20, 33)
    x[3], x[5, 0, 0] = 0, math.nan
    needs = torch.randn(5, 130, 131, requires_grad=True)

    def everything() -> list[Tensor]:
        found = measure_conditioning(x, method=method)
        results = [found.kappa, found.sigma_min, found.status, singular_values(x, method=method), effective_rank(x)]
        with torch.no_grad():
            results.append(condition_number(needs, method=method))
        with torch.inference_mode():
            results.append(condition_number(needs, method=method))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            results.append(condition_number(x, method=method))
        (gradient,) = torch.autograd.grad(measure_conditioning(needs, method=method).log_kappa.sum(), needs)
        return [*results, gradient]

    expected, split = everything(), list[int]()  # on one thread, as all tests are

    def counted(function, parts):
        split.append(len(parts))
        return on_cores(function, parts)

    monkeypatch.setattr(singular, "on_cores", counted)
    monkeypatch.setattr(singular, "LEAST_FOR_CORES", 0)
    torch.set_num_threads(4)
    try:
        for one, found in zip(expected, everything(), strict=True):
            assert_close(found, one, rtol=1e-7, atol=0, equal_nan=True)
    finally:
        torch.set_num_threads(1)
    assert split == [4, 4, 4, 3, 3, 4]  # 11 matrices, then 5; no derivative is split


# Precision


def test_half_precision_is_flagged_and_capped():
    well = with_values(spread(20, 12), 12, 30)
    badly = with_values(spread(1e5, 12), 12, 30)
    for dtype in HALVES:
        found = measure_conditioning(torch.stack([well, badly, 0 * well]).to(dtype))
        assert found.status_names() == ["low_precision", "ceiling", "zero"]
        assert found.ceiling == CEILING[dtype]
        assert found.kappa.dtype == torch.float32
        assert_close(found.kappa[0].item(), 20.0, rtol=0.1, atol=0)
        assert found.kappa[1] == CEILING[dtype]


def test_float8_is_measured_too():
    x = with_values(spread(3, 8), 8, 16).to(torch.float8_e4m3fn)
    found = measure_conditioning(x)
    assert found.ceiling == 8
    assert found.status_names() == ["low_precision"]
    assert_close(found.kappa.double(), true_kappa(x.double()), rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_lower_the_precision(dtype):
    x = with_values(spread(1e6, 140), 140, 150).float()
    for method in ("svd", "gram"):
        plain = measure_conditioning(x, method=method)
        with torch.autocast("cpu", dtype=dtype):
            inside = measure_conditioning(x, method=method)
            values = singular_values(x, method=method)
        assert torch.equal(plain.kappa, inside.kappa)
        assert torch.equal(values, singular_values(x, method=method))


def test_no_grad_and_inference_mode():
    x = torch.randn(2, 130, 140, requires_grad=True)
    with torch.no_grad():
        expected = condition_number(x)
        assert measure_conditioning(x).method == "gram"
    with torch.inference_mode():
        assert torch.equal(condition_number(x), expected)
    assert not expected.requires_grad


def test_compiled_calls_give_the_same():
    x = torch.randn(3, 6, 5)
    x[1, 0, 0] = math.nan
    compiled = torch.compile(condition_number, backend="eager")
    assert_close(compiled(x), condition_number(x), equal_nan=True)


# Ranks


def test_ranks_of_known_spectra():
    values = torch.tensor([4.0, 2.0, 2.0, 0.0]).double()
    x = with_values(values, 4, 9)
    assert_close(stable_rank(x).item(), 24 / 16)
    p = torch.tensor([0.5, 0.25, 0.25]).double()
    assert_close(effective_rank(x), (-(p * p.log()).sum()).exp(), rtol=1e-6, atol=0)
    assert_close(stable_rank(torch.eye(5, 7)).item(), 5.0)
    assert_close(effective_rank(torch.eye(5, 7)).item(), 5.0)


@given(shapes, seeds)
def test_ranks_lie_between_one_and_the_rank(shape, seed):
    x = torch.randn(3, *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    for rank in (stable_rank(x), effective_rank(x)):
        assert (rank >= 1 - 1e-9).all()
        assert (rank <= min(shape) + 1e-9).all()
    s = torch.linalg.svdvals(x)
    assert_close(stable_rank(x), (s.square().sum(-1) / s[:, 0].square()), rtol=1e-5, atol=0)


# Gradients


@pytest.mark.parametrize("function", [singular_values, condition_number, stable_rank, effective_rank])
@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (1, 4), (2, 3, 4)])
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:FutureWarning")  # torch's own, in forward mode
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_gradients(function, shape):
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, x, check_forward_ad=True)


def test_gradients_of_log_kappa_and_sigma():
    x = torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True)
    for name in ("kappa", "log_kappa", "sigma_max", "sigma_min"):
        assert torch.autograd.gradcheck(lambda x, name=name: getattr(measure_conditioning(x, method="gram"), name), x)


def test_gradients_stay_finite_where_values_repeat_or_vanish():
    repeated = torch.eye(4, 6, dtype=torch.float64)
    deficient = repeated.clone()
    deficient[3] = 0
    for function in (singular_values, stable_rank, effective_rank, condition_number):
        x = torch.stack([repeated, deficient, 0 * repeated, 0 * repeated + math.nan]).requires_grad_()
        function(x)[:3].nan_to_num(0, 0, 0).sum().backward()
        assert x.grad is not None
        assert x.grad.isfinite().all(), function
    # The sum of squares has the gradient 2X, repeated or not.
    x = torch.stack([repeated, deficient]).requires_grad_()
    singular_values(x).square().sum().backward()
    assert_close(x.grad, 2 * x.detach())


def test_the_svd_gives_the_derivative_whatever_the_method():
    x = with_values(spread(1e3, 130), 130, 131).requires_grad_()
    found = measure_conditioning(x, method="gram")
    assert found.method == "svd"
    assert measure_conditioning(x.detach(), method="gram").method == "gram"


# What it says


def test_explain_method_says_what_is_taken():
    for shape in ((8, 8), (64, 197, 768), (2, 3, 3136, 48)):
        for device in ("cpu", "cuda"):
            choice = explain_method(shape, device)
            assert choice.method in ("svd", "gram")
            assert len(choice.why) > 20
    assert explain_method((4, 4), derivative=True).method == "svd"
    assert explain_method((4, 4), extremes=False).why != explain_method((4, 4)).why
    x = torch.randn(3, 20, 30)
    assert measure_conditioning(x).method == explain_method(x.shape, x.device).method


def test_results_have_the_batch_shape():
    found = measure_conditioning(torch.randn(2, 0, 3, 4, 5))
    assert isinstance(found, Conditioning)
    assert found.kappa.shape == found.status.shape == (2, 0, 3)
    assert found.status_names() == []
    assert singular_values(torch.randn(2, 0, 3, 4, 5)).shape == (2, 0, 3, 4)
    assert stable_rank(torch.randn(4, 5)).shape == ()
    assert condition_number(torch.randn(0, 150, 160)).shape == (0,)
    x = torch.randn(3, 1, 4, 6)
    assert_close(condition_number(x.expand(3, 2, 4, 6))[:, 1], condition_number(x)[:, 0])
    assert_close(condition_number(x.mT), condition_number(x), rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(3, 3, dtype=torch.int64), "floating-point tensor, got torch.int64"),
        (torch.ones(3, 3, dtype=torch.complex64), "got torch.complex64; complex matrices are not supported"),
        (torch.ones(3, 3).to_sparse(), r"got torch.sparse_coo; .* x\.to_dense\(\)"),
        (torch.ones(3, 3, dtype=torch.bool), r"e\.g\. x\.float\(\)"),
        ([[1.0, 2.0]], r"got list; .* torch\.as_tensor\(x\)"),
        (torch.ones(5), r"\(…, n, d\), got shape \(5,\); one token is x\[None, :\]"),
        (torch.ones(()), "got shape"),
        (torch.ones(4, 0), "empty matrix"),
        (torch.ones(2, 0, 4), "n and d must be at least 1"),
    ],
)
def test_mistakes_are_named(x, message):
    for function in (singular_values, condition_number, measure_conditioning, stable_rank, effective_rank):
        with pytest.raises(ValueError, match=message):
            function(x)


def test_an_unknown_method_is_named():
    for function in (singular_values, condition_number, measure_conditioning):
        with pytest.raises(ValueError, match="unknown method 'qr'; the methods are 'auto', 'svd', 'gram'"):
            function(torch.ones(2, 2), method="qr")


# On the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
def test_cuda_agrees_with_the_cpu(fused):
    tolerance = {"rtol": 1e-3 if fused else 5e-4, "atol": 0, "equal_nan": True}
    for m, d in ((5, 9), (64, 192), (197, 192), (40, 600), (1, 8)):
        kappas = (1, 30, 1e3, 1e5, 4e5, 1e6, 3e6, 7e6, 2e7, 1e9)
        values = [spread(kappa, min(m, d)) for kappa in kappas]
        batch = torch.stack([with_values(v, m, d, seed=i) for i, v in enumerate(values)])
        batch = torch.cat([batch, torch.zeros(1, m, d), torch.full((1, m, d), math.nan), torch.ones(1, m, d)])
        for dtype in DTYPES:
            x = batch.to(dtype)
            here, values = measure_conditioning(x, method="svd"), singular_values(x, method="svd")
            for method in ("svd", "gram"):
                with contextlib.nullcontext() if fused else plain_twins():
                    there = measure_conditioning(x.cuda(), method=method)
                    found = singular_values(x.cuda(), method=method).cpu()
                assert there.status_names() == here.status_names(), (m, d, dtype, method)
                assert_close(there.kappa.cpu(), here.kappa, **tolerance)
                assert_close(there.sigma_max.cpu(), here.sigma_max, **tolerance)
                assert_close(there.log_kappa.exp().cpu(), there.kappa.cpu(), rtol=1e-5, atol=0, equal_nan=True)
                assert_close(found / found[:, :1], values / values[:, :1], rtol=5e-4, atol=1e-7, equal_nan=True)
            with contextlib.nullcontext() if fused else plain_twins():
                ranks = stable_rank(x.cuda()).cpu(), effective_rank(x.cuda()).cpu()
            assert_close(ranks[0], stable_rank(x), **tolerance)
            assert_close(ranks[1], effective_rank(x), rtol=1e-2, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_cuda_in_chunks(monkeypatch):
    x = torch.randn(40, 64, 100, device="cuda")
    whole = condition_number(x)
    monkeypatch.setitem(CHUNK_BYTES, "cuda", 10**6)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    assert_close(condition_number(x), whole, rtol=1e-7, atol=0)


@pytest.mark.gpu
def test_cuda_gradients():
    x = torch.randn(2, 4, 6, dtype=torch.float64, device="cuda", requires_grad=True)
    for function in (singular_values, condition_number, stable_rank, effective_rank):
        assert torch.autograd.gradcheck(function, x)
