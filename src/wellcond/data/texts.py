"""Texts as bytes, for the Text and Retrieval tasks of the Long Range Arena, and stand-ins that need no download.

    data = open_data("lra_text:aclImdb")                  # IMDB: is a review positive? train/pos/*.txt, …
    data = open_data("lra_text:imdb")                     # as train.tsv.gz and test.tsv.gz with label, rating, text
    data = open_data("lra_retrieval:aan")                 # AAN: does one paper cite the other?
    data = open_data("imdb_pairs:aclImdb")                # not AAN: do two reviews share an opinion?
    data = open_data("made_up_text")                      # random words, but learnt within seconds, for tests
    data = open_data("made_up_pairs")

A token is a byte plus 1, and 0 is padding; 4,000 bytes are kept and padded to 4,096. The Text task is validated on its
test part, as published, or with `holdout` on a part of train.
"""

import gzip
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from wellcond.data.cache import Progress
from wellcond.data.dataset import DataSet
from wellcond.data.draws import make_key
from wellcond.data.made import Made, stat_key
from wellcond.data.sequences import MaskRule, Rows, SequenceSet, check_count, kept_tokens, spread
from wellcond.data.sources import Settings, register_source

__all__ = ["encode", "pair_up", "read_lines"]

VOCAB = 512
SIDES = ("neg", "pos")
SAME = ("other opinion", "same opinion")
IMDB = (
    "aclImdb as https://ai.stanford.edu/~amaas/data/sentiment/aclImdb_v1.tar.gz unpacks (train/pos/*.txt, …), or a "
    "folder with train.tsv[.gz] and test.tsv[.gz] of label, rating and text"
)
AAN = (
    "a folder with new_aan_pairs.train.tsv, new_aan_pairs.eval.tsv and new_aan_pairs.test.tsv, from lra_release.gz of "
    "google-research/long-range-arena; the texts may not be passed on, and imdb_pairs:FOLDER is a stand-in"
)
AAN_FILES = ("new_aan_pairs.train.tsv", "new_aan_pairs.eval.tsv", "new_aan_pairs.test.tsv")
LINES = 2000  # between two progress calls
HELD = 0.1  # share of the training reviews whose pairs are for validation


def encode(text: bytes, kept: int) -> NDArray[np.uint8]:
    """Encode text as its bytes plus 1. UTF-8 has no byte 255, so they fit; what is not UTF-8 is replaced."""
    valid = text.decode(errors="replace").encode()
    return np.frombuffer(valid[:kept], np.uint8) + np.uint8(1)


def read_lines(path: Path, what: str, progress: Progress | None) -> Iterator[tuple[int, list[bytes]]]:
    """Yield (number, columns) for each line of a TSV file, which may be gzipped. Quotes have no special meaning."""
    size = path.stat().st_size
    with open(path, "rb") as raw:
        file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
        try:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n").split(b"\t")
                if progress is not None and number % LINES == 0:
                    progress(f"reading {what} ({path.name})", raw.tell(), size)
        except (EOFError, gzip.BadGzipFile) as error:
            raise ValueError(f"{path} is damaged: {error}; get it again") from error
    if progress is not None:
        progress(f"reading {what} ({path.name})", size, size)


def _rows(texts: Sequence[NDArray[np.uint8]], labels: Sequence[int]) -> Rows:
    lengths = np.array([len(text) for text in texts], np.int32)
    return Rows(np.concatenate(texts), lengths, np.array(labels, np.uint8))


def _label(cell: bytes, where: str) -> int:
    try:
        label = int(float(cell))
    except ValueError:
        label = -1
    if label not in (0, 1):
        raise ValueError(f"{where} has the label {cell[:20].decode('latin1')!r}; labels are 0 and 1")
    return label


# ---- IMDB


def _open_imdb(rest: str, settings: Settings, kept: int, what: str) -> list[Rows]:
    """Return the reviews of train and of test."""
    folder = Path(rest).expanduser()
    folder = folder / "aclImdb" if (folder / "aclImdb").is_dir() else folder
    tables = [_table(folder, split) for split in ("train", "test")]
    if all(tables):
        key = stat_key(folder, [table.name for table in tables if table])
        reads: list[Callable[[], Rows]] = [
            lambda table=table: _read_table(table, kept, what, settings.progress) for table in tables if table
        ]
    else:
        sides = [f"{split}/{side}" for split in ("train", "test") for side in SIDES]
        missing = [side for side in sides if not (folder / side).is_dir()]
        if missing:
            raise ValueError(f"there is no {folder / missing[0]}; {what}:FOLDER is {IMDB}")
        key = stat_key(folder, sides)
        reads = [
            lambda split=split: _read_reviews(folder / split, kept, settings.progress) for split in ("train", "test")
        ]
    made = Made(settings.cache_dir, "imdb", {**key, "kept": kept}, lambda i: reads[i]())
    return [made.piece(number) for number in range(2)]


def _table(folder: Path, split: str) -> Path | None:
    return next((path for end in ("tsv", "tsv.gz") if (path := folder / f"{split}.{end}").is_file()), None)


def _read_table(path: Path, kept: int, what: str, progress: Progress | None) -> Rows:
    texts, labels = [], []
    for number, cells in read_lines(path, what, progress):
        if len(cells) < 3:
            raise ValueError(f"line {number} of {path} has {len(cells)} columns; wanted: label, rating, text")
        labels.append(_label(cells[0], f"line {number} of {path}"))
        texts.append(encode(b"\t".join(cells[2:]), kept))
    return _checked(texts, labels, path)


def _read_reviews(folder: Path, kept: int, progress: Progress | None) -> Rows:
    texts, labels = [], []
    for label, side in enumerate(SIDES):
        files = sorted((folder / side).glob("*.txt"), key=lambda file: [int(n) for n in re.findall(r"\d+", file.name)])
        for number, file in enumerate(files, 1):
            texts.append(encode(file.read_bytes(), kept))
            labels.append(label)
            if progress is not None and (number % LINES == 0 or number == len(files)):
                progress(f"reading {folder.name}/{side}", number, len(files))
    return _checked(texts, labels, folder)


def _checked(texts: list[NDArray[np.uint8]], labels: list[int], where: Path) -> Rows:
    if len(set(labels)) < 2:
        raise ValueError(f"{where} has {len(labels)} reviews, not of both classes; {IMDB} is wanted")
    return _rows(texts, labels)


@register_source("lra_text", takes="FOLDER", wants=IMDB)
def _text(
    rest: str, settings: Settings, *, samples: int | None = None, length: int = 4096, mask: MaskRule = "published"
) -> DataSet:
    parts = [
        spread(SequenceSet.of([rows], length=length, vocab=VOCAB, mask=mask), samples)
        for rows in _open_imdb(rest, settings, kept_tokens(length), "lra_text")
    ]
    return DataSet(name="lra_text", classes=list(SIDES), train=parts[0], val=parts[1], test=parts[1], skipped=[])


# ---- pairs


@register_source("lra_retrieval", takes="FOLDER", wants=AAN)
def _retrieval(
    rest: str, settings: Settings, *, samples: int | None = None, length: int = 4096, mask: MaskRule = "published"
) -> DataSet:
    folder, kept = Path(rest).expanduser(), kept_tokens(length)
    missing = [name for name in AAN_FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"there is no {folder / missing[0]}; lra_retrieval:FOLDER is {AAN}")
    made = Made(
        settings.cache_dir, "aan", {**stat_key(folder, AAN_FILES), "kept": kept},
        lambda i: _read_pairs(folder / AAN_FILES[i], kept, settings.progress),
    )  # fmt: skip
    train, val, test = (
        spread(SequenceSet.of([made.piece(number)], length=length, vocab=VOCAB, mask=mask), samples)
        for number in range(len(AAN_FILES))
    )
    return DataSet(
        name="lra_retrieval", classes=["no citation", "citation"], train=train, val=val, test=test, skipped=[]
    )  # fmt: skip


def _read_pairs(path: Path, kept: int, progress: Progress | None) -> Rows:
    """Read a file with the columns label, id, id, text, text."""
    texts, labels = [], []
    for number, cells in read_lines(path, "lra_retrieval", progress):
        if len(cells) != 5:
            raise ValueError(f"line {number} of {path} has {len(cells)} columns; wanted: label, id, id, text, text")
        labels.append(_label(cells[0], f"line {number} of {path}"))
        texts += [encode(cell, kept) for cell in cells[3:]]
    if not texts:
        raise ValueError(f"{path} is empty")
    rows = _rows(texts, labels)
    return rows._replace(lengths=rows.lengths.reshape(-1, 2))


def pair_up(rows: Rows, key: int) -> Rows:
    """Make pairs of texts; the label is 1 if both are of the same class, as in half of the pairs.

    Equally many texts of each class are used, each once as the first and once as the second of a pair, never with
    itself.
    """
    draw = np.random.default_rng(key)
    members = [draw.permutation(np.flatnonzero(rows.labels == label)) for label in (0, 1)]
    each = min(map(len, members)) // 2 * 2
    if each < 4:
        raise ValueError(f"{each} texts of a class are too few to make pairs of; four are the least")
    half = each // 2
    firsts, seconds, labels = [], [], []
    for own in (0, 1):
        first, other = members[own][:each], members[1 - own][:each]
        firsts.append(first)
        # The first half is paired with the second half of its own class, the second half with the other's first half.
        seconds.append(np.concatenate([draw.permutation(first[half:]), draw.permutation(other[:half])]))
        labels.append(np.repeat([1, 0], half))
    order = draw.permutation(2 * each)
    first, second, same = (np.concatenate(column)[order] for column in (firsts, seconds, labels))
    found = rows.pick(np.stack([first, second], 1).reshape(-1))
    return Rows(found.tokens, found.lengths.reshape(-1, 2), same.astype(np.uint8))


def _paired(name: str, train: Rows, test: Rows, *, seed: int, **how: Any) -> DataSet:
    """Make pairs within train, val (a tenth of train) and test, never across them."""
    samples = how.pop("samples")
    order = np.random.default_rng(make_key(seed, 0x9A12)).permutation(len(train.labels))
    held = round(HELD * len(order))
    texts = [train.pick(np.sort(order[held:])), train.pick(np.sort(order[:held])), test]
    paired = [pair_up(rows, make_key(seed, 0x9A13, number)) for number, rows in enumerate(texts)]
    parts = [spread(SequenceSet.of([rows], **how, vocab=VOCAB), samples) for rows in paired]
    return DataSet(name=name, classes=list(SAME), train=parts[0], val=parts[1], test=parts[2], skipped=[])


@register_source("imdb_pairs", takes="FOLDER", wants=IMDB)
def _imdb_pairs(
    rest: str, settings: Settings, *, samples: int | None = None, length: int = 4096, mask: MaskRule = "published",
    data_seed: int = 0,
) -> DataSet:  # fmt: skip
    train, test = _open_imdb(rest, settings, kept_tokens(length), "imdb_pairs")
    return _paired("imdb_pairs", train, test, seed=data_seed, length=length, mask=mask, samples=samples)


# ---- made up

WORDS = {
    0: ["bad", "dull", "weak", "boring", "awful", "poor", "tired", "flat", "wrong", "worst"],
    1: ["good", "great", "fine", "moving", "superb", "rich", "fresh", "strong", "right", "best"],
    2: ["the", "a", "film", "plot", "actor", "scene", "it", "was", "with", "and", "of", "in", "one", "story", "camera"],
}


def _make_up(count: int, kept: int, key: int, *, share: float) -> Rows:
    """Make texts in which this share of the words reveals the class."""
    draw = np.random.default_rng(key)
    labels = np.arange(count) % 2
    texts = []
    for label in labels:
        length = int(draw.integers(kept // 2, kept + 1))
        telling = draw.random(length // 4 + 1) < share
        lists = [WORDS[int(label)] if tells else WORDS[2] for tells in telling]
        words = [some[int(draw.integers(len(some)))] for some in lists]
        texts.append(encode(" ".join(words).encode(), length))
    return _rows(texts, labels.tolist())


@register_source("made_up_text", takes="")
def _made_up_text(
    _rest: str, _settings: Settings, *, samples: int = 320, length: int = 128, mask: MaskRule = "published",
    data_seed: int = 0,
) -> DataSet:  # fmt: skip
    check_count("samples", samples, 10)
    parts = []
    for number, count in enumerate((samples * 8 // 10, samples // 10, samples // 10)):
        rows = _make_up(max(2, count), kept_tokens(length), make_key(data_seed, number), share=1 / 3)
        parts.append(SequenceSet.of([rows], length=length, vocab=VOCAB, mask=mask))
    train, val, test = parts
    return DataSet(name="made_up_text", classes=list(SIDES), train=train, val=val, test=test, skipped=[])


@register_source("made_up_pairs", takes="")
def _made_up_pairs(
    _rest: str, _settings: Settings, *, samples: int = 640, length: int = 128, mask: MaskRule = "published",
    data_seed: int = 0,
) -> DataSet:  # fmt: skip
    check_count("samples", samples, 10)
    train, test = (
        _make_up(max(8, count), kept_tokens(length), make_key(data_seed, 2, number), share=1.0)
        for number, count in enumerate((max(80, samples * 9 // 10), samples // 10))
    )
    return _paired("made_up_pairs", train, test, seed=data_seed, length=length, mask=mask, samples=None)
