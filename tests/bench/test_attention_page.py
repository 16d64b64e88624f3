"""The pages say what the benchmark's JSON says, and other rows make other sentences."""

import copy
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from wellcond.bench import attention
from wellcond.bench.attention_facts import ALONE, GPU, TORCH, rows_of, unmoved, wins_from
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
    """Ours, with times as called and no others; `alone` gives it the GPU's."""
    record, others = read_json(JSON), (GPU, ALONE, "calls")
    return {**record, "rows": [{key: row[key] for key in row if key not in others} for row in record["rows"]]}


@pytest.fixture
def late(record):
    """Skyformer wins from 4,096 tokens on as called, and nothing else anywhere."""
    for method in OURS:
        record = slowed(record, method, 1e4)
    return slowed(record, "skyformer", 1e-8, where=lambda row: row["n"] >= 4096)


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


def alone(record, factor=lambda row: 1.0):
    """The record as if the GPU's own time had been taken, a factor of that as called; none where the factor is None."""
    record = copy.deepcopy(record)
    for row in record["rows"]:
        times = factor(row)
        row[GPU] = row["both ms"] * times if row["both ms"] and times else None
    return record


def tables(text):
    """The header and the rows of each table of a page."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines()]
        found.append((lines[0], lines[2:]))
    return found


def verdict_of(text, method):
    header, rows = next(found for found in tables(text) if found[0][0] == "method")
    return dict(zip(header, next(row for row in rows if row[0] == method), strict=True))


@pytest.mark.parametrize("page", ["docs/attention.md", "README.md"])
def test_our_pages_are_what_our_benchmark_says(page):
    path = ROOT / page
    assert path.read_text(encoding="utf-8") == filled(JSON, path), AGAIN


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
    assert "At every measured length skyformer was faster each time" in fast
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
    advice = "Below 4,096 tokens keep softmax, torch's own; from there on linear was faster each time, "
    advice += "from 32,768 on skyformer, nystrom and kernelized too."
    assert said(record).count(advice) == 2


def test_no_winner_keeps_softmax(record, said):
    for method in OURS:
        record = slowed(record, method, 1e4)
    text = said(record)
    assert text.count("Keep softmax, torch's own: nothing was faster from any measured length on.") == 2
    assert f"in every measurement:** nothing. At no length: {', '.join(OURS)}." in text


def test_single_calls_are_told_from_those_of_a_model(record, said):
    assert "backward pass of its own" not in said(record)
    for row in record["rows"]:
        ours = row["method"] == "nystrom" and row["n"] >= 8192
        row |= {ALONE: 1.0 if ours else 2.0 if row["method"] == TORCH else 3.0, "calls": 6 if row["n"] < 8192 else 1}
    text = said(record)
    assert "Faster than torch's attention in every such measurement: nystrom from 8,192 tokens on." in text
    assert text.count("up to 6") == 2
    assert "one call where up to 6 share a backward pass; in brackets" in text


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


# ---- with the GPU's time without the host


def test_a_record_without_the_gpus_time_has_the_page_it_had(record, said):
    """None is what a CPU writes; absent is an older record."""
    text = said(record)
    assert text == said(alone(record, lambda row: None))
    assert "GPU alone" not in text


def test_the_page_answers_by_both_times(late, said):
    assert wins_from(late, "skyformer") == 4096
    text = said(alone(late, lambda row: 1e-8 if row["method"] == "skyformer" else 1.0))
    advice = "As called from Python: below 4,096 tokens keep softmax, torch's own; from there on skyformer was faster "
    advice += "each time. On the GPU alone: at every measured length skyformer was faster each time."
    assert text.count(advice) == 2
    assert text.count("**Which of the two times is yours.**") == 1
    assert (
        "At 197 tokens nothing is faster than torch's attention as called; skyformer can be on the GPU alone." in text
    )
    assert "So change a ViT's attention" not in text
    assert "**The same on the GPU alone:** skyformer from 197 tokens on" in text
    assert text.count("Skyformer was slower") == 1
    verdict = verdict_of(text, "skyformer")
    assert (verdict["wins from"], verdict["wins from, GPU"]) == ("4,096", "197")
    assert verdict_of(text, "linear")["wins from, GPU"] == "never"


def test_one_answer_for_both_times_is_given_once(late, said):
    text = said(alone(late))
    assert text.count("As called from Python and on the GPU alone: below 4,096 tokens keep softmax") == 2
    assert "At 197 tokens nothing is faster than torch's attention, as called or on the GPU alone.** So change" in text


def test_tables_hold_the_gpus_times_beside_the_others(record, said):
    shape = "1×2×65536×32"
    made = alone(record, lambda row: 0.5)
    for row in made["rows"]:
        if row["shape"] == shape and row["method"] in (TORCH, "skyformer"):
            row[GPU] = 0.125 if row["method"] == "skyformer" else 5.0
    text = said(made)
    _, alone_rows = tables(text)[2]
    assert next(row for row in alone_rows if row[0] == shape)[1:3] == ["5.00", "0.125 (**40**)"]
    assert len(alone_rows) == len({row["shape"] for row in record["rows"]})
    readme = tables(text)[-1][1]
    at = next(index for index, row in enumerate(readme) if shape in row[0])
    assert readme[at] == next(row for row in tables(said(record))[-1][1] if shape in row[0])  # as it was
    assert readme[at + 1][:3] == ["on the GPU alone", "5.00", "0.125 (**40**)"]
    assert text.count("| on the GPU alone |") == len(readme) / 2


def test_what_could_not_be_captured_says_nothing_of_the_gpu(record, said):
    made = alone(record, lambda row: None if row["method"] == "linear" else 0.5)
    for row in rows_of(made, "linear"):
        row["note"] = "no graph: RuntimeError"
    text = said(made)
    assert "Not measured: linear." in text
    assert "linear at 1×2×65536×32: no graph: RuntimeError" in text
    cells = [cell for name, cell in verdict_of(text, "linear").items() if name.endswith(", GPU")]
    assert cells == [""] * 4
    header, rows = tables(text)[2]
    assert {row[header.index("linear")] for row in rows} == {"–"}


def test_the_hosts_part_is_named_where_it_was_measured(record, said):
    """Twice the tokens took as long as called: the page knows why, if it has the GPU's time."""
    guess, cause = "most likely, the host's", "What is more as called is the host's (skyformer)"
    for row in rows_of(record, "skyformer"):
        row["both ms"] = 0.75
    assert unmoved(record, "skyformer")
    assert guess in said(record)
    hosts = said(alone(record, lambda row: 0.4 if row["method"] == "skyformer" else 1.0))
    assert cause in hosts
    assert guess not in hosts
    gpus = said(alone(record))  # nothing is left for the host
    assert "host's (" not in gpus
    assert guess not in gpus


def test_a_record_that_cannot_be_read_is_one_line(tmp_path):
    page, broken = tmp_path / "page.md", tmp_path / "broken.json"
    page.write_text("nothing")
    broken.write_text('{"rows": [')
    for record in (broken, tmp_path / "none.json"):
        command = [sys.executable, "-m", "wellcond.bench.attention_page", str(record), str(page)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert len(done.stderr.splitlines()) == 1
        assert record.name in done.stderr
    assert page.read_text() == "nothing"
