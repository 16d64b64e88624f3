"""Expressions are checked against a plain, recursive reading of them, and their distribution against a plain draw."""

import random
from pathlib import Path

import numpy as np
import pytest

from wellcond.data import listops, open_data
from wellcond.data.listops import CLOSE, OPERATORS, _apply, drop_brackets, generate, tokens_of
from wellcond.data.sequences import Rows

WORDS = {number + 1: str(number) for number in range(10)}
WORDS |= {number + 11: f"[{name}" for number, name in enumerate(OPERATORS)} | {CLOSE: "]"}


def expressions(rows: Rows) -> list[list[int]]:
    return [piece.tolist() for piece in np.split(rows.tokens, np.cumsum(rows.lengths)[:-1])]


def evaluate(tokens: list[int]) -> tuple[int, int]:
    """The value, and the depth."""
    stack: list[list[int]] = [[]]
    deepest = 1
    for token in tokens:
        if token <= 10:
            stack[-1].append(token - 1)
            deepest = max(deepest, len(stack))
        elif token < CLOSE:
            stack.append([token - 11])
        else:
            operator, *values = stack.pop()
            assert 2 <= len(values) <= 10
            results = (min(values), max(values), int(np.median(values)), sum(values) % 10)
            stack[-1].append(results[operator])
    ((value,),) = stack
    return value, deepest


def draw_length(depth: int = 1) -> int:
    if depth >= 10 or random.random() > 0.25:
        return 1
    return 2 + sum(draw_length(depth + 1) for _ in range(random.randint(2, 10)))


@pytest.mark.parametrize(
    ("operator", "values", "result"),
    [
        ("MIN", [4, 2, 9], 2),
        ("MAX", [4, 2, 9, 0], 9),
        ("MED", [9, 1, 4], 4),
        ("MED", [1, 2], 1),  # 1.5, truncated
        ("MED", [9, 4, 2, 9], 6),  # 6.5
        ("MED", [3, 3, 8, 9, 0, 1], 3),
        ("SM", [7, 8], 5),
        ("SM", [9] * 10, 0),
    ],
)
def test_operators(operator: str, values: list[int], result: int) -> None:
    # Beside another operator, whose arguments must not be mixed in.
    which = np.array([1, OPERATORS.index(operator)])
    found = _apply(which, np.array([0, 5, *values]), np.array([0, 2]), np.array([2, len(values)]))
    assert found.tolist() == [5, result]


def test_both_tokenisers_on_a_tree_of_our_own() -> None:
    # MAX(2, MED(1, 4), SM(9, 8, 7)) = MAX(2, 2, 4) = 4
    source = b"( ( ( ( [MAX 2 ) ( ( ( [MED 1 ) 4 ) ] ) ) ( ( ( ( [SM 9 ) 8 ) 7 ) ] ) ) ] )"
    kept = tokens_of(source)
    assert " ".join(WORDS[token] for token in kept) == "[MAX 2 [MED 1 4 ] [SM 9 8 7 ] ]"
    assert evaluate(list(kept)) == (4, 3)
    rows = Rows(np.frombuffer(kept * 2, np.uint8), np.array([len(kept)] * 2, np.int32), np.array([4, 4], np.uint8))
    dropped = drop_brackets(rows)
    assert expressions(dropped) == [[12, 3, 13, 2, 5, 14, 10, 9, 8]] * 2
    assert dropped.lengths.tolist() == [9, 9]
    for wrong in (b"[AVG 1 2 ]", b"[MAX 12 3 ]", b"hello"):
        with pytest.raises(ValueError, match="no expression of MIN, MAX, MED, SM and digits"):
            tokens_of(wrong)


@pytest.fixture(scope="module")
def drawn() -> tuple[Rows, int]:
    found = [generate(key) for key in range(5)]
    pieces = [rows for rows, _ in found]
    return Rows(*(np.concatenate(column) for column in zip(*pieces, strict=True))), sum(raw for _, raw in found)


def test_every_expression_has_the_value_of_its_label(drawn: tuple[Rows, int]) -> None:
    rows = drawn[0].between(0, 300)
    found = [evaluate(tokens) for tokens in expressions(rows)]
    assert [value for value, _ in found] == rows.labels.tolist()
    assert max(depth for _, depth in found) == 10
    assert np.mean([depth == 10 for _, depth in found]) > 0.95
    assert rows.lengths.min() > 500
    assert rows.lengths.max() < 2000


def test_the_distribution_is_the_published_one(drawn: tuple[Rows, int]) -> None:
    rows, raw = drawn
    count = len(rows.labels)
    assert abs(count / raw - 0.083) < 4 * (0.083 / raw) ** 0.5
    frequency = np.bincount(rows.labels, minlength=10) / count
    assert frequency[[0, 9]] == pytest.approx([0.172, 0.172], abs=0.018)  # 4 standard errors of 7,000
    assert frequency[1:9].min() > 0.06
    assert frequency[1:9].max() < 0.105
    random.seed(0)
    plain = [length for length in (draw_length() for _ in range(12_000)) if 500 < length < 2000]
    error = np.hypot(np.std(plain) / len(plain) ** 0.5, rows.lengths.std() / count**0.5)
    assert abs(np.mean(plain) - rows.lengths.mean()) < 4 * error
    assert drop_brackets(rows).lengths.mean() / rows.lengths.mean() == pytest.approx(0.857, abs=0.01)


def test_the_set_is_seeded_split_and_without_duplicates(tmp_path: Path) -> None:
    def read(**options: object) -> list[bytes]:
        data = open_data("lra_listops", cache_dir=tmp_path, seed=7, options={"samples": 400, "length": 256, **options})
        assert (len(data.train), len(data.val), len(data.test)) == (384, 8, 8)  # pyright: ignore[reportArgumentType]
        assert data.classes == [str(digit) for digit in range(10)]
        assert data.train.length == 256  # pyright: ignore[reportAttributeAccessIssue]
        parts = (data.train, data.val, data.test)
        return [row.tobytes() for part in parts for row in part.tokens.numpy()]  # pyright: ignore

    first = read()
    assert first == read()  # from the cache
    assert len(set(read(tokenizer="brackets_kept"))) == 400
    assert read(data_seed=1) != first
    assert max(max(row) for row in first) == 14
    assert max(max(row) for row in read(tokenizer="brackets_kept")) == 15


def test_a_larger_set_begins_with_the_smaller_one(tmp_path: Path) -> None:
    sizes = [open_data("lra_listops", cache_dir=tmp_path, options={"samples": n, "length": 64}) for n in (200, 300)]
    first, second = (data.train.tokens for data in sizes)  # pyright: ignore[reportAttributeAccessIssue]
    assert (first == second[: len(first)]).all()


def test_the_published_files(tmp_path: Path) -> None:
    lines = [b"Source\tTarget\n", b"( ( ( [MIN 3 ) 5 ) ] )\t3\n", b"( ( ( [SM 9 ) 5 ) ] )\t4\n"]
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_bytes(b"".join(lines))
    data = open_data(f"lra_listops:{tmp_path}", cache_dir=tmp_path / "c", options={"tokenizer": "brackets_kept"})
    assert data.train.tokens[:, :5].tolist() == [[11, 4, 6, 15, 0], [14, 10, 6, 15, 0]]  # pyright: ignore
    assert data.val.labels.tolist() == [3, 4]
    (tmp_path / "basic_val.tsv").write_bytes(b"Source\tTarget\n[MIN 3 5 ]\t3\n[MIN 3 5 ]\tthree\n")
    with pytest.raises(ValueError, match=r"line 3 of .*basic_val.tsv cannot be read"):
        open_data(f"lra_listops:{tmp_path}", cache_dir=tmp_path / "c")


@pytest.mark.parametrize("length", [16, 32, 48, 64, 96])
def test_short_expressions(tmp_path, length):
    """Some pieces end in a level without operators, or have no expression at all."""
    for seed in range(4):
        data = open_data(
            "lra_listops", cache_dir=tmp_path, options={"samples": 50, "length": length, "data_seed": seed}
        )
        assert (len(data.train), data.train.length) == (48, length)
        assert int(data.train.lengths.max()) <= length * 125 // 128


def test_more_expressions_than_there_are_is_an_error_and_no_endless_search(tmp_path, monkeypatch):
    piece = listops.Made.piece
    monkeypatch.setattr(listops.Made, "piece", lambda made, number: piece(made, 0))  # always the same
    with pytest.raises(ValueError, match=r"no more than \d+ different expressions of 7 to 31 tokens were found"):
        open_data("lra_listops", cache_dir=tmp_path, options={"samples": 5000, "length": 32})


@pytest.mark.parametrize("options", [{"length": 5}, {"length": -5}, {"length": 31.5}, {"samples": -40}])
def test_sizes_that_make_no_sense(tmp_path, options):
    with pytest.raises(ValueError, match=r"(length|samples) is -?[\d.]+; "):
        open_data("lra_listops", cache_dir=tmp_path, options={"samples": 50, **options})
    with pytest.raises(ValueError, match=r"(length|samples) is -?[\d.]+; it is a whole number from"):
        open_data("made_up_text", cache_dir=tmp_path, options=options)
