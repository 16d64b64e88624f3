"""ListOps, a task of the Long Range Arena: the value of a nested expression of MIN, MAX, MED and SM (sum modulo 10).

    data = open_data("lra_listops")                                            # generated, 96,000 + 2,000 + 2,000
    data = open_data("lra_listops:lra_release/listops-1000")                   # basic_train.tsv and the like
    data = open_data("lra_listops", options={"tokenizer": "brackets_kept"})

Expressions are drawn from the published distribution. A node is a digit with probability 3/4, and always at depth 10;
otherwise it is an operator with 2 to 10 arguments. Expressions of between 500 and 2,000 tokens are kept, where an
operator and its closing bracket are two. The published tables used a tokeniser that by mistake drops every bracket
(`brackets_dropped`, 14 tokens), so that the end of an operator's arguments is lost. `brackets_kept` is the fixed one.
"""

from pathlib import Path
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from wellcond.data.cache import Progress
from wellcond.data.dataset import DataSet
from wellcond.data.draws import make_key
from wellcond.data.made import Made, stat_key
from wellcond.data.sequences import MaskRule, Rows, SequenceSet, check_choice, kept_tokens, spread
from wellcond.data.sources import Settings, register_source
from wellcond.data.texts import read_lines

__all__ = ["CLOSE", "OPERATORS", "Tokenizer", "drop_brackets", "generate", "parse", "tokens_of"]

Tokenizer = Literal["brackets_dropped", "brackets_kept"]
OPERATORS = ("MIN", "MAX", "MED", "SM")
DIGIT, OPERATOR = 1, 11  # the tokens of 0 and of MIN; 0 is padding
CLOSE = OPERATOR + len(OPERATORS)
VOCAB = 32  # rows of the published embedding
DEEPEST, MOST_ARGUMENTS, OPERATOR_CHANCE = 10, 10, 0.25
IN_VAIN = 20  # pieces in a row without a new expression
SHARES = (0.96, 0.02, 0.02)
SAMPLES = 100_000
RAW = 1 << 14  # expressions drawn at once, of which 8 % are kept
FILES = ("basic_train.tsv", "basic_val.tsv", "basic_test.tsv")
WANTED = (
    "a folder with basic_train.tsv, basic_val.tsv and basic_test.tsv, as lra_release.gz of "
    "google-research/long-range-arena has in listops-1000; without a folder, lra_listops generates its own"
)


class _Level(NamedTuple):
    """The nodes of one depth, over all trees; the arguments of a node are adjacent in the next level."""

    tree: NDArray[np.int64]
    arguments: NDArray[np.int64]
    """How many; 0 for a digit."""
    what: NDArray[np.int64]
    """The digit, or the operator's index."""


def generate(key: int, *, shortest: int = 500, longest: int = 2000, raw: int = RAW) -> tuple[Rows, int]:
    """Draw `raw` expressions; return those with more than `shortest` and fewer than `longest` tokens, and `raw`.

    All trees grow at once, level by level.
    """
    draw = np.random.default_rng(key)
    levels: list[_Level] = []
    lengths = np.zeros(raw, np.int64)
    tree = np.arange(raw)
    for depth in range(1, DEEPEST + 1):
        is_operator = (draw.random(len(tree)) <= OPERATOR_CHANCE) & (depth < DEEPEST)
        arguments = np.where(is_operator, draw.integers(2, MOST_ARGUMENTS + 1, len(tree)), 0)
        what = np.where(is_operator, draw.integers(len(OPERATORS), size=len(tree)), draw.integers(10, size=len(tree)))
        levels.append(_Level(tree, arguments, what))
        lengths += np.bincount(tree, minlength=raw) + np.bincount(tree[is_operator], minlength=raw)
        tree = np.repeat(tree, np.where(lengths[tree] < longest, arguments, 0))  # trees that are too long stop growing
    kept = (lengths > shortest) & (lengths < longest)
    number = np.cumsum(kept) - 1
    levels = [_Level(number[lv.tree], lv.arguments, lv.what) for lv in (_some(lv, kept[lv.tree]) for lv in levels)]
    return _write(levels, lengths[kept]), raw


def _some(level: _Level, chosen: NDArray[np.bool_]) -> _Level:
    return _Level(level.tree[chosen], level.arguments[chosen], level.what[chosen])


def _write(levels: list[_Level], lengths: NDArray[np.int64]) -> Rows:
    """Compute sizes and values from the leaves to the roots, then places in the text from the roots to the leaves."""
    sizes: list[NDArray[np.int64]] = []
    sizes_below = values_below = np.zeros(0, np.int64)
    for level in reversed(levels):
        inner = level.arguments > 0
        size, value = np.ones(len(inner), np.int64), level.what.copy()
        if inner.any():
            counts = level.arguments[inner]
            starts = np.cumsum(counts) - counts
            size[inner] = 2 + np.add.reduceat(sizes_below, starts)
            value[inner] = _apply(level.what[inner], values_below, starts, counts)
        sizes.append(size)
        sizes_below, values_below = size, value
    sizes.reverse()
    tokens = np.zeros(int(lengths.sum()), np.uint8)
    places = np.cumsum(lengths) - lengths
    for depth, (level, size) in enumerate(zip(levels, sizes, strict=True)):
        inner = level.arguments > 0
        tokens[places] = level.what + np.where(inner, OPERATOR, DIGIT)
        at, counts = places[inner], level.arguments[inner]
        tokens[at + size[inner] - 1] = CLOSE
        if not len(at):
            break  # all levels below are empty
        below = sizes[depth + 1]
        before = np.cumsum(below) - below
        starts = np.cumsum(counts) - counts
        places = before + np.repeat(at + 1 - before[starts], counts)
    return Rows(tokens, lengths.astype(np.int32), values_below.astype(np.uint8))


def _apply(
    operators: NDArray[np.int64], values: NDArray[np.int64], starts: NDArray[np.int64], counts: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return each operator's value. The median of an even number is the mean of the middle two, rounded down."""
    of = np.repeat(np.arange(len(starts)), counts)
    ordered = np.sort(of * 10 + values) % 10  # within each operator's arguments
    median = (ordered[starts + (counts - 1) // 2] + ordered[starts + counts // 2]) // 2
    results = (ordered[starts], ordered[starts + counts - 1], median, np.add.reduceat(values, starts) % 10)
    return np.choose(operators, results)


def drop_brackets(rows: Rows) -> Rows:
    """Keep only operators and digits, 14 tokens, as published."""
    kept = rows.tokens != CLOSE
    before = np.concatenate([[0], np.cumsum(kept)])
    ends = np.cumsum(rows.lengths)
    lengths = before[ends] - before[ends - rows.lengths]
    return Rows(rows.tokens[kept], lengths.astype(np.int32), rows.labels)


# ---- the published files

_BYTES = np.full(256, 255, np.uint8)
_BYTES[ord("0") : ord("9") + 1] = np.arange(DIGIT, DIGIT + 10)
_BYTES[[ord(letter) for letter in "abcd"]] = np.arange(OPERATOR, OPERATOR + 4)
_BYTES[ord("]")] = CLOSE
_TABLE = _BYTES.tobytes()


def tokens_of(source: bytes) -> bytes:
    """Tokenise `( ( ( [MAX 2 ) 9 ) ] )`, keeping brackets but not parentheses. Raises ValueError for other words."""
    short = source
    for operator, letter in zip(OPERATORS, "abcd", strict=True):
        short = short.replace(b"[" + operator.encode() + b" ", letter.encode() + b" ")
    tokens = short.translate(_TABLE, b"() ")
    if b"\xff" in tokens or any(len(word) > 1 for word in short.translate(None, b"()").split()):
        raise ValueError(f"it is no expression of {', '.join(OPERATORS)} and digits: {source[:60].decode('latin1')!r}")
    return tokens


def parse(path: Path, progress: Progress | None = None) -> Rows:
    """Read a file with the columns Source and Target, keeping brackets."""
    texts, labels = [], []
    for number, (source, *targets) in read_lines(path, "lra_listops", progress):
        if number == 1 and source == b"Source":
            continue
        try:
            texts.append(tokens_of(source))
            labels.append(int(targets[0]))
        except (ValueError, IndexError) as error:
            raise ValueError(f"line {number} of {path} cannot be read: {error}") from error
        if not 0 <= labels[-1] < 10:
            raise ValueError(f"line {number} of {path} has the value {labels[-1]}; values are 0 to 9")
    if not texts:
        raise ValueError(f"{path} has no expressions; it needs the columns Source and Target")
    lengths = np.array([len(text) for text in texts], np.int32)
    return Rows(np.frombuffer(b"".join(texts), np.uint8), lengths, np.array(labels, np.uint8))


# ---- the source


@register_source("lra_listops", takes="[FOLDER]", wants=WANTED)
def _listops(
    rest: str, settings: Settings, *, samples: int | None = None, length: int = 2048,
    tokenizer: Tokenizer = "brackets_dropped", mask: MaskRule = "published", data_seed: int = 0,
) -> DataSet:  # fmt: skip
    check_choice("tokenizer", tokenizer, get_args(Tokenizer))
    if rest:
        pieces = [[piece] for piece in _read(Path(rest).expanduser(), settings, kept_tokens(length))]
    else:
        pieces = _generated(settings, SAMPLES if samples is None else samples, kept_tokens(length), data_seed)
    if tokenizer == "brackets_dropped":
        pieces = [list(map(drop_brackets, piece)) for piece in pieces]
    parts = [SequenceSet.of(piece, length=length, vocab=VOCAB, mask=mask) for piece in pieces]
    if rest:
        parts = [spread(part, samples) for part in parts]
    train, val, test = parts
    classes = [str(digit) for digit in range(10)]
    return DataSet(name="lra_listops", classes=classes, train=train, val=val, test=test, skipped=[])


def _generated(settings: Settings, samples: int, longest: int, seed: int) -> list[list[Rows]]:
    """Return pieces of train, val and test: the first `samples` expressions of an endless list given by the seed."""
    if samples < 3:
        raise ValueError(f"samples is {samples}; train, val and test need one each")
    window = {"shortest": longest // 4, "longest": longest}
    raw = RAW if samples > 100 else RAW // 8
    key = {"seed": seed, "raw": raw, **window}
    made = Made(
        settings.cache_dir, "lra_listops", key, lambda i: generate(make_key(seed, 0x1157, i), **window, raw=raw)[0]
    )
    pieces: list[Rows] = []
    seen: set[bytes] = set()
    have = number = 0
    last = 0  # the number of the last piece with a new expression
    while have < samples:
        rows = _unseen(made.piece(number), seen).between(0, samples - have)
        last = number if len(rows.labels) else last
        if number - last >= IN_VAIN:
            raise ValueError(
                f"no more than {have} different expressions of {window['shortest']} to {longest} tokens were found; "
                f"take a greater length, or samples={have}"
            )
        pieces.append(rows)
        have, number = have + len(rows.labels), number + 1
        if settings.progress is not None and made.was_made:
            settings.progress("generating lra_listops", have, samples)
    whole = Rows(*(np.concatenate(columns) for columns in zip(*pieces, strict=True)))
    counts = [max(1, round(share * samples)) for share in SHARES]
    ends = np.cumsum([samples - counts[1] - counts[2], counts[1], counts[2]])
    return [[whole.between(low, high)] for low, high in zip([0, *ends[:-1]], ends, strict=True)]


def _unseen(rows: Rows, seen: set[bytes]) -> Rows:
    """Return the rows that are not in `seen` yet, and add them."""
    from hashlib import blake2b

    ends = np.cumsum(rows.lengths, dtype=np.int64)
    new = np.ones(len(ends), bool)
    for i, (low, high) in enumerate(zip(ends - rows.lengths, ends, strict=True)):
        digest = blake2b(rows.tokens[low:high].tobytes(), digest_size=12).digest()
        new[i] = digest not in seen
        seen.add(digest)
    return Rows(rows.tokens[np.repeat(new, rows.lengths)], rows.lengths[new], rows.labels[new])


def _read(folder: Path, settings: Settings, kept: int) -> list[Rows]:
    missing = [name for name in FILES if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"there is no {folder / missing[0]}; lra_listops:FOLDER is {WANTED}")
    key = stat_key(folder, FILES)
    made = Made(settings.cache_dir, "lra_listops-files", key, lambda i: parse(folder / FILES[i], settings.progress))
    found = [made.piece(number) for number in range(len(FILES))]
    longest = max(int(rows.lengths.max()) for rows in found)
    if longest > kept:
        raise ValueError(f"an expression in {folder} has {longest} tokens; {kept} fit: set length higher")
    return found
