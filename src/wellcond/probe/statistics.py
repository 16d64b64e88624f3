"""Turn captured tensors into rows: measure each place, and keep sums that can be merged across ranks.

    sums = Sums.measure(places, capture.tensors, heard, valid=None, rank_samples=8)
    sums = sums.over_ranks()                  # if torch.distributed is in use
    rows = sums.rows(run="a", step=100)

κ is computed for each sample from its (n, d) matrix of tokens and averaged in log scale. A matrix without a κ (NaN, all
zero, a single token) is left out of every mean, and counted. Matrices of one shape are measured in one batch, whatever
their place: dozens of small batches would cost a GPU several times as much.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

from wellcond import records
from wellcond.numerics import singular
from wellcond.numerics.device_memory import free_memory
from wellcond.probe.attention import Heard
from wellcond.probe.places import Place
from wellcond.words import NO_KAPPA

__all__ = ["MEANS", "SPECTRUM_POINTS", "Findings", "Sums", "spectrum_indices"]

MEANS = ("log_kappa", "sigma_max", "sigma_min", "stable_rank", "effective_rank")
SPECTRUM_POINTS = 32
BATCH_BYTES = 2**29  # of matrices measured together, if memory is scarce
COUNTS = len(singular.STATUSES)
ENTROPY = COUNTS + 2 * len(MEANS)  # columns of `totals`: a count per status, then (total, count) for each mean
NEAR_UNIT = ENTROPY + 3  # after the total entropy, its number of rows and its number of samples
TOTALS = NEAR_UNIT + 2
LOG_KAPPA_MAX, LARGEST_LOGIT, DTYPE, HEARD_DTYPE, MAXIMA = range(5)  # columns of `maxima`
# Ranks exchange dtypes as indices into this tuple, even a rank that measured nothing; the largest is the coarsest.
DTYPES = (
    "float64",
    "float32",
    "float16",
    "bfloat16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)
LOW_PRECISION_FROM = DTYPES.index("float16")
WITHOUT_KAPPA = (singular.NON_FINITE, singular.ZERO, singular.SINGLE)

Span = tuple[int, int]
"""(line, number of consecutive matrices that belong to it)."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Totals and maxima of one pass, one line per place, in float64 on the CPU, which can be merged across ranks."""

    places: Sequence[Place]
    totals: Tensor
    maxima: Tensor
    decays: Tensor
    """(2, places, largest short side): the total of log σ_i/σ_0 over the samples that have a σ_i, and their number. Its
    last dimension is 0 without a spectrum."""

    @classmethod
    def measure(
        cls,
        places: Sequence[Place],
        tensors: Mapping[Place, Tensor],
        heard: Mapping[str, Heard],
        *,
        valid: Callable[[str], Tensor | None] = lambda _block: None,
        rank_samples: int = 8,
        spectrum: bool = False,
        low_precision: bool = False,
        near_unit: Mapping[str, tuple[float, int]] | None = None,
    ) -> "Sums":
        """Return the sums of these tensors, (b, n, d) each; a place without a tensor adds nothing.

        `heard` is by block. `valid(block)` returns which tokens, (b, n) or (1, n), are not padding; only those are
        measured. `low_precision` means that float32 tensors were computed in less, too. `near_unit` is by block, the
        share and its number of samples; the row goes to the block's last place.
        """
        totals = torch.zeros(len(places), TOTALS, dtype=torch.float64)
        maxima = torch.full((len(places), MAXIMA), -math.inf, dtype=torch.float64)
        decays: list[tuple[Tensor, Tensor]] = []
        lines = {place: line for line, place in enumerate(places)}
        left = dict.fromkeys(lines.values(), rank_samples)  # a place's samples may come in several shapes
        for spans, matrices in _batches(lines, tensors, valid):
            line_of = torch.tensor([line for line, length in spans for _ in range(length)])
            some = torch.tensor(_first_of_each(spans, left), dtype=torch.long)
            ranked = matrices[some.to(matrices.device)] if min(matrices.shape[1:]) > 1 else matrices[:0]
            # Started first, so that a GPU has work while the host does the rest. A single token has neither rank nor κ.
            ranks = singular.effective_rank(ranked) if len(ranked) else None
            _add_conditioning(totals, maxima, line_of, matrices, low_precision)
            if ranks is not None:
                found = _add_ranks(totals, line_of[some], ranked, ranks)
                if spectrum:
                    decays.append(_decays(line_of[some][found], ranked, found))
        for place, tensor in tensors.items():
            maxima[lines[place], DTYPE] = _number_of(tensor.dtype)
        _add_heard(totals, maxima, {line: heard[p.block] for p, line in lines.items() if _hears(p, heard)})
        last = {place.block: line for place, line in lines.items() if place in tensors}
        for block, (share, samples) in (near_unit or {}).items():
            if block in last:
                totals[last[block], NEAR_UNIT : NEAR_UNIT + 2] = torch.tensor(
                    [share * samples, samples], dtype=torch.float64
                )
        return cls(places=places, totals=totals, maxima=maxima, decays=_added_decays(decays, len(places)))

    def over_ranks(self) -> "Sums":
        """Return the sums over all processes, the same on each; every process must call it."""
        device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else "cpu"
        totals, maxima = self.totals.to(device), self.maxima.to(device)
        dist.all_reduce(totals, op=dist.ReduceOp.SUM)
        # A maximum would lose a NaN, so it is sent as infinity.
        maxima = maxima.nan_to_num(nan=math.inf, posinf=math.inf, neginf=-math.inf)
        dist.all_reduce(maxima, op=dist.ReduceOp.MAX)
        size = torch.tensor(self.decays.shape[2], device=device)
        dist.all_reduce(size, op=dist.ReduceOp.MAX)
        decays = F.pad(self.decays, (0, int(size) - self.decays.shape[2])).to(device)
        if int(size):
            dist.all_reduce(decays, op=dist.ReduceOp.SUM)
        return Sums(places=self.places, totals=totals.cpu(), maxima=maxima.cpu(), decays=decays.cpu())

    def seen(self) -> list[bool]:
        """Return for each place whether anything was measured there."""
        return (self.totals[:, :COUNTS].sum(1) > 0).tolist()

    def rows(self, *, run: str, step: int) -> list[records.Row]:
        """Return one row per place and name; places where nothing was measured have none."""
        # As plain numbers: training waits for these rows, and indexing a tensor is slower than indexing a list.
        decays = self.decays.permute(1, 2, 0)
        lines = zip(self.places, self.totals.tolist(), self.maxima.tolist(), decays.tolist(), strict=True)
        return [row for place, *sums in lines for row in _rows_of(place, *sums, run=run, step=step)]


def _rows_of(
    place: Place, totals: list[float], maxima: list[float], decays: list[list[float]], *, run: str, step: int
) -> Iterator[records.Row]:
    status = _worst(totals[:COUNTS])
    for name, value, count in (*_values(totals, maxima), *_values_of_decays(decays)):
        here = status if math.isfinite(value) or status in NO_KAPPA else "non_finite"
        yield _row(run, step, place, name, value, count, DTYPES[int(maxima[DTYPE])], here)
    for name, value, count in _values_heard(totals, maxima):
        dtype = int(maxima[HEARD_DTYPE])
        here = "low_precision" if dtype >= LOW_PRECISION_FROM else "ok"
        here = here if math.isfinite(value) else "non_finite"
        yield _row(run, step, place, name, value, count, DTYPES[dtype], here)
    total, count = totals[NEAR_UNIT : NEAR_UNIT + 2]
    if count:
        low = int(maxima[DTYPE]) >= LOW_PRECISION_FROM or totals[singular.LOW_PRECISION]
        here = "non_finite" if math.isnan(total) else "low_precision" if low else "ok"
        yield _row(run, step, place, "near_unit_share", total / count, int(count), DTYPES[int(maxima[DTYPE])], here)


def _values(totals: list[float], maxima: list[float]) -> Iterator[tuple[str, float, int]]:
    statuses = totals[:COUNTS]
    samples = int(sum(statuses))
    if samples == 0:
        return
    for column, name in enumerate(MEANS):
        total, count = totals[COUNTS + 2 * column], totals[COUNTS + 2 * column + 1]
        yield name, total / count if count else math.nan, int(count)
    kappas = int(totals[COUNTS + 1])
    yield "log_kappa_max", maxima[LOG_KAPPA_MAX] if kappas else math.nan, kappas
    yield "capped", statuses[singular.CEILING], samples
    yield "excluded", sum(statuses[code] for code in WITHOUT_KAPPA), samples


def _values_of_decays(decays: list[list[float]]) -> Iterator[tuple[str, float, int]]:
    size = sum(count > 0 for _, count in decays)  # of the place's largest matrix
    for index in spectrum_indices(size):
        total, count = decays[index]
        yield f"sigma.{index}", math.exp(total / count), int(count)


def _values_heard(totals: list[float], maxima: list[float]) -> Iterator[tuple[str, float, int]]:
    total, rows, samples = totals[ENTROPY : ENTROPY + 3]
    if rows and sum(totals[:COUNTS]):
        yield "attention_entropy", total / rows, int(samples)
        yield "largest_logit", maxima[LARGEST_LOGIT] if math.isfinite(total) else math.nan, int(samples)


def _row(
    run: str, step: int, place: Place, name: str, value: float, count: int, dtype: str, status: str
) -> records.Row:
    return records.row(
        run=run,
        step=step,
        block=place.block,
        index=place.index,
        site=cast(records.Site, place.site),
        name=name,
        value=value,
        count=count,
        dtype=dtype,
        status=cast(records.Status, status),
    )


def spectrum_indices(size: int) -> list[int]:
    """Return which of `size` singular values represent the decay: all, or SPECTRUM_POINTS from first to last."""
    if size <= SPECTRUM_POINTS:
        return list(range(size))
    return [round(slot * (size - 1) / (SPECTRUM_POINTS - 1)) for slot in range(SPECTRUM_POINTS)]


def _batches(
    lines: Mapping[Place, int], tensors: Mapping[Place, Tensor], valid: Callable[[str], Tensor | None]
) -> Iterator[tuple[list[Span], Tensor]]:
    """Yield all matrices in batches of one shape and dtype: (spans that map them to lines, (b, n, d))."""
    groups: dict[tuple[object, ...], list[tuple[int, Tensor]]] = defaultdict(list)
    # Site by site, so that a site that takes longer (`sa`, where κ is largest) does not hold up the others.
    for place, tensor in sorted(tensors.items(), key=lambda item: item[0].site):
        for part in _without_padding(tensor, valid(place.block)):
            groups[*part.shape[1:], part.dtype, part.device].append((lines[place], part))
    for group in groups.values():
        batch, size = [], 0
        device = group[0][1].device
        most = max(BATCH_BYTES, free_memory(device) // 32) if device.type == "cuda" else BATCH_BYTES
        for line, part in group:
            if batch and size + part.nbytes > most:
                yield _joined(batch)
                batch, size = [], 0
            batch.append((line, part))
            size += part.nbytes
        yield _joined(batch)


def _joined(batch: list[tuple[int, Tensor]]) -> tuple[list[Span], Tensor]:
    return [(line, len(part)) for line, part in batch], torch.cat([part for _, part in batch])


def _without_padding(tensor: Tensor, valid: Tensor | None) -> list[Tensor]:
    """Return the tensor as it is or, if it has padding, a (1, n, d) of valid tokens for each sample that has any."""
    if 0 in tensor.shape:
        return []
    if valid is None or valid.shape[1] != tensor.shape[1] or len(valid) not in (1, len(tensor)) or bool(valid.all()):
        return [tensor]
    valid = valid.expand(len(tensor), -1)
    return [sample[keep][None] for sample, keep in zip(tensor, valid, strict=True) if bool(keep.any())]


def _first_of_each(spans: list[Span], left: dict[int, int]) -> list[int]:
    """Return the indices of each line's first matrices, as many as `left` allows, and deduct them from `left`."""
    kept, start = [], 0
    for line, length in spans:
        taken = min(length, left[line])
        kept += range(start, start + taken)
        left[line] -= taken
        start += length
    return kept


def _add_conditioning(totals: Tensor, maxima: Tensor, line_of: Tensor, matrices: Tensor, low_precision: bool) -> None:
    found = singular.measure_conditioning(matrices)
    stable_rank = (_frobenius(matrices) / found.sigma_max.double()).square()
    values = torch.stack([found.log_kappa, found.sigma_max, found.sigma_min, stable_rank.to(found.kappa.dtype)], 1)
    values, status = values.double().cpu(), found.status.cpu().long()
    if low_precision:  # not for a single token, which has no κ to round
        status = status.masked_fill(status == singular.OK, singular.LOW_PRECISION)
    totals.index_put_((line_of, status), torch.ones(len(line_of), dtype=torch.float64), accumulate=True)
    usable = ~torch.isin(status, torch.tensor(WITHOUT_KAPPA))
    line_of, values = line_of[usable], values[usable]
    for column in range(values.shape[1]):
        _add(totals, line_of, COUNTS + 2 * column, values[:, column])
    maxima[:, LOG_KAPPA_MAX].scatter_reduce_(0, line_of, values[:, 0], "amax")


def _frobenius(matrices: Tensor) -> Tensor:
    """Return each ‖X‖_F in float64; if in range, summed in float32: exact enough, in a fifth of the time on a GPU."""
    if matrices.dtype == torch.float32:
        norms = torch.linalg.vector_norm(matrices, dim=(-2, -1))
        if bool(((norms > 1e-15) & (norms < 1e15)).all()):
            return norms.double()
    return torch.linalg.vector_norm(matrices, dim=(-2, -1), dtype=torch.float64)


def _add_ranks(totals: Tensor, line_of: Tensor, matrices: Tensor, ranks: Tensor) -> Tensor:
    """Add the effective ranks, and return which matrices have one."""
    rank = ranks.double().cpu()
    usable = rank > 0  # neither NaN nor a zero matrix
    _add(totals, line_of[usable], COUNTS + 2 * MEANS.index("effective_rank"), rank[usable])
    return usable


def _decays(line_of: Tensor, matrices: Tensor, usable: Tensor) -> tuple[Tensor, Tensor]:
    """Return the lines of the usable matrices, and log σ_i/σ_0 of each."""
    s = singular.singular_values(matrices).double().cpu()[usable]
    return line_of, (s / s[:, :1]).clamp_min(torch.finfo(torch.float64).tiny).log()


def _added_decays(decays: list[tuple[Tensor, Tensor]], lines: int) -> Tensor:
    """Return totals and counts of the samples' decays, which may differ in length: (2, lines, longest)."""
    longest = max((found.shape[1] for line_of, found in decays if len(line_of)), default=0)
    added = torch.zeros(2, lines, longest, dtype=torch.float64)
    for line_of, found in decays:
        if len(line_of):
            added[0, :, : found.shape[1]].index_add_(0, line_of, found)
            added[1, :, : found.shape[1]].index_add_(0, line_of, torch.ones_like(found))
    return added


def _hears(place: Place, heard: Mapping[str, Heard]) -> bool:
    return place.site == "sa" and place.block in heard


def _add_heard(totals: Tensor, maxima: Tensor, heard: Mapping[int, Heard]) -> None:
    if not heard:
        return
    device = next(iter(heard.values())).entropy.device  # one transfer for all, since each synchronises
    numbers = [torch.stack([found.entropy, found.rows, found.largest_logit]).to(device) for found in heard.values()]
    for (line, found), (entropy, rows, largest) in zip(heard.items(), torch.stack(numbers).tolist(), strict=True):
        totals[line, ENTROPY : ENTROPY + 3] = torch.tensor([entropy, rows, found.samples], dtype=torch.float64)
        maxima[line, LARGEST_LOGIT] = largest
        maxima[line, HEARD_DTYPE] = _number_of(found.dtype)


def _add(totals: Tensor, line_of: Tensor, column: int, values: Tensor) -> None:
    totals[:, column].index_add_(0, line_of, values)
    totals[:, column + 1].index_add_(0, line_of, torch.ones_like(values))


def _worst(statuses: list[float]) -> str:
    """Return the status of a row whose samples have several: the one that a reader must know first."""
    for code in (singular.NON_FINITE, singular.CEILING, singular.ZERO, singular.LOW_PRECISION):
        if statuses[code]:
            return singular.STATUSES[code]
    return "single" if statuses[singular.SINGLE] == sum(statuses) else "ok"


def _number_of(dtype: torch.dtype) -> int:
    return DTYPES.index(str(dtype).removeprefix("torch."))


class Findings:
    """The measurements of one run, kept as sums and turned into rows on request.

    If rows were made right after a pass, a GPU would sit idle meanwhile; `add` costs nothing. With a file, rows are
    written as they are added.
    """

    def __init__(self, run: str):
        self.run = run
        self._rows: list[records.Row] = []
        self._sums: list[tuple[Sums, int]] = []  # with their steps; not yet turned into rows
        self._file: Path | None = None

    def __bool__(self) -> bool:
        return bool(self._rows or self._sums)

    def add(self, sums: Sums, step: int, *, write: bool = True) -> None:
        """Add one measurement; `write=False` if another process writes the file."""
        if self._file is None or not write:
            self._sums.append((sums, step))
            return
        before = len(self.rows())
        self._sums.append((sums, step))
        records.append_rows(self._file, self.rows()[before:])

    def rows(self) -> list[records.Row]:
        for sums, step in self._sums:
            self._rows += sums.rows(run=self.run, step=step)
        self._sums.clear()
        return self._rows

    def write_to(self, path: Path, *, write: bool = True) -> None:
        """Write the rows to this file, now and as they are added. ValueError if it cannot be written."""
        if path == self._file:
            return
        if write:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with path.open("ab"):
                    pass
                records.append_rows(path, self.rows())
            except OSError as error:
                raise ValueError(f"rows cannot be written to {path}: {error.strerror or error}") from None
        self._file = path

    def keep(self, step: int) -> bool:
        """Keep only the rows of this step, if there are any; return whether there are."""
        of_step = [row for row in self.rows() if row["step"] == step]
        self._rows = of_step or self._rows
        return bool(of_step)

    def clear(self) -> None:
        """Forget the rows; the file keeps them."""
        self._rows.clear()
        self._sums.clear()
