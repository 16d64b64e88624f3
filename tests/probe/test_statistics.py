"""Sums merge: halves make the whole, the order of samples does not matter, and one bad sample spoils no other."""

import math
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor
from torch.nn import functional as F

from wellcond.probe.attention import Heard
from wellcond.probe.places import Place
from wellcond.probe.statistics import DTYPES, SPECTRUM_POINTS, Sums, spectrum_indices

SA, MLP = Place("blocks.0", 0, "sa"), Place("blocks.0", 0, "mlp")


@st.composite
def samples(draw: st.DrawFn) -> Tensor:
    """(b, n, d) with good samples, and some that are NaN, infinite, zero, or of rank one."""
    n, d = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    kinds = draw(
        st.lists(st.sampled_from(["good", "good", "good", "nan", "inf", "zero", "rank one"]), min_size=2, max_size=8)
    )
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    x = torch.randn(len(kinds), n, d, generator=generator)
    for i, kind in enumerate(kinds):
        if kind in ("nan", "inf"):
            x[i, 0, -1] = float(kind)
        elif kind == "zero":
            x[i] = 0
        elif kind == "rank one":
            x[i] = 2.0
    return x


def merged(first: Sums, second: Sums) -> Sums:
    """As over_ranks does it: sums are added, and of maxima the larger is taken."""
    size = max(first.decays.shape[2], second.decays.shape[2])
    one, two = (F.pad(decays, (0, size - decays.shape[2])) for decays in (first.decays, second.decays))
    return Sums(
        places=first.places,
        totals=first.totals + second.totals,
        maxima=torch.maximum(first.maxima, second.maxima),
        decays=one + two,
    )


def assert_same(found: Sums, expected: Sums) -> None:
    for one, two in zip(found.rows(run="", step=0), expected.rows(run="", step=0), strict=True):
        values = one.pop("value"), two.pop("value")
        assert one == two
        assert values[0] == pytest.approx(values[1], rel=1e-6, abs=1e-9, nan_ok=True), one


def measure(x: Tensor, *, rank_samples: int = 100) -> Sums:
    return Sums.measure([SA], {SA: x}, {}, rank_samples=rank_samples, spectrum=True)


@given(samples(), st.data())
def test_halves_make_the_whole(x: Tensor, data: st.DataObject) -> None:
    middle = data.draw(st.integers(0, len(x)))
    assert_same(merged(measure(x[:middle]), measure(x[middle:])), measure(x))


@given(samples(), st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(x: Tensor, random: Any) -> None:
    order = list(range(len(x)))
    random.shuffle(order)
    assert_same(measure(x[order]), measure(x))


@given(samples())
def test_the_rows_are_the_truth(x: Tensor) -> None:
    rows = {row["name"]: row for row in measure(x).rows(run="r", step=3)}
    finite = x.isfinite().all((1, 2))
    live, single = finite & (x != 0).any(2).any(1), min(x.shape[1:]) == 1
    good = live & (not single)
    assert rows["excluded"]["value"] == int((~good).sum())
    assert rows["log_kappa"]["count"] == int(good.sum())
    if not good.any():
        assert all(math.isnan(rows[name]["value"]) for name in ("log_kappa", "sigma_max", "stable_rank"))
        assert rows["log_kappa"]["status"] == ("non_finite" if not finite.all() else "single" if live.all() else "zero")
        return
    s = torch.linalg.svdvals(x[good].double())
    kappa = s[:, 0] / s[:, -1]
    capped = kappa > 2**23
    assert rows["capped"]["value"] == int(capped.sum())
    log_kappa = kappa.clamp_max(2**23).log()
    assert rows["log_kappa"]["value"] == pytest.approx(float(log_kappa.mean()), rel=1e-3, abs=1e-5)
    assert rows["log_kappa_max"]["value"] == pytest.approx(float(log_kappa.max()), rel=1e-3, abs=1e-5)
    assert rows["sigma_max"]["value"] == pytest.approx(float(s[:, 0].mean()), rel=1e-4)
    decay = (s / s[:, :1])[:, 0].log().mean().exp()
    assert rows["sigma.0"]["value"] == pytest.approx(float(decay), rel=1e-4)
    worst = (
        "non_finite" if not x.isfinite().all() else "ceiling" if capped.any() else "zero" if not good.all() else "ok"
    )
    assert rows["log_kappa"]["status"] == worst


@given(st.integers(1, 5000))
def test_points_of_the_spectrum(size: int) -> None:
    indices = spectrum_indices(size)
    assert indices == sorted(set(indices))
    assert (indices[0], indices[-1]) == (0, size - 1)
    assert len(indices) == min(size, SPECTRUM_POINTS)


def test_places_of_one_shape_are_not_mixed_up() -> None:
    x, y = torch.randn(3, 5, 4), 7 * torch.randn(3, 5, 4)
    both = Sums.measure([SA, MLP], {SA: x, MLP: y}, {}).rows(run="", step=0)
    alone = [Sums.measure([p], {p: t}, {}).rows(run="", step=0) for p, t in ((SA, x), (MLP, y))]
    assert both == [*alone[0], *alone[1]]


def test_batches_are_cut_where_memory_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {Place(f"blocks.{i}", i, "sa"): torch.randn(3, 5, 4) for i in range(5)}
    whole = Sums.measure(list(tensors), tensors, {}, spectrum=True).rows(run="", step=0)
    monkeypatch.setattr("wellcond.probe.statistics.BATCH_BYTES", 500)
    assert Sums.measure(list(tensors), tensors, {}, spectrum=True).rows(run="", step=0) == whole


def test_nothing_measured_makes_no_rows() -> None:
    sums = Sums.measure([SA, MLP], {MLP: torch.randn(2, 4, 3)}, {})
    assert sums.seen() == [False, True]
    assert {row["site"] for row in sums.rows(run="", step=0)} == {"mlp"}
    empty = Sums.measure([SA], {SA: torch.empty(0, 4, 3)}, {})
    assert empty.seen() == [False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_precision_is_told(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 40).to(dtype)
    (row, *_) = Sums.measure([SA], {SA: x}, {}).rows(run="", step=0)
    assert row["dtype"] == str(dtype).removeprefix("torch.")
    assert row["status"] == ("ok" if dtype.itemsize > 2 else "low_precision")


def test_every_floating_dtype_has_its_number() -> None:
    for name in DTYPES:
        assert getattr(torch, name).is_floating_point


def heard(entropy: float, rows: float, logit: float, dtype: torch.dtype = torch.float32) -> dict[str, Heard]:
    numbers = (torch.tensor(v, dtype=torch.float64) for v in (entropy, rows, logit))
    return {"blocks.0": Heard(*numbers, samples=2, dtype=dtype)}


def test_a_rank_that_failed_takes_nothing_away() -> None:
    x = torch.randn(2, 4, 3).bfloat16()
    measured = Sums.measure([SA], {SA: x}, heard(6.0, 4.0, 2.5, torch.bfloat16))
    failed = Sums.measure([SA], {}, {})
    assert merged(failed, measured).rows(run="", step=0) == measured.rows(run="", step=0)
    found = {row["name"]: row for row in measured.rows(run="", step=0)}
    assert found["attention_entropy"]["value"] == 1.5
    assert found["largest_logit"]["value"] == 2.5
    assert found["largest_logit"]["dtype"] == "bfloat16"
    assert found["largest_logit"]["status"] == "low_precision"


@pytest.mark.parametrize(("entropy", "logit"), [(math.nan, 1.0), (math.nan, math.nan), (1.0, math.inf)])
def test_attention_that_is_not_finite_says_so(entropy: float, logit: float) -> None:
    rows = Sums.measure([SA], {SA: torch.randn(2, 4, 3)}, heard(entropy, 4.0, logit)).rows(run="", step=0)
    found = {row["name"]: row["status"] for row in rows}
    assert found["log_kappa"] == "ok"
    assert found["largest_logit"] == "non_finite"


def test_the_decay_of_samples_of_several_lengths() -> None:
    x = torch.randn(3, 50, 60, dtype=torch.float64)
    lengths = torch.tensor([5, 50, 40])
    valid = torch.arange(50) < lengths[:, None]
    sums = Sums.measure([SA], {SA: x}, {}, valid=lambda _block: valid, spectrum=True)
    found = {row["name"]: row for row in sums.rows(run="", step=0) if row["name"].startswith("sigma.")}
    assert list(found) == [f"sigma.{i}" for i in spectrum_indices(50)]
    spectra = [torch.linalg.svdvals(sample[:length]) for sample, length in zip(x, lengths, strict=True)]
    for i in spectrum_indices(50):
        decays = torch.stack([s[i] / s[0] for s in spectra if i < len(s)])
        row = found[f"sigma.{i}"]
        assert row["value"] == pytest.approx(float(decays.log().mean().exp()), rel=1e-9)
        assert row["count"] == len(decays)
    assert_same(merged(measure(x[:1, :5]), measure(x[1:2])), merged(measure(x[1:2]), measure(x[:1, :5])))


def test_samples_of_several_lengths_share_the_limit_of_ranks():
    """Padding is taken out sample by sample, so that one place has matrices of many shapes."""
    x = torch.randn(6, 5, 4, dtype=torch.float64)
    valid = torch.arange(5)[None, :] < torch.tensor([3, 4, 5, 3, 4, 5])[:, None]
    sums = Sums.measure([SA], {SA: x}, {}, valid=lambda _block: valid, rank_samples=2)
    counts = {row["name"]: row["count"] for row in sums.rows(run="", step=0)}
    assert counts["log_kappa"] == 6
    assert counts["effective_rank"] == 2
