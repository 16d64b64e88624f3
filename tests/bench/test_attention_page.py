"""The pages say what the benchmark's JSON says, and other rows make other sentences."""

import copy
import math
import re
import runpy
import sys
from pathlib import Path

import pytest

from wellcond.bench import attention
from wellcond.bench.attention_facts import TORCH, losses, rows_of, spread, unmoved, wins_from
from wellcond.bench.attention_page import filled, write_page
from wellcond.bench.attention_words import OURS
from wellcond.records import read_json, write_json

ROOT = Path(__file__).parents[2]
JSON = ROOT / "benchmarks" / "attention-h200.json"
AGAIN = "run python -m wellcond.bench.attention_page benchmarks/attention-h200.json docs/attention.md README.md"
MARKS = "".join(
    f"<!-- bench attention: {part} -->\n<!-- end of {part} -->\n" for part in ("choice", "numbers", "speed")
)


@pytest.fixture
def record():
    return read_json(JSON)


@pytest.fixture
def said(tmp_path):
    """What a page says of a record."""

    def text(record):
        write_json(tmp_path / "record.json", record)
        (tmp_path / "page.md").write_text(MARKS, encoding="utf-8")
        return write_page(tmp_path / "record.json", tmp_path / "page.md").read_text(encoding="utf-8")

    return text


def slowed(record, method, factor, where=lambda row: True):
    """The record with a method's times multiplied, and its ratios with them."""
    record = copy.deepcopy(record)
    for row in record["rows"]:
        if row["method"] == method and where(row):
            row["both ms"] *= factor
            row["times faster"] /= factor
    return record


def made_of(*rows):
    """A record of two methods from (n, batch, torch's time, skyformer's time or None)."""
    found = []
    for n, batch, torchs, ours in rows:
        shape = {"kind": "length", "shape": f"{batch}×2×{n}×32", "n": n, "batch": batch, "tokens": n * batch}
        found.append({**shape, "method": TORCH, "both ms": torchs, "times faster": 1.0})
        found.append(
            {**shape, "method": "skyformer", "both ms": ours} | ({"times faster": torchs / ours} if ours else {})
        )
    return {"rows": found}


@pytest.mark.parametrize("page", ["docs/attention.md", "README.md"])
def test_our_pages_are_what_our_benchmark_says(page):
    path = ROOT / page
    assert path.read_text(encoding="utf-8") == filled(JSON, path), AGAIN


def test_a_win_has_to_last_to_the_longest_sequence():
    assert wins_from(made_of((512, 4, 1, 2), (1024, 2, 2, 1), (2048, 1, 4, 1)), "skyformer") == 1024
    assert wins_from(made_of((512, 4, 2, 1), (1024, 2, 1, 2), (2048, 1, 4, 1)), "skyformer") == 2048
    assert wins_from(made_of((512, 4, 2, 1), (1024, 2, 1, 2)), "skyformer") is None
    assert wins_from(made_of((512, 4, 1, 1)), "skyformer") is None  # as fast is not faster
    assert wins_from(made_of((512, 4, 3, 1), (1024, 2, 4, 2), (2048, 1, 4, 1)), "skyformer", by=2.5) == 2048


def test_every_measurement_of_a_length_has_to_be_won():
    twice = made_of((512, 4, 2, 1), (512, 4, 2, 3), (1024, 2, 4, 1))
    assert wins_from(twice, "skyformer") == 1024
    assert [row["both ms"] for row in losses(twice, "skyformer")] == [3]
    assert spread(twice, "skyformer") == 3
    assert spread(twice, TORCH) == 1
    assert math.isnan(spread(made_of((512, 4, 2, 1)), TORCH))


def test_what_was_left_out_has_not_won():
    left_out = made_of((512, 4, 2, 1), (1024, 2, 4, None))
    assert wins_from(left_out, "skyformer") is None
    assert losses(left_out, "skyformer") == []


def test_a_time_that_twice_the_tokens_do_not_change_is_noticed():
    found = unmoved(made_of((512, 1, 1, 1.0), (1024, 1, 4, 1.1)), "skyformer")
    assert [row["n"] for row in found or ()] == [512, 1024]
    assert unmoved(made_of((512, 1, 1, 1.0), (1024, 1, 4, 1.9)), "skyformer") is None
    assert unmoved(made_of((512, 2, 1, 1.0), (1024, 1, 4, 1.0)), "skyformer") is None  # as many tokens


def test_both_measurements_of_a_shape_are_shown(record, said):
    first, second = rows_of(record, "skyformer", "32×2×2048×32")
    first |= {"both ms": 0.25, "times faster": 2.0}
    second |= {"both ms": 0.75, "times faster": 0.667}
    text = said(record)
    assert text.count("0.250, 0.750 (**2.0**, 0.67)") == 3  # by length, in the arena's table, for the README
    assert "skyformer 0.250 and 0.750" in text


def test_sentences_follow_the_rows(record, said):
    slow = said(slowed(record, "skyformer", 1e4))
    count = len(rows_of(record, "skyformer"))
    assert f"Skyformer was slower in {count} of {count} measurements" in slow
    assert "skyformer was faster" not in slow
    fast = said(slowed(record, "skyformer", 1e-4))
    assert "At every measured length skyformer was faster each time." in fast
    assert "At 197 tokens skyformer can be faster than torch's attention." in fast
    assert "Skyformer was slower" not in fast
    late = slowed(record, "skyformer", 1e4, where=lambda row: row["n"] < 65_536)
    late = slowed(late, "skyformer", 1e-4, where=lambda row: row["n"] >= 65_536)
    assert "skyformer from 65,536 tokens on" in said(late)


def test_the_first_to_win_is_advised(record, said):
    for method in OURS:
        start = 4096 if method == "linear" else 32_768
        record = slowed(record, method, 1e4, where=lambda row, start=start: row["n"] < start)
        record = slowed(record, method, 1e-4, where=lambda row, start=start: row["n"] >= start)
    advice = "Below 4,096 tokens keep softmax, torch's own; from there on linear was faster each time."
    assert said(record).count(advice) == 2


def test_no_winner_keeps_softmax(record, said):
    for method in OURS:
        record = slowed(record, method, 1e4)
    text = said(record)
    assert text.count("Keep softmax, torch's own: nothing was faster from any measured length on.") == 2
    assert f"in every measurement:** nothing. At no length: {', '.join(OURS)}." in text


def test_bold_is_faster(record, said):
    cells = " ".join(re.findall(r"\(([\d.,* ]+)\) \|", said(record)))
    bold = re.findall(r"\*\*([\d.]+)\*\*", cells)
    plain = re.findall(r"[\d.]+", re.sub(r"\*\*[\d.]+\*\*", "", cells))
    assert min(map(float, bold)) >= 1 >= max(map(float, plain))


def test_a_failure_is_shown_with_its_reason(record, said):
    row = next(row for row in rows_of(record, "linear") if row["n"] == 131_072)
    row |= {"both ms": None, "memory MiB": None, "note": "failed: OutOfMemoryError"}
    del row["times faster"]
    text = said(record)
    assert "linear at 1×2×131072×32: failed: OutOfMemoryError" in text
    assert "linear from" not in text


def test_a_short_run_on_a_cpu_has_a_page_too(tmp_path, one_thread):
    path = attention.run(output=tmp_path / "attention.json", device="cpu", quick=True)
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS}after", encoding="utf-8")
    text = write_page(path, page).read_text(encoding="utf-8")
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter")
    assert "| 256 (4×2×256×32) |" in text
    assert "MiB" not in text  # a CPU has no such count
    assert write_page(path, page).read_text(encoding="utf-8") == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "marks no part"),
        ("<!-- bench attention: chioce -->\n<!-- end of chioce -->", "chioce.*one of choice, numbers, speed"),
        (MARKS + MARKS, "each once"),
        ("<!-- bench attention: choice -->", "no single `<!-- end of choice -->`"),
        ("<!-- end of choice --><!-- bench attention: choice -->", "no single"),
    ],
)
def test_a_page_with_wrong_marks_is_left_as_it_is(tmp_path, text, message):
    page = tmp_path / "page.md"
    page.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        write_page(JSON, page)
    assert page.read_text(encoding="utf-8") == text


def test_another_benchmark_is_refused(tmp_path):
    (tmp_path / "page.md").write_text(MARKS, encoding="utf-8")
    with pytest.raises(ValueError, match="not a record of `wellcond bench attention`"):
        filled(ROOT / "benchmarks" / "kappa-h200.json", tmp_path / "page.md")


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")  # this file has imported it already
def test_the_command_writes_every_page_it_is_given(tmp_path, monkeypatch, capsys):
    pages = [tmp_path / "a.md", tmp_path / "b.md"]
    for page in pages:
        page.write_text(MARKS, encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["attention_page", str(JSON), *map(str, pages)])
    runpy.run_module("wellcond.bench.attention_page", run_name="__main__")
    assert capsys.readouterr().out.count("wrote") == 2
    assert all("| 65,536 (1×2×65536×32) |" in page.read_text(encoding="utf-8") for page in pages)
    monkeypatch.setattr(sys, "argv", ["attention_page", str(JSON)])
    with pytest.raises(SystemExit, match="usage"):
        runpy.run_module("wellcond.bench.attention_page", run_name="__main__")
