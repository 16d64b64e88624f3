import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wellcond.data import open_data
from wellcond.data.sequences import Rows
from wellcond.data.texts import encode, pair_up

REVIEWS = {
    "train": [(0, b"Dull."), (1, "Très bon…".encode()), (0, b"no"), (1, b"yes <br />")],
    "test": [(0, b"bad\xff"), (1, b"x" * 5000)],
}


def write_folder(root: Path) -> Path:
    for split, reviews in REVIEWS.items():
        for number, (label, text) in enumerate(reviews):
            folder = root / "aclImdb" / split / ("neg", "pos")[label]
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number}_{3 + 5 * label}.txt").write_bytes(text)
    return root


def write_tables(root: Path, *, end: str = "tsv.gz") -> Path:
    root.mkdir(exist_ok=True)
    for split, reviews in REVIEWS.items():
        lines = b"".join(b"%d\t7\t%s\n" % review for review in sorted(reviews, key=lambda review: review[0]))
        (root / f"{split}.{end}").write_bytes(gzip.compress(lines) if end.endswith("gz") else lines)
    return root


def texts(part: Any) -> list[bytes]:
    return [bytes(token - 1 for token in row[:n].tolist()) for row, n in zip(part.tokens, part.lengths, strict=True)]


def test_bytes_plus_one() -> None:
    assert encode("é\0z".encode(), 10).tolist() == [0xC3 + 1, 0xA9 + 1, 1, ord("z") + 1]
    assert encode(b"\xff", 10).tolist() == [byte + 1 for byte in "\ufffd".encode()]
    assert len(encode(b"x" * 5000, 4000)) == 4000


@pytest.mark.parametrize("form", ["folder", "tsv", "tsv.gz"])
def test_imdb_in_both_forms(tmp_path: Path, form: str) -> None:
    root = write_folder(tmp_path) if form == "folder" else write_tables(tmp_path / "imdb", end=form)
    told: list[Any] = []
    data: Any = open_data(f"lra_text:{root}", cache_dir=tmp_path / "c", progress=lambda *what: told.append(what))
    assert told
    assert data.classes == ["neg", "pos"]
    assert (data.train.length, data.train.vocab) == (4096, 512)
    assert dict(zip(texts(data.train), data.train.labels.tolist(), strict=True)) == {
        text: label for label, text in REVIEWS["train"]
    }
    assert data.val is data.test  # as published
    assert texts(data.val) == ["bad\ufffd".encode(), b"x" * 4000]
    assert data.val.lengths.tolist() == [6, 4000]
    again: Any = open_data(f"lra_text:{root}", cache_dir=tmp_path / "c")
    assert again.train.content() == data.train.content()
    held: Any = open_data(f"lra_text:{root}", cache_dir=tmp_path / "c", holdout=0.5)
    assert (len(held.train), len(held.val), len(held.test)) == (2, 2, 2)
    assert texts(held.test) == texts(data.test)


def test_what_is_wrong_with_a_table(tmp_path: Path) -> None:
    root = write_tables(tmp_path / "imdb", end="tsv")
    for content, says in (
        (b"1\t7\n", "line 1 of .*train.tsv has 2 columns; wanted: label, rating, text"),
        (b"2\t7\tx\n", "has the label '2'; labels are 0 and 1"),
        (b"1\t7\tx\n", "1 reviews, not of both classes"),
    ):
        (root / "train.tsv").write_bytes(content)
        with pytest.raises(ValueError, match=says):
            open_data(f"lra_text:{root}", cache_dir=tmp_path / "c")
    write_tables(root)
    (root / "train.tsv").unlink()
    (root / "train.tsv.gz").write_bytes((root / "train.tsv.gz").read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"train.tsv.gz is damaged"):
        open_data(f"lra_text:{root}", cache_dir=tmp_path / "c")


def test_the_pairs_of_aan(tmp_path: Path) -> None:
    for name in ("train", "eval", "test"):
        lines = [f'1.0\tP1\tP2\tfirst "of" {name}\t{"y" * 12_000}', "0.0\tP3\tP4\ta\tb"]
        (tmp_path / f"new_aan_pairs.{name}.tsv").write_text("\n".join(lines))
    data: Any = open_data(f"lra_retrieval:{tmp_path}", cache_dir=tmp_path / "c")
    assert data.train.pairs
    assert data.train.tokens.shape == (2, 2, 4096)
    assert data.train.labels.tolist() == [1, 0]
    assert data.val.lengths.tolist() == [[15, 4000], [1, 1]]
    assert bytes((data.test.tokens[0, 0, :15] - 1).tolist()) == b'first "of" test'
    (tmp_path / "new_aan_pairs.eval.tsv").write_text("1.0\tP1\tP2\tone text alone\n")
    with pytest.raises(ValueError, match="has 4 columns; wanted: label, id, id, text, text"):
        open_data(f"lra_retrieval:{tmp_path}", cache_dir=tmp_path / "c")


def test_pairs_of_reviews_are_balanced_and_each_is_used_twice() -> None:
    labels = np.array([0, 1] * 20 + [0] * 5, np.uint8)
    rows = Rows(np.arange(45, dtype=np.uint8), np.ones(45, np.int32), labels)
    pairs = pair_up(rows, 0)
    found = pairs.tokens.reshape(-1, 2)
    assert len(found) == 40
    assert pairs.labels.mean() == 0.5
    assert ((labels[found[:, 0]] == labels[found[:, 1]]) == pairs.labels).all()
    assert (found[:, 0] != found[:, 1]).all()
    for column in found.T:
        assert len(set(column.tolist())) == 40
    assert np.array_equal(pair_up(rows, 0).tokens, pairs.tokens)
    assert not np.array_equal(pair_up(rows, 1).tokens, pairs.tokens)
    with pytest.raises(ValueError, match="too few to make pairs of"):
        pair_up(rows.between(0, 4), 0)


def test_no_review_is_in_two_parts_of_the_pairs(tmp_path: Path) -> None:
    for split in ("train", "test"):
        lines = [f"{number % 2}\t5\t{split} {number:03d}\n" for number in range(200)]
        (tmp_path / f"{split}.tsv").write_text("".join(lines))
    data: Any = open_data(f"imdb_pairs:{tmp_path}", cache_dir=tmp_path / "c", options={"length": 32})
    assert data.name == "imdb_pairs"
    seen = []
    for part in (data.train, data.val, data.test):
        sequences = zip(part.tokens.flatten(0, 1), part.lengths.flatten(), strict=True)
        seen.append({bytes((tokens[:length] - 1).tolist()) for tokens, length in sequences})
    assert all(text.startswith(b"train") for text in seen[0] | seen[1])
    assert all(text.startswith(b"test") for text in seen[2])
    assert not seen[0] & seen[1]
    assert len(data.test) == 200


@pytest.mark.parametrize("word", ["made_up_text", "made_up_pairs", "digit_tokens"])
def test_stand_ins_need_nothing(word: str, tmp_path: Path) -> None:
    data: Any = open_data(word, cache_dir=tmp_path / "c")
    assert data.name == word
    assert data.train.pairs == (word == "made_up_pairs")
    assert min(len(data.train), len(data.val), len(data.test)) >= 24
    assert len(data.train.labels.unique()) == len(data.classes)
    assert not (tmp_path / "c").exists()
    assert open_data(word, cache_dir=tmp_path).train.content() == data.train.content()


def test_made_up_text_can_be_learnt() -> None:
    data: Any = open_data("made_up_text")
    for part in (data.train, data.val):
        good = [
            text.count(b"good") + text.count(b"best") + text.count(b"great") + text.count(b"fine")
            for text in texts(part)
        ]
        bad = [
            text.count(b"bad") + text.count(b"dull") + text.count(b"worst") + text.count(b"weak")
            for text in texts(part)
        ]
        right = (np.array(good) > np.array(bad)) == part.labels.numpy()
        assert right.mean() > 0.9
