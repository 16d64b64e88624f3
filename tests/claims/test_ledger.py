import json
import math
import re
import shutil
import sys
from itertools import dropwhile, takewhile
from pathlib import Path

import pytest
from rich.console import Console

from wellcond.claims import ledger
from wellcond.claims.catalogue import CLAIMS, OURS
from wellcond.claims.claim import THE_PAPER, Measured, Options, TableRow
from wellcond.claims.figures import altair, svg
from wellcond.claims.overview import overview, overview_rows
from wellcond.claims.runs import Runs
from wellcond.records import read_json, write_record
from wellcond.verdicts import Interval, Part, interval, not_run

ROOT = Path(__file__).parents[2]


def lab_record(data="cifar10", drop=22.0):
    runs = {arm: [{"seed": s, "status": "finished", "top1": 90.0 - lost + 0.1 * s, "top5": 99.0} for s in range(3)]
            for arm, lost in (("both", 0.0), ("no-sa", drop), ("no-mlp", 2.0))}  # fmt: skip
    arms = {
        arm: {
            "lr": 1e-3, "lr at the edge of the grid": False, "runs": found,
            "grid": {"epochs": 10, "rates": [{"lr": 1e-3, "status": "finished", "top1": 80.0}]},
        }
        for arm, found in runs.items()
    }  # fmt: skip
    return {"claim": "asa-fig1c", "scale": "lab", "data": data, "epochs": 100, "seeds": 3, "arms": arms, "paper": {}}


@pytest.fixture
def evidence(tmp_path):
    (tmp_path / "evidence").mkdir()
    return tmp_path / "evidence"


def verdicts(evidence):
    return {entry.id: entry.verdict for entry in ledger.entries(evidence)}


def section(folder, *lines):
    """What the page says of a claim with these lines: what is in sight, and what is folded."""
    entry = ledger.Entry(id="asa-fig1c", verdict="holds", lines=lines, files=(folder / "lab.json",))
    return ledger.page(folder, folder / "claims.md", [entry]).split("## asa-fig1c")[1].split("<details>")


def table(text):
    """The cells of a text's first table, row by row, without the line under its head."""
    lines = takewhile(is_row, dropwhile(lambda line: not is_row(line), text.splitlines()))
    head, under, *rows = ([cell.strip() for cell in line[2:-2].split(" | ")] for line in lines)
    assert under == ["---"] * len(head)
    assert {len(row) for row in rows} == {len(head)}
    return [head, *rows]


def is_row(line):
    return line.startswith("|")


def test_what_cannot_be_drawn_has_no_figure(evidence, tmp_path):
    """Such as a comparison of which only the rates have been tried, and all of them diverged."""
    record = {**lab_record("tiny-imagenet"), "claim": "asa-table5", "epochs": 50, "seeds": 1}
    rates = [{"lr": 1e-3, "status": "diverged", "top1": 0.5}]
    record["arms"] = {"finetune": {"runs": [], "grid": {"epochs": 10, "rates": rates}}}
    write_record(evidence / "asa-table5" / "lab-tiny-imagenet.json", record, seed=0)
    page, figure = tmp_path / "claims.md", evidence / "asa-table5" / "lab.svg"
    figure.write_text("of an earlier record")
    ledger.run(evidence, page)
    assert not figure.exists()
    assert "lab.svg" not in page.read_text().split("## asa-table5")[1]
    assert ledger.check(evidence, page) == ""


def test_without_evidence_every_claim_is_listed_as_such(evidence, tmp_path):
    built = [id_ for id_ in OURS if CLAIMS[id_].built]
    expected = {id_: "no evidence yet" if id_ in built else "not built yet" for id_ in OURS}
    assert verdicts(evidence) == expected
    text = ledger.page(evidence, tmp_path / "docs" / "claims.md")
    for id_ in OURS:
        assert f"| {id_} |" in text
    assert text.count("| no evidence yet |") == len(built)
    assert text.count("| not built yet |") == len(OURS) - len(built)
    assert f"no evidence yet: {len(built)}; not built yet: {len(OURS) - len(built)}.**" in text


def test_smoke_is_never_a_verdict(evidence, tmp_path):
    write_record(evidence / "asa-fig1c" / "smoke-digits.json", lab_record() | {"scale": "smoke"}, seed=0)
    assert verdicts(evidence)["asa-fig1c"] == "smoke only"
    text = ledger.page(evidence, tmp_path / "claims.md")
    assert "**smoke only**" in text
    assert "top-1" not in text.split("## asa-fig1c")[1]


def test_verdicts_come_from_the_rows(evidence, tmp_path):
    write_record(evidence / "asa-fig1c" / "smoke-digits.json", lab_record() | {"scale": "smoke"}, seed=0)
    path = evidence / "asa-fig1c" / "lab-cifar10.json"
    write_record(path, lab_record(), seed=0)
    assert verdicts(evidence)["asa-fig1c"] == "undecided"  # two sets are missing
    for name, drop in (("cifar100", 30.0), ("tiny-imagenet", 40.0)):
        write_record(path.with_name(f"lab-{name}.json"), lab_record(name, drop), seed=0)
    assert verdicts(evidence)["asa-fig1c"] == "holds"
    write_record(path.with_name("lab-tiny-imagenet.json"), lab_record("tiny-imagenet", 20.0), seed=0)
    assert verdicts(evidence)["asa-fig1c"] == "holds in part"
    text = ledger.page(evidence, tmp_path / "claims.md")
    assert "**holds in part**" in text
    head, *rows = table(text.split("## asa-fig1c")[1])
    assert head == ["", "top-1", "top-5", "share of top-1", "learning rate", "the paper"]
    zero = "0.00 [0.00, 0.00] points"
    assert ["CIFAR-10, drop with no attention skip", "22.00 [22.00, 22.00] points", zero, "24 %", "", ""] in rows
    assert ["CIFAR-100, drop with no attention skip", "30.00 [30.00, 30.00] points", zero, "33 %", "", ""] in rows
    lost = "22.0 points of top-1 on CIFAR-10, 30.0 on CIFAR-100 and 20.0 on Tiny-ImageNet"
    assert f"Attention skips matter more than MLP skips: without them a ViT-Tiny loses {lost} (24, 33 and " in text
    assert " % of what it had), against 2.0, 2.0 and 2.0 without its MLP skips" in text
    write_record(path, lab_record(drop=2.0), seed=0)
    text = ledger.page(evidence, tmp_path / "claims.md")
    assert (
        "Without its attention skips a ViT-Tiny loses 2.0 points of top-1 on CIFAR-10," in text
    )  # as much as without MLP


def test_the_papers_number_stands_beside_ours(evidence, tmp_path):
    paper = {"paper": {"no-sa": -21.5, "no-mlp": -2.0}}
    write_record(evidence / "asa-fig1c" / "lab-cifar10.json", lab_record() | paper, seed=0)
    text = ledger.page(evidence, tmp_path / "claims.md")
    seen, folded = text.split("## asa-fig1c")[1].split("<details>")
    ours = ["22.00 [22.00, 22.00] points", "0.00 [0.00, 0.00] points", "24 %", ""]
    assert ["CIFAR-10, drop with no attention skip", *ours, "21.5 points"] in table(seen)
    assert "21.5" not in folded  # said once
    reached = ["90.10 [89.85, 90.35] %", "99.00 [99.00, 99.00] %", "", "0.001", ""]
    assert ["CIFAR-10, both skips", *reached] in table(seen)
    tuned = folded.split("Top-1 in % on held-out images by learning rate, after 10 epochs:")[1]
    assert table(tuned)[:2] == [["", "0.001"], ["CIFAR-10, both skips", "**80.0**"]]


def test_columns_are_merged_in_their_order_with_the_papers_last_and_no_empty_one(tmp_path):
    seen, _ = section(
        tmp_path,
        TableRow("a", {"top-1": "1", "rate": "2", "diverged": "", THE_PAPER: "3"}),
        TableRow("b", {"top-1": "4", "share": "5", "rate": "", "diverged": ""}),
        TableRow("c", {"first": "6", "share": "7", THE_PAPER: "", "last": "8"}),
    )
    assert table(seen) == [
        ["", "first", "top-1", "share", "rate", "last", "the paper"],
        ["a", "", "1", "", "2", "", "3"],
        ["b", "", "4", "5", "", "", ""],
        ["c", "6", "", "7", "", "8", ""],
    ]


def test_a_table_without_intervals_says_one_seed_once(tmp_path):
    single, several = interval([1.0]), interval([1.0, 2.0, 3.0])
    rows = [TableRow(name, {"top-1": single.with_unit(" %"), "loss": f"{single}"}) for name in "ab"]
    seen, folded = section(tmp_path, *rows)
    assert table(seen) == [["one seed", "top-1", "loss"], ["a", "1.00 %", "1.00"], ["b", "1.00 %", "1.00"]]
    assert (seen + folded).count("one seed") == 1
    mixed, _ = section(tmp_path, *rows, TableRow("c", {"loss": f"{several}"}))
    head, first, *_ = table(mixed)
    assert (head, first) == (["", "top-1", "loss"], ["a", "1.00 % (one seed)", "1.00 (one seed)"])


def test_folded_tables_stand_under_their_titles_and_the_results_are_in_sight(tmp_path):
    one, other, main = TableRow("a", {"x": "1"}, "One"), TableRow("b", {"y": "2"}, "Other"), TableRow("c", {"z": "3"})
    seen, folded = section(tmp_path, one, "A sentence.", other, main, one._replace(what="d"))
    assert table(seen) == [["", "z"], ["c", "3"]]
    before, first, second = re.split("^(?:One|Other):$", folded, flags=re.MULTILINE)
    assert "|" not in before
    assert table(first) == [["", "x"], ["a", "1"], ["d", "1"]]
    assert table(second) == [["", "y"], ["b", "2"]]
    assert second.index("| b |") < second.index("- A sentence.") < second.index("</details>")
    alone, folded = section(tmp_path, one)
    assert "|" not in alone


def test_in_a_terminal_a_row_is_a_line_of_what_it_has():
    assert str(TableRow("a", {"x": "**1**", "y": "", THE_PAPER: "2"})) == "a: x 1; the paper 2"


def test_the_chart_has_every_statement_with_its_interval_and_what_was_asked(evidence):
    write_record(evidence / "asa-fig1c" / "lab-cifar10.json", lab_record(), seed=0)
    shutil.copytree(ROOT / "evidence" / "theory", evidence / "theory")
    rows = overview_rows(ledger.entries(evidence))
    heading, points, *others = rows
    assert heading["statement"].startswith("asa-fig1c: removing the attention skip")
    assert heading["statement"].endswith("(points)")
    assert (points["mean"], points["from"], points["outcome"]) == (pytest.approx(16), 0, "holds")
    assert points["left"] < points["low"] <= points["mean"] <= points["high"] <= points["to"] == points["right"]
    assert [row["claim"] for row in others if row["outcome"]] == sorted(
        [path.stem for path in (evidence / "theory").glob("*.json")], key=OURS.index
    )
    drawn = svg(overview(rows))
    for text in (points["statement"], "16.0 [16.0, 16.0]", heading["statement"]):
        assert f">{text}<" in drawn


def test_the_chart_has_a_heading_and_a_scale_for_each_unit_of_a_claim():
    def part(name, unit, outcome="holds", high=2.0):
        found = Interval(mean=1.0, low=0.5, high=high, count=3)
        return Part(name=name, outcome=outcome, why="", found=found, asked=(0.0, math.inf), unit=unit)

    parts = (part("a", "points"), part("`κ`", ""), part("b", "points", "undecided", 4.0))
    counted = Part(name="`c`", outcome="does not hold", why="")
    missing = Part(name="d", outcome="not run", why="")
    entries = [
        ledger.Entry(id="asa-table3", verdict="undecided", parts=parts),
        ledger.Entry(id="asa-fig2", verdict="holds in part", parts=(counted, parts[0], missing)),
    ]
    rows = overview_rows(entries)
    assert [row["statement"] for row in rows if row["outcome"]] == ["a", "b", "κ", "a", "c"]
    assert rows.pop()["mean"] is None
    assert f">{counted.outcome}<" in svg(overview(overview_rows(entries)))
    assert [row["statement"].partition(":")[0] for row in rows if not row["outcome"]] == ["asa-table3"] * 2 + [
        "asa-fig2"
    ]
    assert [(row["from"], row["to"]) for row in rows if row["outcome"]] == [
        (0.0, pytest.approx(right)) for right in (4.2, 4.2, 2.1, 2.1)
    ]


def test_sets_come_in_the_claims_own_order(evidence, tmp_path):
    for name in ("tiny-imagenet", "cifar100", "cifar10"):
        write_record(evidence / "asa-fig1c" / f"lab-{name}.json", lab_record(name), seed=0)
    (entry,) = [one for one in ledger.entries(evidence) if one.id == "asa-fig1c"]
    places = [entry.finding.index(f" on {title}") for title in ("CIFAR-10,", "CIFAR-100", "Tiny-ImageNet")]
    assert places == sorted(places)
    assert [path.stem for path in entry.files] == ["lab-cifar10", "lab-cifar100", "lab-tiny-imagenet"]


def test_theory_enters_as_it_was_found(evidence, tmp_path):
    shutil.copytree(ROOT / "evidence" / "theory", evidence / "theory")
    found = verdicts(evidence)
    text = ledger.page(evidence, tmp_path / "claims.md")
    for path in (evidence / "theory").glob("*.json"):
        record = json.loads(path.read_text(encoding="utf-8"))
        assert found[path.stem] == record["verdict"]
        assert record["findings"][0] in text


def test_a_page_that_differs_is_told_where(evidence, tmp_path):
    target = tmp_path / "claims.md"
    assert "there is no" in ledger.check(evidence, target)
    ledger.run(evidence, target)
    assert ledger.check(evidence, target) == ""
    target.write_text(target.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert "'' there, None by the evidence" in ledger.check(evidence, target)
    write_record(evidence / "asa-fig1c" / "lab-cifar10.json", lab_record(), seed=0)
    assert re.search(r"from line \d+ on", ledger.check(evidence, target))


def test_a_stranger_is_refused(evidence):
    (evidence / "asa-fig99").mkdir()
    with pytest.raises(ValueError, match="asa-fig99 belongs to no claim"):
        ledger.entries(evidence)


def test_a_broken_file_is_named(evidence):
    (evidence / "asa-fig1c").mkdir()
    (evidence / "asa-fig1c" / "lab-cifar10.json").write_text("{")
    with pytest.raises(ValueError, match=r"lab-cifar10.json cannot be read"):
        ledger.entries(evidence)


def test_our_page_is_what_our_evidence_says(monkeypatch):
    monkeypatch.chdir(ROOT)
    packaged = Path("src/wellcond/report/reference.json")
    assert ledger.check(Path("evidence"), Path("docs/claims.md"), packaged, Path("README.md")) == ""
    widths = [float(re.findall(r'width="([^"]+)"', path.read_text())[0]) for path in Path("evidence").rglob("*.svg")]
    assert 200 < min(widths) < max(widths) < 2000  # a layer without rows can make a figure infinitely large


def test_the_readme_has_a_table_between_its_marks(evidence, tmp_path):
    readme, page = tmp_path / "README.md", tmp_path / "claims.md"
    readme.write_text("before\n<!-- ledger -->\nold\n<!-- end of ledger -->\nafter\n", encoding="utf-8")
    write_record(evidence / "asa-fig1c" / "lab-cifar10.json", lab_record(), seed=0)
    ledger.run(evidence, page, readme=readme)
    text = readme.read_text(encoding="utf-8")
    assert text.startswith("before\n<!-- ledger -->\n| claim |")
    assert text.endswith("<!-- end of ledger -->\nafter\n")
    assert "| [asa-fig1c](docs/claims.md#asa-fig1c): removing the attention skip" in text
    assert (
        "22.0 points of top-1 on CIFAR-10 (24 % of what it had), against 2.0 without its MLP skips | undecided |"
        in text
    )
    assert "| asa-table2: graying adds" in text
    assert "|  | no evidence yet |" in text
    assert ledger.check(evidence, page, readme=readme) == ""
    readme.write_text(text.replace("| undecided |", "| holds |"), encoding="utf-8")
    assert "README.md is not what" in ledger.check(evidence, page, readme=readme)
    readme.write_text("no marks", encoding="utf-8")
    for path in (readme, tmp_path / "missing.md"):
        for call in (ledger.check, ledger.run):
            with pytest.raises(ValueError, match="each once"):
                call(evidence, page, readme=path)


def test_a_missing_reference_is_told(evidence, tmp_path):
    page, reference = tmp_path / "claims.md", tmp_path / "reference.json"
    ledger.run(evidence, page)
    assert "reference.json is not what" in ledger.check(evidence, page, reference)
    ledger.run(evidence, page, reference)
    assert ledger.check(evidence, page, reference) == ""


def test_figures_are_drawn_from_the_rows_and_an_old_one_is_told(evidence, tmp_path):
    path, target = evidence / "asa-fig1c" / "lab-cifar10.json", tmp_path / "claims.md"
    write_record(path, lab_record(), seed=0)
    ledger.run(evidence, target)
    figure = evidence / "asa-fig1c" / "lab.svg"
    assert figure.read_text(encoding="utf-8").startswith("<svg")
    assert "(evidence/asa-fig1c/lab.svg)" in target.read_text(encoding="utf-8")
    assert ledger.check(evidence, target) == ""
    drawn = figure.stat().st_mtime_ns
    ledger.run(evidence, target)
    assert figure.stat().st_mtime_ns == drawn
    figure.write_text(figure.read_text(encoding="utf-8").replace("of rows ", "of rows 0"), encoding="utf-8")
    assert "lab.svg shows other rows" in ledger.check(evidence, target)


def test_without_altair_only_drawing_fails_and_says_what_to_install(evidence, tmp_path, monkeypatch):
    ledger.run(evidence, tmp_path / "claims.md")
    monkeypatch.setitem(sys.modules, "altair", None)
    monkeypatch.setattr(ledger, "can_draw", lambda: False)
    write_record(evidence / "asa-fig1c" / "smoke-digits.json", lab_record() | {"scale": "smoke"}, seed=0)
    ledger.run(evidence, tmp_path / "claims.md")  # there is nothing to draw
    write_record(evidence / "asa-fig1c" / "lab-cifar10.json", lab_record(), seed=0)
    with pytest.raises(ValueError, match="pip install altair"):
        ledger.run(evidence, tmp_path / "claims.md")
    with pytest.raises(ValueError, match="charts need Altair"):
        altair()


def test_a_claim_whose_words_fail_is_named(evidence, monkeypatch):
    def says(record):
        return record["misspelt"]

    claim = Measured(
        id="my-claim", claim="a", test="b", holds_if="c", measure=lambda options: {}, says=says,
        judge=lambda record: [not_run("c")],
    )  # fmt: skip
    monkeypatch.setitem(CLAIMS, claim.id, claim)
    write_record(evidence / "my-claim" / "lab.json", {"claim": "my-claim", "scale": "lab"}, seed=0)
    with pytest.raises(ValueError, match=r"my-claim cannot be told from its evidence \(KeyError: 'misspelt'"):
        ledger.entries(evidence)


def test_a_mistake_in_a_judge_does_not_cost_the_measurement(tmp_path):
    claim = Measured(
        id="my-claim", claim="a", test="b", holds_if="c", measure=lambda options: {"value": 1},
        judge=lambda record: record["misspelt"],
    )  # fmt: skip
    options = Options(scale="lab", evidence=tmp_path, console=Console(quiet=True))
    with pytest.raises(KeyError):
        claim.reproduce(options, Runs(tmp_path, console=options.console))
    assert read_json(tmp_path / "my-claim" / "lab.json")["value"] == 1
