"""Landmarks: which tokens they are, and that only tokens that count are looked at."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from wellcond.attention import SkyformerAttention
from wellcond.attention.landmarks import choose_landmarks, prefix_positions, segment_means


def numbered(*lead: int, n: int, first: int = 0) -> Tensor:
    """Tokens that tell where they stand."""
    return torch.arange(first, first + n, dtype=torch.float64)[:, None].expand(*lead, n, 1).contiguous()


def names(landmarks, sample: int = 0) -> list[int]:
    rows = landmarks.rows[sample, 0, :, 0]
    valid = torch.ones_like(rows) if landmarks.valid is None else landmarks.valid.expand(*landmarks.rows.shape[:-1])
    return rows[valid.bool() if valid.ndim == 1 else valid[sample, 0]].long().tolist()


@given(
    n=st.integers(1, 12), m=st.integers(1, 12), count=st.integers(1, 30), method=st.sampled_from(["spread", "random"])
)
def test_half_and_half_distinct_and_all_if_there_are_no_more(n: int, m: int, count: int, method: str) -> None:
    chosen = choose_landmarks(numbered(2, 3, n=n), numbered(2, 3, n=m, first=100), count, method)
    found = names(chosen)
    assert len(found) == len(set(found)) == min(count, n + m)
    queries = [name for name in found if name < 100]
    if count <= 2 * min(n, m):
        assert len(queries) == count - count // 2
    if count >= n + m:
        assert sorted(found) == [*range(n), *range(100, 100 + m)]


@given(
    n=st.integers(1, 12), count=st.integers(1, 30), seed=st.integers(0, 999),
    method=st.sampled_from(["spread", "random", "segment"]),
)  # fmt: skip
def test_masked_tokens_are_never_landmarks(n: int, count: int, seed: int, method: str) -> None:
    keep = torch.rand(4, 1, n, generator=torch.Generator().manual_seed(seed)) > 0.5
    query, key = numbered(4, 2, n=n), numbered(4, 2, n=n, first=100)
    chosen = choose_landmarks(query, key, count, method, query_keep=keep, key_keep=keep)
    assert chosen.rows.shape == (4, 2, min(count, 2 * n), 1)
    for sample in range(4):
        kept = keep[sample, 0].nonzero().flatten().tolist()
        found = names(chosen, sample)
        assert len(found) == min(count, 2 * len(kept))
        if method != "segment":
            assert set(found) <= {*kept, *(100 + i for i in kept)}
            assert len(set(found)) == len(found)
        if kept:  # what is chosen does not depend on where the padding stands
            alone = choose_landmarks(query[:1, :, kept], key[:1, :, kept], count, method)
            if method == "spread" or count >= 2 * len(kept):
                assert sorted(found) == sorted(names(alone))
            if method == "segment":
                rows = chosen.rows[sample, 0, : len(found), 0]
                torch.testing.assert_close(rows, alone.rows[0, 0, :, 0])


def test_spread_is_even_and_random_is_uniform_and_apart() -> None:
    query = key = numbered(2000, 1, n=10)
    assert names(choose_landmarks(query, key, 10, "spread")) == [0, 2, 4, 6, 8, 1, 3, 5, 7, 9]
    rows = choose_landmarks(query, key, 6, "random").rows
    counts = rows[:, 0, :3, 0].long().flatten().bincount(minlength=10)
    assert (counts - 600).abs().max() < 120  # σ = 20.5
    assert len({tuple(row.flatten().tolist()) for row in rows[:50]}) > 40  # each sample has its own
    shared = choose_landmarks(numbered(1, 5, n=10), numbered(1, 5, n=10), 6, "random").rows
    assert torch.equal(shared, shared[:, :1].expand_as(shared))  # and shares it among its heads


def test_random_obeys_torchs_seed_and_a_generator() -> None:
    query = key = numbered(3, 1, n=20)
    torch.manual_seed(5)
    first = choose_landmarks(query, key, 6, "random").rows
    torch.manual_seed(5)
    assert torch.equal(first, choose_landmarks(query, key, 6, "random").rows)
    assert not torch.equal(first, choose_landmarks(query, key, 6, "random").rows)
    own = [choose_landmarks(query, key, 6, "random", generator=torch.Generator().manual_seed(1)).rows for _ in range(2)]
    assert torch.equal(*own)


@given(n=st.integers(1, 23), count=st.integers(1, 30))
def test_segments_differ_by_one_and_cover_everything(n: int, count: int) -> None:
    x = torch.randn(2, n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(n))
    means, valid = segment_means(x, count)
    assert valid is None
    bounds = [s * n // min(count, n) for s in range(min(count, n) + 1)]
    lengths = [b - a for a, b in itertools.pairwise(bounds)]
    assert max(lengths) - min(lengths) <= 1
    expected = torch.stack([x[:, a:b].mean(1) for a, b in itertools.pairwise(bounds)], 1)
    torch.testing.assert_close(means, expected)


def test_a_side_without_tokens_leaves_its_places() -> None:
    keep = torch.zeros(1, 1, 4, dtype=torch.bool)
    some = torch.tensor([True, False, True, True, True])[None, None]
    query, key = numbered(1, 1, n=4), numbered(1, 1, n=5, first=100)
    assert names(choose_landmarks(query, key, 4, "spread", query_keep=keep, key_keep=some)) == [100, 102, 103, 104]
    none = choose_landmarks(query, key, 4, "spread", query_keep=keep, key_keep=some & False)
    assert names(none) == []
    assert (none.rows == 0).all()
    assert names(choose_landmarks(numbered(1, 1, n=1), key, 4, "spread")) == [0, 101, 102, 104]


def test_prefix_positions_are_shared_draws() -> None:
    draws = torch.tensor([0.0, 0.5, 0.999])
    assert prefix_positions(draws, torch.tensor([[4], [10]])).tolist() == [[[0, 2, 3]], [[0, 5, 9]]]


def test_gradients_flow_into_landmarks() -> None:
    query, key = (torch.randn(2, 1, 6, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    keep = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 1]], dtype=torch.bool)[:, None]
    for method in ("spread", "segment"):
        for mask in (None, keep):

            def rows(query: Tensor, key: Tensor, method: str = method, mask: Tensor | None = mask) -> Tensor:
                return choose_landmarks(query, key, 5, method, query_keep=mask, key_keep=mask).rows

            assert torch.autograd.gradcheck(rows, (query, key))


def test_mistakes_are_named() -> None:
    x = torch.randn(4, 2)
    with pytest.raises(ValueError, match="'spread', 'random', 'segment'"):
        choose_landmarks(x, x, 2, "kmeans")
    with pytest.raises(ValueError, match="at least one"):
        choose_landmarks(x, x, 0, "spread")


@pytest.mark.parametrize("method", ["spread", "segment"])
def test_compiled_landmarks_of_masked_tokens_are_the_same(method):
    """Compiled, the tokens that count are found by sorting and not by searching."""
    torch.compiler.reset()
    query, key = torch.randn(3, 2, 40, 4), torch.randn(3, 2, 31, 4)
    query_keep, key_keep = torch.rand(3, 1, 40) > 0.4, torch.rand(3, 1, 31) > 0.8
    key_keep[1] = False

    def choose(query, key):
        found = choose_landmarks(query, key, 24, method, query_keep=query_keep, key_keep=key_keep)
        return found.rows, found.valid

    rows, valid = choose(query, key)
    compiled_rows, compiled_valid = torch.compile(choose, backend="aot_eager", fullgraph=True)(query, key)
    assert torch.equal(valid, compiled_valid)
    assert torch.equal(rows * valid[..., None], compiled_rows * compiled_valid[..., None])


def test_compiled_training_takes_batches_of_another_size():
    layer = torch.compile(SkyformerAttention(8, num_heads=2, num_landmarks=4).train(), backend="aot_eager")
    for batch in (3, 3, 2, 5):
        layer(torch.randn(batch, 20, 8)).sum().backward()


def test_means_of_long_segments_fit_half_precision():
    x = torch.full((1, 1, 8191, 4), 20.0, dtype=torch.float16)
    means, _ = segment_means(x, 2)
    assert means.dtype == torch.float16
    torch.testing.assert_close(means, torch.full_like(means, 20.0))
