import os
import re
import sys

import pytest

from wellcond import cli
from wellcond.records import RunWriter, TrainRow, append_rows, write_json
from wellcond.report import report_runs
from wellcond.report.measured import Measured
from wellcond.report.runs import _names

pytestmark = pytest.mark.usefixtures("without_drawing")


@pytest.fixture
def make_run(tmp_path, probe_rows):
    def make(name, **shape):
        append_rows(tmp_path / name / "probe.jsonl", probe_rows(**{"blocks": 2, **shape}))
        return tmp_path / name

    return make


def test_a_run_folder_gets_its_page(make_run):
    run = make_run("first", steps=(0, 50))
    append_rows(run / "metrics.jsonl", [{"step": 0, "loss": 2.5}, {"step": 50, "loss": 1.25, "lr": 0.1}, {"epoch": 1}])
    write_json(run / "config.json", {"config": {"model": "vit_tiny_patch16_224", "seed": 0}})
    path = report_runs([run])
    assert path == run / "report.html"
    text = path.read_text(encoding="utf-8")
    assert "Training of vit_tiny_patch16_224" in text
    assert "Training loss" in text
    assert "first/metrics.jsonl: 1 rows of unknown kind" in text
    assert str(run.parent) not in text  # no path of this machine


def test_trained_on_images_a_page_shows_where_other_models_lie(make_run, tmp_path):
    runs = [make_run(name, steps=(0, 50)) for name in ("a", "b")]

    def page(shapes, task="classify", **about):
        for run, shape in zip(runs, shapes, strict=False):
            write_json(run / "config.json", {"config": {"model": "vit", "task": task}, "shape": shape, **about})
        return report_runs(runs[: len(shapes)], tmp_path / "page.html").read_text(encoding="utf-8")

    for shapes in ([[65, 192]], [[65, 192]] * 2):
        text = page(shapes)
        assert "the middle 90 % of the blocks of ViT-Tinys in our evidence" in text
        assert "Shaded: the middle 90 % of the blocks of trained ViT-Tinys" in text
    assert "Shaded" not in page([[65, 192], [17, 64]])  # of two shapes, one band would be wrong for one of them
    far = page([[4, 16]])
    assert "Shaded" not in far
    assert "No reference ranges: the nearest models in our evidence have 65 tokens of 192 values" in far
    assert "Shaded" not in page([[65, 192]], task="sequence")
    assert "Shaded" in page([[65, 192]], task="one-vs-rest", kind="classify")
    assert "Shaded" not in page([[65, 192]], task="one-vs-rest", kind="")
    assert "Shaded" not in page([None])


def test_runs_without_a_probe_have_the_same_page_and_are_compared(make_run, tmp_path):
    RunWriter(path=tmp_path / "plain").log(TrainRow(step=50, loss=2.5, lr=0.1))
    assert report_runs([tmp_path / "plain"]) == tmp_path / "plain" / "report.html"
    assert "Training loss" in (tmp_path / "plain" / "report.html").read_text(encoding="utf-8")
    probed = make_run("probed")
    RunWriter(path=probed).log(TrainRow(step=50, loss=1.25, lr=0.1))
    text = report_runs([tmp_path / "plain", probed], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "2 runs compared" in text
    assert re.findall('data-line="(.*?)"', text) == ["probed", "plain"]


def test_settings_come_from_each_config(make_run, tmp_path):
    runs = [make_run("a"), make_run("b")]
    for run, lr in zip(runs, (0.5, 3.0), strict=True):
        write_json(run / "config.json", {"config": {"lr": lr, "seed": 0}})
    text = report_runs(runs, tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<td>lr</td><td>0.5</td><td>3.0</td>" in text
    assert "<td>seed</td>" not in text


def test_a_probe_that_has_measured_nothing_yet_leaves_the_losses(tmp_path):
    RunWriter(path=tmp_path).log(TrainRow(step=1, loss=2.5))
    append_rows(tmp_path / "probe.jsonl", [])
    assert "Trained without a probe" in report_runs([tmp_path]).read_text(encoding="utf-8")
    append_rows(tmp_path / "early.jsonl", [])
    with pytest.raises(ValueError, match=r"early\.jsonl has no rows yet"):
        report_runs([tmp_path / "early.jsonl"])
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"probe\.jsonl has no rows yet"):
        report_runs([tmp_path])
    (tmp_path / "probe.jsonl").unlink()
    with pytest.raises(ValueError, match=r"metrics\.jsonl has no rows yet"):
        report_runs([tmp_path])


def test_files_and_folders_are_compared(make_run, tmp_path):
    one, two = make_run("one"), make_run("two", shift=1.0)
    path = report_runs([one, two / "probe.jsonl"], tmp_path / "out")
    assert path == tmp_path / "out" / "report.html"
    text = path.read_text(encoding="utf-8")
    assert "largest rise from one" in text
    assert "two: blocks." in text


def test_names_of_runs_are_told_apart(tmp_path):
    def named(*paths):
        return _names([tmp_path / path for path in paths])

    assert named("a/probe.jsonl", "b/probe.jsonl") == ["a", "b"]
    assert named("x/run/probe.jsonl", "y/run/probe.jsonl", "z/probe.jsonl") == ["x/run", "y/run", "z"]
    assert named("a/probe.jsonl", "a/probe.jsonl") == ["a", "a (2)"]
    assert named("x/a/probe.jsonl", "y/a/probe.jsonl", "x/a/probe.jsonl") == ["x/a", "y/a", "x/a (2)"]
    assert named("a/early.jsonl", "a/late.jsonl") == ["early", "late"]


def test_the_same_run_twice_is_numbered(make_run, tmp_path):
    run = make_run("same")
    text = report_runs([run, run], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "same (2)" in text
    assert tmp_path.name not in text


def test_a_torn_last_line_is_said_on_the_page(make_run):
    run = make_run("torn")
    with open(run / "probe.jsonl", "ab") as file:
        file.write(b'{"run": "r", "st')
    assert "torn/probe.jsonl: its last line was cut off" in report_runs([run]).read_text(encoding="utf-8")


def test_what_lies_beside_the_rows_may_be_broken(make_run):
    run = make_run("first")
    (run / "metrics.jsonl").write_text("{oops}\n{}\n")
    (run / "config.json").write_text("{")
    text = report_runs([run]).read_text(encoding="utf-8")
    assert "The losses are not shown: first/metrics.jsonl, line 1 is not JSON" in text
    assert "config.json cannot be read" in text
    assert str(run.parent) not in text


def test_mistakes_are_named_and_leave_the_old_page(make_run, tmp_path):
    run = make_run("first")
    old = report_runs([run]).read_bytes()
    (tmp_path / "empty").mkdir()
    append_rows(tmp_path / "none" / "probe.jsonl", [])
    (tmp_path / "text.jsonl").write_text("hello\nthere\n")
    for wrong, message in (
        (tmp_path / "empty", "empty has no metrics.jsonl and no probe.jsonl; was a run trained there"),
        (tmp_path, f"name its runs: {re.escape(str(run))}"),
        (tmp_path / "nowhere", "there is no .*nowhere; give a run folder, with metrics.jsonl or probe.jsonl"),
        (tmp_path / "none", "has no rows"),
        (tmp_path / "text.jsonl", "line 1 is not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            report_runs([run, wrong], run)
    with pytest.raises(ValueError, match="no runs were given"):
        report_runs([])
    assert (run / "report.html").read_bytes() == old


def test_an_output_that_cannot_be_written_is_named_before_anything_is_read(make_run, tmp_path):
    run = make_run("first")
    (run / "probe.jsonl").write_text("hello\nthere\n")  # which nobody gets to see
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"nothing can be written to .*choose another output"):
        report_runs([run], tmp_path / "file" / "report.html")
    (tmp_path / "folder.html" / "report.html").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"report.html is a folder.*choose another output"):
        report_runs([run], tmp_path / "folder.html")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir(run)) == ["probe.jsonl"]


def test_files_beside_a_run_get_pages_of_their_own(make_run):
    run = make_run("first")
    old = report_runs([run]).read_bytes()
    (run / "early.jsonl").write_bytes((run / "probe.jsonl").read_bytes())
    assert report_runs([run / "early.jsonl"]) == run / "early.html"
    assert (run / "report.html").read_bytes() == old


# ---- folders of wellcond measure


@pytest.fixture
def measured(make_run, probe_rows):
    folder = make_run("measured", shift=1.0)
    append_rows(folder / "untrained.jsonl", probe_rows(blocks=2))
    notes = ["vit_tiny: weights of last.pth.tar.", "untrained: random weights, of seed 0."]
    write_json(
        folder / "config.json", {"what": "wellcond measure", "model": "vit_tiny", "trained": True, "notes": notes}
    )
    Measured.read(folder).page().write(folder / "report.html")
    return folder


def without_date(page):
    return re.sub(r"<footer>.*?</footer>", "", page.read_text(encoding="utf-8"))


def test_the_page_of_a_measurement_is_made_again_and_no_poorer(measured, tmp_path):
    before = without_date(measured / "report.html")
    assert "weights of last.pth.tar" in before
    assert "largest rise from untrained" in before
    for run in (measured, measured / "probe.jsonl"):
        (measured / "report.html").write_text("old")
        assert report_runs([run]) == measured / "report.html"
        assert without_date(measured / "report.html") == before
    assert without_date(report_runs([measured], tmp_path / "elsewhere.html")) == before
    with open(measured / "untrained.jsonl", "ab") as file:
        file.write(b'{"run": "r", "st')
    assert "measured/untrained.jsonl: its last line was cut off" in without_date(report_runs([measured]))


def test_the_page_of_a_measurement_is_not_overwritten_by_another(measured, make_run, tmp_path, monkeypatch):
    old, other = (measured / "report.html").read_bytes(), make_run("other")
    with pytest.raises(ValueError, match=r"report.html is the page that wellcond measure wrote.*another --output"):
        report_runs([measured, other], measured)
    monkeypatch.chdir(measured)
    with pytest.raises(ValueError, match="wellcond measure"):
        report_runs([measured, other])  # into the working folder
    assert report_runs([measured / "untrained.jsonl"]) == measured / "untrained.html"
    assert (measured / "report.html").read_bytes() == old


def test_a_measurement_among_others_keeps_its_notes(measured, make_run, tmp_path):
    text = report_runs([make_run("other"), measured], tmp_path / "page.html").read_text(encoding="utf-8")
    assert "measured: vit_tiny: weights of last.pth.tar." in text
    assert "of seed 0" not in text
    assert "measured: its untrained start is not among these runs; add its untrained.jsonl" in text
    assert "largest rise from other" in text


def test_the_command(make_run, tmp_path, monkeypatch, capsys):
    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["wellcond", "report", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code or 0, capsys.readouterr()

    code, said = command(make_run("first"), make_run("second"), "--output", tmp_path / "page.html")
    assert code == 0
    assert said.out.split() == ["wrote", str(tmp_path / "page.html")]
    assert (tmp_path / "page.html").stat().st_size > 10_000
    monkeypatch.setenv("COLUMNS", "200")
    code, said = command(tmp_path)
    assert code == 2
    assert "has no metrics.jsonl and no probe.jsonl" in " ".join(said.err.replace("│", " ").split())
    assert command()[0] == 2
