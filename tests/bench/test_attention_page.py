"""The tables and the figure hold the numbers of the benchmark's JSON, and the pages hold these tables."""

import copy
import math
import re
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from wellcond.bench import attention
from wellcond.bench.attention_page import (
    CALLED,
    GPU,
    PARTS,
    SINGLE,
    TORCH,
    cost_exponent,
    faster,
    filled,
    plot,
    rows_of,
    spread,
    wins_from,
    write_page,
)
from wellcond.records import read_json, write_json

ROOT = Path(__file__).parents[2]
JSON = ROOT / "benchmarks" / "attention-h200.json"
PAGES = ["docs/attention.md", "docs/benchmarks.md"]
AGAIN = f"run python -m wellcond.bench.attention_page benchmarks/attention-h200.json {' '.join(PAGES)}"
MARKS = "".join(f"<!-- bench attention: {part} -->\n<!-- end of {part} -->\n" for part in PARTS)
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def record():
    """Ours, with times as called and no others; `alone` gives it the GPU's."""
    record, others = read_json(JSON), (GPU, SINGLE, "calls")
    return {**record, "rows": [{key: row[key] for key in row if key not in others} for row in record["rows"]]}


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return attention.run(output=tmp_path_factory.mktemp("bench") / "attention-cpu.json", device="cpu", quick=True)


def alone(record, factor=lambda row: 1.0):
    """The record as if the GPU's own time had been taken, a factor of that as called; none where the factor is None."""
    record = copy.deepcopy(record)
    for row in record["rows"]:
        times = factor(row)
        row[GPU] = row["both ms"] * times if row["both ms"] and times else None
    return record


def table(record, part):
    """{first cell: {column: cell}} of one part"""
    header, _, *lines = ([cell.strip() for cell in line[1:-1].split("|")] for line in PARTS[part](record).splitlines())
    return {line[0]: dict(zip(header, line, strict=True)) for line in lines}


# ---- the pages


@pytest.mark.parametrize("page", PAGES)
def test_our_pages_hold_what_our_benchmark_says(page):
    path = ROOT / page
    assert path.read_text(encoding="utf-8") == filled(JSON, path), AGAIN


def test_between_the_marks_are_tables_alone():
    text = (ROOT / "docs/attention.md").read_text(encoding="utf-8")
    parts = re.findall(r"<!-- bench attention: .*? -->\n(.*?)\n<!-- end of", text, flags=re.DOTALL)
    assert len(parts) == len(PARTS) - 1  # docs/benchmarks.md has the other
    assert all(line.startswith("|") for part in parts for line in part.splitlines())


@pytest.mark.parametrize("page", PAGES)
def test_sentences_around_the_tables_hold_no_number_of_their_own(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    begin = "## Which attention at which length" if "attention" in page else "Attention alone, forward and backward"
    text = text[text.index(begin) :]
    text = text[: text.index("`wellcond bench attention` measures" if "attention" in page else "## Training")]
    lines = text.splitlines()
    number = re.compile(r"(?<![\w/-])\d[\d,]*(?:\.\d+)?(?![\w/])")
    in_tables = {
        n.strip(",") for line in lines if line.startswith("|") for n in re.findall(r"\d[\d,]*(?:\.\d+)?", line)
    }
    sentences = [line for line in lines if not line.startswith(("|", "<", "!"))]
    found = {n.strip(",") for line in sentences for n in number.findall(line)}
    assert found, "the pattern finds no numbers"
    assert found - in_tables == set()


def test_what_the_sentences_say_is_still_true():
    """Where this fails, the benchmark is new: write the sentences of both pages anew, then this."""
    record = read_json(JSON)
    assert {m: wins_from(record, m) for m in ("skyformer", "linear", "nystrom")} == {
        "skyformer": 2048, "linear": 2048, "nystrom": 4096,
    }  # fmt: skip
    assert wins_from(record, "linear", time=GPU) == min(row["n"] for row in record["rows"])
    assert all(faster(record, row) < 1 for row in rows_of(record, "kernelized"))
    vit = [row for row in record["rows"] if row["n"] == 197 and row["method"] in ("skyformer", "nystrom", "linear")]
    assert all(faster(record, row) < 1 for row in vit)
    assert {row["method"] for row in vit if faster(record, row, time=GPU) > 1} == {"linear"}
    same = [row for row in rows_of(record, TORCH) if row["kind"] == "length" and row["tokens"] == record["tokens"]]
    assert len({row["memory MiB"] for row in same}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing", "marks no part"),
        ("<!-- bench attention: sumary -->\n<!-- end of sumary -->", "sumary.*one of summary, speed, lengths"),
        (MARKS + MARKS, "each once"),
        ("<!-- bench attention: summary -->", "exactly one `<!-- end of summary -->`"),
        ("<!-- end of summary --><!-- bench attention: summary -->", "exactly one"),
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


# ---- the tables


def test_both_measurements_of_a_shape_are_shown(record):
    shape = "32×2×2048×32"
    first, second = rows_of(record, "skyformer", shape)
    first |= {"both ms": 0.25, "times faster": 2.0}
    second |= {"both ms": 0.75, "times faster": 0.667}
    cell = "0.250, 0.750 (**2.0**, 0.67)"
    assert table(record, "lengths")[f"LRA ListOps ({shape})"]["skyformer"] == cell
    assert table(record, "shapes")[f"LRA ListOps ({shape})"]["skyformer"] == cell
    assert table(record, "speed")[f"2,048 ({shape})"]["skyformer"] == cell
    assert table(record, "noise")["skyformer"]["noise, as called"] == "3.00 ×"


def test_bold_is_faster(record):
    cells = " ".join(re.findall(r"\(([\d.,* ]+)\) \|", PARTS["lengths"](record) + PARTS["shapes"](record)))
    bold = re.findall(r"\*\*([\d.]+)\*\*", cells)
    plain = re.findall(r"[\d.]+", re.sub(r"\*\*[\d.]+\*\*", "", cells))
    assert min(map(float, bold)) >= 1 >= max(map(float, plain))


def test_the_summary_follows_the_rows(record):
    for row in rows_of(record, "skyformer"):
        row["times faster"] = 4.0 if row["n"] >= 65_536 else 0.2 if row["n"] == 512 else 0.5
    count = len(rows_of(record, "skyformer"))
    won = sum(row["n"] >= 65_536 for row in rows_of(record, "skyformer"))
    assert table(record, "summary")["skyformer"] == {
        "method": "skyformer",
        "faster from, as called": "65,536",
        "ratio at its longest, as called": "4.0 × at 131,072",
        "slower in, as called": f"{count - won} of {count}",
        "worst, in torch's time": "5.0 ×",
    }
    assert TORCH not in table(record, "summary")


def test_a_failure_is_shown_with_its_reason(record):
    row = next(row for row in rows_of(record, "linear") if row["n"] == 131_072)
    row |= {"both ms": None, "memory MiB": None, "note": "failed: OutOfMemoryError"}
    del row["times faster"]
    assert table(record, "notes")["linear"] == {
        "method": "linear", "shape": "1×2×131072×32", "note": "failed: OutOfMemoryError",
    }  # fmt: skip
    assert table(record, "summary")["linear"]["faster from, as called"] == "never"
    assert table(record, "lengths")["1×2×131072×32"]["linear"] == "–"


def test_a_short_run_on_a_cpu_has_a_page_too(ran, tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{MARKS}after", encoding="utf-8")
    text = write_page(ran, page).read_text(encoding="utf-8")
    assert text.startswith("before\n<!--")
    assert text.endswith("-->\nafter")
    assert "| 4×2×256×32 |" in text
    record = read_json(ran)
    assert table(record, "memory") == table(record, "gpu") == {}  # a CPU has no such numbers
    assert "GPU" not in PARTS["summary"](record)
    assert write_page(ran, page).read_text(encoding="utf-8") == text


def test_a_record_without_the_gpus_time_has_no_columns_for_it(record):
    """None is what a CPU writes; absent is an older record."""
    for part in PARTS.values():
        assert part(record) == part(alone(record, lambda row: None))
        assert "GPU alone" not in part(record)


def test_tables_hold_the_gpus_times_beside_the_others(record):
    shape = "1×2×65536×32"
    made = alone(record, lambda row: 0.5)
    for row in made["rows"]:
        if row["shape"] == shape and row["method"] in (TORCH, "skyformer"):
            row[GPU] = 0.125 if row["method"] == "skyformer" else 5.0
    gpu = table(made, "gpu")
    assert (gpu[shape][TORCH], gpu[shape]["skyformer"]) == ("5.00", "0.125 (**40**)")
    assert len(gpu) == len({row["shape"] for row in record["rows"]})
    lines = PARTS["speed"](made).splitlines()
    at = next(index for index, line in enumerate(lines) if shape in line)
    assert lines[at] in PARTS["speed"](record).splitlines()  # as called it is as it was
    assert lines[at + 1].startswith("| on the GPU alone | 5.00 | 0.125 (**40**) |")


def test_the_summary_answers_by_every_time(record):
    made = alone(record, lambda row: 1e-8 if row["method"] == "skyformer" else 1.0)
    for row in made["rows"]:
        row[SINGLE] = {TORCH: 2.0}.get(row["method"], 1.0 if row["method"] == "nystrom" and row["n"] >= 8192 else 3.0)
    summary = table(made, "summary")
    assert summary["skyformer"]["faster from, GPU alone"] == "197"
    assert summary["nystrom"]["faster from, single call"] == "8,192"
    assert summary["skyformer"]["faster from, single call"] == "never"


def test_what_could_not_be_captured_says_nothing_of_the_gpu(record):
    made = alone(record, lambda row: None if row["method"] == "linear" else 0.5)
    for part in ("summary", "noise"):
        assert {cell for name, cell in table(made, part)["linear"].items() if name.endswith("GPU alone")} == {""}
    assert {cells["linear"] for cells in table(made, "gpu").values()} == {"–"}


# ---- what rows say, on made rows whose answer is plain


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


def test_a_win_has_to_last_to_the_longest_sequence():
    assert wins_from(made_of((512, 4, 1, 2), (1024, 2, 2, 1), (2048, 1, 4, 1)), "skyformer") == 1024
    assert wins_from(made_of((512, 4, 2, 1), (1024, 2, 1, 2), (2048, 1, 4, 1)), "skyformer") == 2048
    assert wins_from(made_of((512, 4, 2, 1), (1024, 2, 1, 2)), "skyformer") is None
    assert wins_from(made_of((512, 4, 1, 1)), "skyformer") is None  # as fast is not faster
    assert wins_from(made_of((512, 4, 3, 1), (1024, 2, 4, 2), (2048, 1, 4, 1)), "skyformer", by=2.5) == 2048


def test_every_measurement_of_a_length_has_to_be_won():
    twice = made_of((512, 4, 2, 1), (512, 4, 2, 3), (1024, 2, 4, 1))
    assert wins_from(twice, "skyformer") == 1024
    assert spread(twice, "skyformer") == 3
    assert spread(twice, TORCH) == 1
    assert math.isnan(spread(made_of((512, 4, 2, 1)), TORCH))


def test_what_was_left_out_has_not_won():
    left_out = made_of((512, 4, 2, 1), (1024, 2, 4, None))
    assert wins_from(left_out, "skyformer") is None


def test_ratios_on_the_gpu_are_to_torchs_time_of_the_same_turn():
    record = made_of((512, 4, 2.0, 1.0), (512, 4, 3.0, 6.0), (1024, 2, 4.0, 1.0))
    for row, time in zip(record["rows"], (1.0, 4.0, 2.0, 1.0, 3.0, None), strict=True):
        row[GPU] = time
    assert [faster(record, row, time=GPU) for row in rows_of(record, "skyformer")] == [0.25, 2.0, None]
    assert [faster(record, row) for row in rows_of(record, "skyformer")] == [2.0, 0.5, 4.0]
    assert spread(record, "skyformer", time=GPU) == 4
    assert wins_from(record, "skyformer", time=GPU) is None  # what could not be captured has not won
    record["rows"][-1][GPU] = 2.9
    assert wins_from(record, "skyformer", time=GPU) == 1024
    record["rows"][4][GPU] = None  # torch's own
    assert wins_from(record, "skyformer", time=GPU) is None


def test_the_exponent_is_the_slope_from_4096_tokens_on():
    record = made_of(*((n, 65_536 // n, 1.0, 1.0) for n in (512, 4096, 16_384, 65_536)))
    assert math.isnan(cost_exponent(record["rows"], "skyformer", GPU))
    for power in (1.0, 2.0):
        for row in record["rows"]:
            row[GPU] = row["batch"] * row["n"] ** power if row["n"] > 512 else 1e9
        assert cost_exponent(record["rows"], "skyformer", GPU) == pytest.approx(power, rel=1e-12)
    for row in record["rows"]:
        row[GPU] = 1.0 if row["n"] == 512 else None
    assert math.isnan(cost_exponent(record["rows"], "skyformer", GPU))


def test_the_records_own_exponents_are_its_times_slopes():
    record = read_json(JSON)
    for method, power in record["exponents"].items():
        assert cost_exponent(record["rows"], method, CALLED) == pytest.approx(power, rel=1e-9)


# ---- the figure


def texts(path):
    elements = ElementTree.parse(path).iter()
    return [element.text for element in elements if element.tag in (f"{SVG}text", f"{SVG}tspan") and element.text]


def lines(path):
    """The points of each line, in pixels."""
    groups = [
        g for g in ElementTree.parse(path).iter(f"{SVG}g") if g.get("class", "").startswith("mark-line role-mark")
    ]
    found = [path.get("d") for group in groups for path in group.iter(f"{SVG}path")]
    return [[tuple(map(float, point.split(","))) for point in d[1:].rstrip("Z").split("L")] for d in found]


def test_the_benchmark_draws_itself_beside_its_json(ran):
    drawing = ran.with_suffix(".svg")
    again = drawing.read_text("utf-8")
    assert plot(ran) == drawing
    assert drawing.read_text("utf-8") == again
    methods = {row["method"] for row in read_json(ran)["rows"]}
    assert methods <= set(texts(drawing))
    assert {"forward + backward, ms", "256", "512"} <= set(texts(drawing))
    assert "peak memory, MiB" not in texts(drawing)  # a CPU has no such count
    assert len(lines(drawing)) == len(methods)


def test_points_are_the_rows_times_in_their_order(ran):
    record = read_json(ran)
    drawn = lines(ran.with_suffix(".svg"))
    for n, column in ((256, 0), (512, 1)):
        times = [row["both ms"] for row in record["rows"] if row["n"] == n]
        heights = [line[column][1] for line in drawn]
        by_time = [height for _, height in sorted(zip(times, heights, strict=True))]
        assert by_time == sorted(heights, reverse=True)  # pixels count downwards


def test_memory_longer_sequences_and_missing_points(ran, tmp_path):
    """Rows as a GPU writes them: with memory, one sequence of more tokens than there are in all, and a failure."""
    record = read_json(ran)
    for row in record["rows"]:
        row["memory MiB"] = row["both ms"]
        if row["n"] == 512:  # twice the tokens at the same cost a token: the same height
            row["tokens"] *= 2
            row["both ms"] = row["memory MiB"] = 2 * next(
                other["both ms"] for other in record["rows"] if other["method"] == row["method"]
            )
        if row["method"] == "kernelized" and row["n"] == 512:
            row.update({"both ms": None, "memory MiB": None, "note": "failed: OutOfMemoryError"})
    path = tmp_path / "attention.json"
    write_json(path, record)
    drawing = plot(path)
    assert "peak memory, MiB" in texts(drawing)
    assert "kernelized at n = 512: failed: OutOfMemoryError" in texts(drawing)
    assert "n = 512 is one sequence, shown per 1,024 tokens too." in texts(drawing)
    assert sorted({len(line) for line in lines(drawing)}) == [1, 2]
    for line in lines(drawing):
        assert len({round(y, 3) for _, y in line}) == 1


def test_the_gpus_time_has_its_own_panel(ran, tmp_path):
    record = read_json(ran)
    methods = list(dict.fromkeys(row["method"] for row in record["rows"]))
    assert "the same on the GPU alone, ms" not in texts(ran.with_suffix(".svg"))  # a CPU has none
    for row in record["rows"]:
        row["gpu ms"] = 1.0 + methods.index(row["method"]) if row["method"] != "linear" else None
    path = tmp_path / "attention.json"
    write_json(path, record)
    drawing = plot(path)
    assert "the same on the GPU alone, ms" in texts(drawing)
    assert sum("captured as a CUDA graph" in (text or "") for text in texts(drawing)) == 1
    assert [text for text in texts(drawing) if text in methods] == methods  # one legend
    called, alone = lines(drawing)[: len(methods)], lines(drawing)[len(methods) :]
    assert called == lines(ran.with_suffix(".svg"))  # the panel that was there is as it was
    assert len(alone) == len(methods) - 1
    heights = [{y for _, y in line} for line in alone]
    assert all(len(found) == 1 for found in heights)
    assert [min(found) for found in heights] == sorted((min(found) for found in heights), reverse=True)
    for row in record["rows"]:
        row.pop("gpu ms")  # as older records
    write_json(path, record)
    assert plot(path).read_text("utf-8") == ran.with_suffix(".svg").read_text("utf-8")


def test_what_is_not_this_benchmark_is_refused(ran, tmp_path):
    record = read_json(ran)
    path = tmp_path / "a.json"
    write_json(path, {**record, "benchmark": "kappa"})
    with pytest.raises(ValueError, match="not a record of"):
        plot(path)
    write_json(path, {**record, "rows": [{**row, "both ms": None} for row in record["rows"]]})
    with pytest.raises(ValueError, match="no time to draw"):
        plot(path)
