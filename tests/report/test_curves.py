import math
import re

import pytest

from wellcond.records import append_rows, write_json
from wellcond.report import report_runs
from wellcond.report.curves import curves_page, report_curves


def rows_of(steps, *, lost=False):
    rows = [{"step": s, "split": "train", "loss": 2.0 / s, "lr": 0.1, "images_per_second": 9.0} for s in steps]
    rows.append({"step": steps[-1], "split": "val", "loss": 1.5, "top1": 0.625, "top5": 0.875, "best": 0.625})
    return rows + [{"step": steps[-1], "split": "event", "event": "diverged: the loss became nan"}] * lost


def test_a_run_folder_gets_a_page_with_curves_and_the_way_to_the_probe(tmp_path):
    run = tmp_path / "first"
    append_rows(run / "metrics.jsonl", rows_of(range(1, 6)))
    write_json(run / "config.json", {"config": {"model": "vit_tiny_patch16_224", "recipe": "digits"}})
    assert report_curves(run) == run / "report.html"
    text = (run / "report.html").read_text(encoding="utf-8")
    assert "Training of vit_tiny_patch16_224" in text
    for title in ("Loss", "Accuracy", "Learning rate"):
        assert f"<h3>{title}</h3>" in text
    assert "62.5%" in text
    assert "wellcond train digits … --set probe_every=100 --output runs/first-probed" in text
    assert "What happened" not in text
    assert str(tmp_path) not in text  # no path of this machine


def test_what_happened_is_said_first():
    text = curves_page(rows_of(range(1, 4), lost=True), {}, name="mine").to_html()
    assert "The run mine" in text
    assert "Step 3: diverged: the loss became nan" in text
    assert text.index("What happened") < text.index("Over training")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_leaves_a_gap(value):
    rows = rows_of(range(1, 4))
    rows[1]["loss"] = value
    assert "<h3>Loss</h3>" in curves_page(rows, {}, name="gap").to_html()
    only = [{"step": 1, "split": "train", "loss": value}]
    assert "<h1>The run lost</h1>" in curves_page(only, {}, name="lost").to_html()


def test_a_run_lost_before_its_first_row_has_a_page():
    text = curves_page([{"step": 3, "split": "event", "event": "diverged"}], {}, name="early").to_html()
    assert "No step has been logged." in text
    assert "Step 3: diverged" in text


def test_of_many_points_the_highest_is_drawn_and_all_are_in_the_csv():
    rows = [{"step": s, "split": "train", "loss": 50.0 if s == 777 else 1.0} for s in range(1, 2001)]
    page = curves_page(rows, {}, name="long").to_html()
    assert "Of 2,000 points 200 are drawn" in page
    import base64

    (csv,) = re.findall(r'text/csv;charset=utf-8;base64,([^"]+)"', page)
    lines = base64.b64decode(csv).decode().splitlines()
    assert len(lines) == 2001
    assert "777,50" in lines


def test_without_rows_there_is_nothing_to_draw(tmp_path):
    with pytest.raises(ValueError, match="has no rows yet"):
        report_curves(tmp_path)


def test_report_takes_a_run_without_a_probe(tmp_path):
    """Alone it has a page; beside others there is nothing to compare, and that is said."""
    folder = tmp_path / "run"
    folder.mkdir()
    append_rows(folder / "metrics.jsonl", [{"step": 1, "split": "train", "loss": 2.5, "lr": 0.1}])
    assert report_runs([folder]) == folder / "report.html"
    assert "Over training" in (folder / "report.html").read_text(encoding="utf-8")
    assert report_runs([folder], tmp_path / "other.html") == tmp_path / "other.html"
    with pytest.raises(ValueError, match=r"has no probe.jsonl.*alone it has a page of its losses"):
        report_runs([folder, folder])
