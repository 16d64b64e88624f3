import os
import sys

import pytest

from wellcond import cli
from wellcond.records import append_rows, write_json
from wellcond.report import report_runs
from wellcond.report.runs import _names


@pytest.fixture
def make_run(tmp_path, probe_rows):
    def make(name, **shape):
        append_rows(tmp_path / name / "probe.jsonl", probe_rows(**{"blocks": 2, **shape}))
        return tmp_path / name

    return make


def test_a_run_folder_gets_its_page(make_run):
    run = make_run("first", steps=(0, 50))
    append_rows(run / "metrics.jsonl", [{"step": 0, "loss": 2.5}, {"step": 50, "loss": 1.25, "lr": 0.1}, {"epoch": 1}])
    write_json(run / "config.json", {"model": "vit_tiny_patch16_224", "seed": 0})
    path = report_runs([run])
    assert path == run / "report.html"
    text = path.read_text(encoding="utf-8")
    assert "Conditioning of vit_tiny_patch16_224" in text
    assert "Training loss" in text
    assert str(run.parent) not in text  # no path of this machine


def test_a_loss_may_also_come_as_rows(make_run, probe_rows):
    run = make_run("first")
    template = probe_rows(blocks=1)[0]
    append_rows(run / "metrics.jsonl", [{**template, "name": "loss", "step": s, "value": 3.0 - s} for s in range(2)])
    write_json(run / "config.json", {"model": {"name": "deit3"}})
    text = report_runs([run]).read_text(encoding="utf-8")
    assert "Training loss" in text
    assert "Conditioning of deit3" in text


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
    assert "torn/probe.jsonl: its last line was torn" in report_runs([run]).read_text(encoding="utf-8")


def test_what_lies_beside_the_rows_may_be_broken(make_run):
    run = make_run("first")
    (run / "metrics.jsonl").write_text("{oops}\n{}\n")
    (run / "config.json").write_text("{")
    text = report_runs([run]).read_text(encoding="utf-8")
    assert "The loss is not shown" in text
    assert "config.json cannot be read" in text
    assert str(run.parent) not in text


def test_mistakes_are_named_and_leave_the_old_page(make_run, tmp_path):
    run = make_run("first")
    old = report_runs([run]).read_bytes()
    (tmp_path / "empty").mkdir()
    append_rows(tmp_path / "none" / "probe.jsonl", [])
    (tmp_path / "text.jsonl").write_text("hello\nthere\n")
    for wrong, message in (
        (tmp_path / "empty", "empty has no probe.jsonl"),
        (tmp_path / "nowhere", "there is no .*nowhere; give a run folder with a probe.jsonl"),
        (tmp_path / "none", "has no rows"),
        (tmp_path / "text.jsonl", "line 1 is not JSON"),
    ):
        with pytest.raises(ValueError, match=message):
            report_runs([run, wrong], run)
    with pytest.raises(ValueError, match="no runs were given"):
        report_runs([])
    assert (run / "report.html").read_bytes() == old


def test_an_output_that_cannot_be_written_is_named(make_run, tmp_path):
    run = make_run("first")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ValueError, match=r"cannot be written to .*choose another --output"):
        report_runs([run], tmp_path / "file" / "report.html")
    assert (tmp_path / "file").read_text() == "mine"
    assert sorted(os.listdir(run)) == ["probe.jsonl"]


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
    code, said = command(tmp_path)
    assert code == 1
    assert "has no probe.jsonl" in said.err
    assert command()[0] == 2
