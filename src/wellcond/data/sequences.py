"""Labelled sequences of tokens, as in the Long Range Arena's tasks, and their batches.

    data = open_data("lra_listops")
    data.train                                   # SequenceSet(96,000 × 2048, 32 tokens, on cpu)
    data.train.part(torch.arange(64))            # some of them, without a copy
    for tokens, mask in (batch.inputs for batch in eval_batches(data.val, batch_size=32, device="cuda")): …

Tokens are bytes, padded with 0, and a whole set is small (100,000 × 2,048 bytes): it is moved to the GPU once, where
making a batch is one lookup and one cast. What a step sees depends only on (seed, epoch, step), as with images.
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wellcond.data.augment import Augmentation, mix_labels
from wellcond.data.batches import Share, eval_cuts
from wellcond.data.dataset import GPU_SHARE, fits_on, split_rows
from wellcond.data.draws import draw_order, send
from wellcond.data.loading import Batch

__all__ = ["MaskRule", "Rows", "SequenceSet", "check_choice", "check_count", "kept_tokens", "spread"]

MaskRule = Literal["published", "fixed"]
TOGETHER_BYTES = 16 << 20  # of tokens gathered at once: one request for several small batches
PAD = 0
CROPPED_TO = 256  # a multiple of so many tokens, since GPU libraries have to be set up for each new length


class Rows(NamedTuple):
    """Sequences of different lengths, concatenated."""

    tokens: NDArray[np.uint8]
    lengths: NDArray[np.int32]
    """(rows,), or (rows, 2) for pairs."""
    labels: NDArray[np.uint8]

    def between(self, low: int, high: int) -> "Rows":
        before, size = int(self.lengths[:low].sum()), int(self.lengths[low:high].sum())
        return Rows(self.tokens[before : before + size], self.lengths[low:high], self.labels[low:high])

    def pick(self, chosen: NDArray[np.intp]) -> "Rows":
        """Return these rows, in this order; not for pairs."""
        ends = np.cumsum(self.lengths, dtype=np.int64)
        tokens = np.concatenate([self.tokens[ends[row] - self.lengths[row] : ends[row]] for row in chosen])
        return Rows(tokens, self.lengths[chosen], self.labels[chosen])


def kept_tokens(length: int) -> int:
    """Return how many tokens of a text or an expression that is padded to `length` are kept: 2,000 of 2,048."""
    check_count("length", length, 16)
    return length * 125 // 128


class SequenceSet:
    """Tokens (rows, length), or (rows, 2, length) for pairs, with their labels."""

    def __init__(
        self, tokens: Tensor, lengths: Tensor, labels: Tensor, *, vocab: int, mask: MaskRule = "published",
        rows: Tensor | None = None, unpadded: bool | None = None,
    ) -> None:  # fmt: skip
        """`vocab` is the number of rows of the embedding. `mask` says which tokens count (True in a batch's mask):

        - `published`: those that are not 0, in every task, so that black pixels count as padding
        - `fixed`: those within the true length, so that all pixels count

        `rows` selects some of the sequences without a copy. A part is told `unpadded` by the set it is taken from.
        """
        assert (tokens.dtype, labels.dtype) == (torch.uint8, torch.int64), (tokens.dtype, labels.dtype)
        assert lengths.shape == tokens.shape[:-1], (lengths.shape, tokens.shape)
        assert labels.shape == tokens.shape[:1], (labels.shape, tokens.shape)
        check_choice("mask", mask, get_args(MaskRule))
        self.vocab = vocab
        self.mask: MaskRule = mask
        self.rows = rows
        self.labels: Tensor = labels if rows is None else labels[rows]
        self.lengths: Tensor = lengths if rows is None else lengths[rows]
        self._tokens, self._all_lengths, self._all_labels = tokens, lengths, labels
        self._longest: Sequence[int] = ()  # of all sequences, if they are sorted by length
        if unpadded is None:
            unpadded = mask == "fixed" and bool((lengths == tokens.shape[-1]).all())
        self.unpadded = unpadded
        """Whether every token counts: batches of single sequences then have no mask, and models are faster.

        A part takes this from the whole set, so that its batches have the same form."""

    @classmethod
    def of(cls, pieces: Sequence[Rows], *, length: int, vocab: int, mask: MaskRule = "published") -> "SequenceSet":
        """Make a set of these rows, padded to `length`."""
        lengths = np.concatenate([piece.lengths for piece in pieces])
        tokens = np.zeros((lengths.size, length), np.uint8)
        done, places = 0, np.arange(length)
        for piece in pieces:
            some = tokens[done : done + piece.lengths.size]
            some[places < piece.lengths.reshape(-1, 1)] = piece.tokens
            done += len(some)
        labels = np.concatenate([piece.labels for piece in pieces]).astype(np.int64)
        shaped = tokens.reshape(*lengths.shape, length)
        return cls(*map(torch.from_numpy, (shaped, lengths, labels)), vocab=vocab, mask=mask)

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        pairs = "2 × " if self.pairs else ""
        return f"SequenceSet({len(self):,} × {pairs}{self.length}, {self.vocab} tokens, on {self.device})"

    @property
    def tokens(self) -> Tensor:
        """All tokens, uint8."""
        return self._tokens if self.rows is None else self._tokens[self.rows]

    @property
    def length(self) -> int:
        """The length that sequences are padded to."""
        return self._tokens.shape[-1]

    @property
    def pairs(self) -> bool:
        """Whether a sample is two sequences."""
        return self._tokens.ndim == 3

    @property
    def device(self) -> torch.device:
        """The device of the tokens."""
        return self._tokens.device

    @property
    def nbytes(self) -> int:
        """The size of the sequences in bytes, one for each token."""
        return len(self) * self._tokens[:1].numel()

    def gather(self, rows: Tensor) -> Tensor:
        """Return these sequences, in this order, as uint8 on the tokens' device."""
        rows = rows.to(self.device)  # no copy if they are there already
        return self._tokens.index_select(0, rows if self.rows is None else self.rows[rows])

    def to(self, device: torch.device | str, *, share: float = GPU_SHARE) -> "SequenceSet":
        """Move to the device if the tokens take no more than `share` of its free memory; otherwise return self."""
        if not fits_on(device, self.device, self.nbytes, share):
            return self
        tokens = torch.empty((len(self), *self._tokens.shape[1:]), dtype=torch.uint8, device=device)
        for chunk in split_rows(len(self), self.nbytes):
            tokens[chunk].copy_(self.gather(torch.arange(chunk.start, chunk.stop)))
        lengths, labels = self.lengths.to(device), self.labels.to(device)
        return SequenceSet(tokens, lengths, labels, vocab=self.vocab, mask=self.mask, unpadded=self.unpadded)

    def part(self, rows: Tensor) -> "SequenceSet":
        """Return some of the sequences, without a copy."""
        rows = rows.to(self.device)
        rows = rows if self.rows is None else self.rows[rows]
        return SequenceSet(
            self._tokens, self._all_lengths, self._all_labels, vocab=self.vocab, mask=self.mask, rows=rows,
            unpadded=self.unpadded,
        )  # fmt: skip

    def by_length(self) -> "SequenceSet":
        """Return the sequences sorted, longest first, so that `eval_batches` crops each batch to its longest sequence.

        If lengths vary a lot, a batch is mostly padding otherwise. This synchronises with the GPU once.
        """
        if self.unpadded:
            return self
        lengths = self.lengths.cpu()
        lengths = lengths.amax(1) if self.pairs else lengths
        order = lengths.argsort(descending=True, stable=True)
        found = self.part(order)
        found._longest = lengths[order].tolist()
        return found

    def window(self, number: int, samples: int) -> "SequenceSet":
        """Return the `number`-th `samples` of an endless loop over the set: what the published code validates on.

        val.window(step // eval_steps - 1, dev_batches * batch_size) is what it reads at this step.
        """
        return self.part((torch.arange(samples) + number * samples) % len(self))

    def measured(self) -> "SequenceSet":
        """Return self: images are normalised by a mean and standard deviation, tokens are not."""
        return self

    def like(self, train: "SequenceSet") -> "SequenceSet":
        """Return self, likewise."""
        return self

    def content(self) -> list[bytes]:
        """Return what changes when the data does, besides the labels."""
        total = 0
        for chunk in split_rows(len(self), self.nbytes):
            tokens = self.gather(torch.arange(chunk.start, chunk.stop)).cpu().numpy()
            total = zlib.crc32(tokens.tobytes(), total)
        return [total.to_bytes(4, "little"), self.lengths.to("cpu", torch.int32).numpy().tobytes()]

    def inputs(self, rows: Tensor) -> tuple[Tensor, ...]:
        """Return a model's arguments: tokens (b, length) int32 and mask (b, length) bool; for pairs, two of each.

        Single sequences have no mask if nothing is padding (`unpadded`).
        """
        return self.batch(rows, len(rows), self.device).inputs

    def train_batches(
        self, *, batch_size: int, seed: int, rank: int = 0, world: int = 1, device: torch.device | str = "cpu",
        augmentation: Augmentation | None = None, num_classes: int = 0, drop_last: bool = True, workers: int = 0,
    ) -> "SequenceBatches":  # fmt: skip
        """Return training batches, reshuffled each epoch. `workers` is ignored: only images need them."""
        share = Share(len(self), batch_size=batch_size, rank=rank, world=world, drop_last=drop_last, what="sequences")
        smoothing = _smoothing(augmentation)
        return SequenceBatches(
            self.to(device), share, seed=seed, device=torch.device(device), smoothing=smoothing, num_classes=num_classes
        )

    def eval_batches(
        self, *, batch_size: int, rank: int = 0, world: int = 1, device: torch.device | str = "cpu", workers: int = 0
    ) -> Iterator[Batch]:
        """Yield every sequence once across all ranks, in order, equally many batches on each; the last may be blank."""
        device = torch.device(device)
        rows = torch.arange(len(self), device=self.device)[rank::world]
        for cut in eval_cuts(len(self), batch_size=batch_size, world=world):
            mine = rows[cut]
            count = len(mine)
            mine = mine if count else rows.new_zeros(1)  # sharded models wait for every process: evaluate row 0
            first = rank + world * cut.start if count else 0
            yield self.batch(mine, count, device, length=self._longest[first] if self._longest else self.length)

    def batch(self, rows: Tensor, count: int, device: torch.device, *, length: int | None = None) -> Batch:
        """Return these sequences on a device, sent as bytes, cropped to `length` tokens or slightly more."""
        tokens = self.gather(rows)
        if length is not None:
            tokens = tokens[..., : max(1, -(-length // CROPPED_TO)) * CROPPED_TO]
        tokens = send(tokens, device)
        targets = send(self.labels.index_select(0, rows), device)
        ids = tokens.to(torch.int32)  # embeddings accept it as it is, at half the size of int64
        if self.unpadded and not self.pairs:
            return Batch(inputs=(ids,), targets=targets, count=count)
        if self.mask == "published":
            mask = tokens != PAD
        else:
            lengths = send(self.lengths.index_select(0, rows), device)
            mask = torch.arange(tokens.shape[-1], device=device) < lengths[..., None]
        inputs: tuple[Tensor, ...] = (ids, mask)
        if self.pairs:
            inputs = tuple(tensor[:, which].contiguous() for which in (0, 1) for tensor in (ids, mask))
        return Batch(inputs=inputs, targets=targets, count=count)


def _smoothing(augmentation: Augmentation | None) -> float:
    augmentation = augmentation or Augmentation()
    plain = Augmentation(label_smoothing=augmentation.label_smoothing)
    changed = [name for name in plain.__dataclass_fields__ if getattr(plain, name) != getattr(augmentation, name)]
    if changed:
        raise ValueError(f"{changed[0]} varies images, and these are sequences of tokens; leave it out")
    return augmentation.label_smoothing


@dataclass(frozen=True)
class SequenceBatches:
    """The batches of a training part, for one process; several small ones are gathered at once."""

    sequences: SequenceSet
    share: Share
    seed: int
    device: torch.device
    smoothing: float
    num_classes: int

    @property
    def steps_per_epoch(self) -> int:
        return self.share.steps

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
        self.share.check_start(start)
        order = draw_order(seed=self.seed, epoch=epoch, count=len(self.sequences))
        order = send(order, self.sequences.device)
        spans = [self.share.at(step) for step in range(start, self.share.steps)]
        bytes_each = self.sequences.nbytes // len(self.sequences)
        together = max(1, TOGETHER_BYTES // (bytes_each * max(1, self.share.total // self.share.world)))
        for first in range(0, len(spans), together):
            some = spans[first : first + together]
            sizes = [high - low for low, high in some]
            rows = torch.cat([order[low:high] for low, high in some])
            batch = self.sequences.batch(rows, len(rows), self.device)
            targets = batch.targets
            if self.smoothing:
                targets = mix_labels(targets, None, num_classes=self.num_classes, smoothing=self.smoothing)
            for size, *inputs, target in zip(
                sizes, *(tensor.split(sizes) for tensor in (*batch.inputs, targets)), strict=True
            ):
                yield Batch(inputs=tuple(inputs), targets=target, count=size)


def spread(part: SequenceSet, samples: int | None) -> SequenceSet:
    """Return at most `samples` sequences, evenly spread, so that a set sorted by class keeps all its classes."""
    if samples is not None:
        check_count("samples", samples, 1)
    if samples is None or samples >= len(part):
        return part
    return part.part(torch.linspace(0, len(part) - 1, samples).round().long())


def check_count(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} is {value!r}; it is a whole number from {least} on")


def check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise ValueError(f"{name} is {value!r}; choose one of {', '.join(map(str, choices))}")
