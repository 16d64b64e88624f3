"""Landmarks: the few tokens, or means of tokens, that represent all of them.

    chosen = choose_landmarks(query, key, 128, "spread")              # half from the queries, half from the keys
    chosen.rows, chosen.valid                                         # (…, d, p); which rows count, (…, d), or None
    at, of_queries = landmark_positions(query, key, 128, "spread")    # their positions, without masks
    means, valid = segment_means(key, 64, keep)                       # means of consecutive tokens

`spread`   evenly spaced tokens, the same at every call; keys lie halfway between queries, so that the tokens differ.
`random`   drawn without replacement, separately for each sample, with torch's generator or the one given.
`segment`  means of consecutive segments whose lengths differ by one at most.

Masked tokens are skipped and the others are chosen by rank, so that neither the position and amount of padding nor the
other samples of a batch change the result (with `random`, its distribution). With fewer tokens than landmarks, every
token is a landmark and the remaining places are not valid. If there are too few queries or keys for their half, the
other kind fills it.
"""

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from wellcond.numerics.constants import kept_constants

__all__ = [
    "LANDMARKS",
    "Landmarks",
    "check_counts",
    "choose_landmarks",
    "landmark_positions",
    "prefix_positions",
    "segment_means",
]

LANDMARKS = ("spread", "random", "segment")


@dataclass(frozen=True, kw_only=True)
class Landmarks:
    """The landmarks of queries (…, n, p) and keys (…, m, p), for each sample and head."""

    rows: Tensor
    """(…, d, p): queries first, then keys."""
    valid: Tensor | None = None
    """bool, broadcastable to (…, d); None if all are. Rows that are not valid are zero."""


def check_counts(num_landmarks: int, num_iterations: int) -> None:
    """Raise ValueError unless both are whole numbers, the first at least 1 and the second at least 0."""
    if not (_whole(num_landmarks) and num_landmarks > 0):
        raise ValueError(f"num_landmarks={num_landmarks!r} must be a whole number, at least one")
    if not (_whole(num_iterations) and num_iterations >= 0):
        raise ValueError(f"num_iterations={num_iterations!r} must be a whole number, 0 or more; 6 is usual")


def _whole(number: object) -> bool:
    return isinstance(number, (int, Integral)) and not isinstance(number, bool)


def choose_landmarks(
    query: Tensor,
    key: Tensor,
    count: int,
    method: str,
    *,
    query_keep: Tensor | None = None,
    key_keep: Tensor | None = None,
    generator: torch.Generator | None = None,
) -> Landmarks:
    """Choose `count` landmarks from (…, n, p) and (…, m, p); masks are bool, broadcastable to (…, n) and (…, m)."""
    if method not in LANDMARKS:
        raise ValueError(f"landmarks={method!r} is unknown; use {', '.join(map(repr, LANDMARKS))}")
    if count < 1:
        raise ValueError(f"num_landmarks={count} must be at least one")
    n, m = query.shape[-2], key.shape[-2]
    if query_keep is None and key_keep is None:
        if method != "segment":
            at, of_queries = landmark_positions(query, key, count, method, generator=generator)
            return Landmarks(rows=_tokens_at(query, key, at, of_queries))
        of_queries, of_keys = _halves(n, m, count)
        parts = [segment_means(x, number)[0] for x, number in ((query, of_queries), (key, of_keys)) if number]
        return Landmarks(rows=torch.cat(parts, -2))
    query_keep = _all_kept(query) if query_keep is None else query_keep
    key_keep = _all_kept(key) if key_keep is None else key_keep
    of_queries, of_keys = _shares(query_keep.sum(-1, keepdim=True), key_keep.sum(-1, keepdim=True), count)
    places = min(count, n + m)
    place = torch.arange(places, device=query.device)
    real = place < of_queries + of_keys
    of_query = place < of_queries
    rows = torch.zeros((), dtype=query.dtype, device=query.device)
    for tokens, keep, number, where, mine, share, quarter in (
        (query, query_keep, of_queries, place, of_query, count - count // 2, 1),
        (key, key_keep, of_keys, place - of_queries, real & ~of_query, max(1, count // 2), 3),
    ):
        if tokens.shape[-2] == 0:
            continue
        if method == "segment":
            longest = -(-tokens.shape[-2] // min(share, tokens.shape[-2]))
            found = _means(tokens, keep, keep.sum(-1, keepdim=True), number, where, longest)
        else:
            found = _picked(tokens, keep, number, where, quarter, method, generator)
        rows = rows + found.masked_fill(~mine[..., None], 0)
    return Landmarks(rows=rows, valid=real)


def landmark_positions(
    query: Tensor, key: Tensor, count: int, method: str, *, generator: torch.Generator | None = None
) -> tuple[Tensor, int]:
    """Return the positions of `spread` or `random` landmarks, (…, d), those of queries first, and how many are queries.

    Masks are not supported. The leading dimensions are those of the samples for `random`; `spread` has none.
    """
    of_queries, of_keys = _halves(query.shape[-2], key.shape[-2], count)
    if method == "spread":
        made = _make_spread_positions if torch.compiler.is_compiling() else _kept_spread_positions
        return made(query.shape[-2], key.shape[-2], of_queries, of_keys, query.device), of_queries
    parts = [_drawn(tokens, number, generator) for tokens, number in ((query, of_queries), (key, of_keys)) if number]
    return torch.cat(parts, -1), of_queries


def segment_means(x: Tensor, count: int, keep: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Return means of `count` consecutive segments of the unmasked tokens, (…, min(count, n), p), and which are valid.

    Lengths differ by one at most. With fewer tokens than segments each token is a segment, and the rest are not valid.
    """
    n = x.shape[-2]
    places = min(count, n)
    if places == 0:
        return x, None
    if keep is None and n % places == 0:
        return x.unflatten(-2, (places, n // places)).mean(-2), None
    place = torch.arange(places, device=x.device)
    total = torch.full((1,) * (x.ndim - 1), n, device=x.device) if keep is None else keep.sum(-1, keepdim=True)
    number = total.clamp_max(places)
    means = _means(x, keep, total, number, place, -(-n // places))
    return means, None if keep is None else place < number


def prefix_positions(draws: Tensor, lengths: Tensor) -> Tensor:
    """Return ⌊u · length⌋, as the published code: one draw for all samples, each within its first `length` tokens."""
    return (draws * lengths[..., None]).long()


def _shares(n: Tensor, m: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return how many landmarks are queries and how many are keys: half each, if there are enough of both."""
    of_queries = torch.minimum(n, (count - m).clamp_min(count - count // 2))
    return of_queries, torch.minimum(m, count - of_queries)


def _halves(n: int, m: int, count: int) -> tuple[int, int]:
    """`_shares` without masks, as plain integers."""
    of_queries = min(n, max(count - count // 2, count - m))
    return of_queries, min(m, count - of_queries)


def _make_spread_positions(n: int, m: int, of_queries: int, of_keys: int, device: torch.device) -> Tensor:
    parts = [
        _spread(torch.arange(number, device=device), quarter, total, number) if number < total
        else torch.arange(number, device=device)
        for number, total, quarter in ((of_queries, n, 1), (of_keys, m, 3))
        if number
    ]  # fmt: skip
    return torch.cat(parts)


_kept_spread_positions = kept_constants(256)(_make_spread_positions)  # saves half a dozen launches on a GPU


def _drawn(tokens: Tensor, number: int, generator: torch.Generator | None) -> Tensor:
    lead, n = tokens.shape[:-3], tokens.shape[-2]
    if number == n:
        return torch.arange(n, device=tokens.device).expand(*lead, n)
    return _uniform(*lead, n, generator=generator, like=tokens).topk(number, -1).indices


def _uniform(*shape: int, generator: torch.Generator | None, like: Tensor) -> Tensor:
    if generator is None:  # passing generator=None would make torch.compile refuse batches of another size
        return torch.rand(*shape, device=like.device)
    return torch.rand(*shape, generator=generator, device=like.device)


def _tokens_at(query: Tensor, key: Tensor, positions: Tensor, of_queries: int) -> Tensor:
    """Gather the tokens at the positions that `landmark_positions` returned."""
    if positions.ndim == 1:
        parts = [query.index_select(-2, positions[:of_queries]), key.index_select(-2, positions[of_queries:])]
    else:
        of_all_heads = positions if query.ndim == 2 else positions[..., None, :]
        parts = [_gather(query, of_all_heads[..., :of_queries]), _gather(key, of_all_heads[..., of_queries:])]
    return torch.cat(parts, -2)


def _picked(
    tokens: Tensor,
    keep: Tensor,
    number: Tensor,
    place: Tensor,
    quarter: int,
    method: str,
    generator: torch.Generator | None,
) -> Tensor:
    """Choose `number` (…, 1) of the tokens that `keep` (…, n) marks, one per place (…, d); beyond them, any row."""
    if method == "spread":
        ranks = _spread(place, quarter, keep.sum(-1, keepdim=True), number.clamp_min(1))
        return _gather(tokens, _position_of(ranks, keep))
    lead = torch.broadcast_shapes(_by_sample(tokens), keep.shape[:-1])
    draws = _uniform(*lead, tokens.shape[-2], generator=generator, like=tokens)
    drawn = draws.masked_fill(~keep, -1).topk(min(place.shape[-1], tokens.shape[-2]), -1).indices
    place = place.clamp(0, drawn.shape[-1] - 1)
    return _gather(tokens, drawn.gather(-1, place.expand(*lead, place.shape[-1])))


def _means(tokens: Tensor, keep: Tensor | None, total: Tensor, number: Tensor, place: Tensor, longest: int) -> Tensor:
    """Compute the means of `number` (…, 1) segments of at most `longest` tokens, one for each place (…, d), then zeros.

    `total` is the number of tokens that are kept.
    """
    segments = number.clamp_min(1)
    first = place * total // segments
    length = torch.where((place >= 0) & (place < number), (place + 1) * total // segments - first, 0)
    step = torch.arange(longest, device=tokens.device)
    inside = step < length[..., None]
    ranks = torch.where(inside, first[..., None] + step, 0)
    rows = _gather(tokens, _position_of(ranks.flatten(-2), keep)).unflatten(-2, (place.shape[-1], longest))
    wide = torch.promote_types(tokens.dtype, torch.float32)  # the sum of a long segment may exceed float16
    sums = rows.masked_fill(~inside[..., None], 0).sum(-2, dtype=wide)
    return (sums / length.clamp_min(1)[..., None].to(wide)).to(tokens.dtype)


def _spread(place: Tensor, quarter: int, total: int | Tensor, number: int | Tensor) -> Tensor:
    """Return the position `quarter` quarters into part `place`, of `number` equal parts of 0 … total − 1."""
    return (4 * place + quarter) * total // (4 * number)


def _position_of(ranks: Tensor, keep: Tensor | None) -> Tensor:
    """Return the position of the token of each rank among those kept; arbitrary for ranks that do not exist."""
    if keep is None:
        return ranks
    lead = torch.broadcast_shapes(ranks.shape[:-1], keep.shape[:-1])
    if torch.compiler.is_compiling():  # torch 2.11 cannot compile searchsorted for GPUs
        n = keep.shape[-1]
        rank = torch.where(keep, keep.cumsum(-1) - 1, n)  # masked tokens share a place after all others
        positions = torch.arange(n, device=keep.device).expand_as(rank)
        in_order = rank.new_zeros(*rank.shape[:-1], n + 1).scatter(-1, rank, positions).expand(*lead, n + 1)
        return in_order.gather(-1, ranks.expand(*lead, ranks.shape[-1]).clamp(0, n - 1))
    up_to = keep.expand(*lead, keep.shape[-1]).cumsum(-1)
    found = torch.searchsorted(up_to, ranks.expand(*lead, ranks.shape[-1]) + 1)
    return found.clamp_max(keep.shape[-1] - 1)


def _gather(tokens: Tensor, positions: Tensor) -> Tensor:
    """Gather the rows of (…, n, p) at positions (…, d), which have a dimension of 1 where heads share them."""
    index = positions[..., None].expand(*tokens.shape[:-2], positions.shape[-1], tokens.shape[-1])
    return tokens.gather(-2, index)


def _by_sample(tokens: Tensor) -> tuple[int, ...]:
    """Return the leading dimensions of a draw for each sample, shared by its heads."""
    return (*tokens.shape[:-3], 1) if tokens.ndim > 2 else ()


def _all_kept(tokens: Tensor) -> Tensor:
    lead = (1,) * (tokens.ndim - 2)
    return torch.ones(*lead, tokens.shape[-2], dtype=torch.bool, device=tokens.device)
