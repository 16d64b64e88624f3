"""A run's folder: what is written is what is read, of this version and of those before."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond.records import VERSION, Event, Run, RunWriter, TrainRow, ValidationRow, append_rows, read_json, write_json

numbers = st.floats()
steps = st.integers(0, 10**9)
rows = st.one_of(
    st.builds(
        TrainRow, step=steps, epoch=numbers, loss=numbers, lr=numbers, gradient_norm=numbers, images_per_second=numbers
    ),
    st.builds(
        ValidationRow,
        step=steps,
        epoch=st.integers(0, 900),
        metrics=st.dictionaries(st.sampled_from(["loss", "top1", "top5", "score"]), numbers),
        best=numbers,
    ),
    st.builds(Event, step=steps, event=st.text()),
)


@given(st.lists(rows))
def test_what_is_logged_is_read(tmp_path_factory: pytest.TempPathFactory, logged: list[Any]) -> None:
    writer = RunWriter(path=tmp_path_factory.mktemp("run"))
    for row in logged:
        writer.log(row)
    run = Run.open(writer.path)
    assert list(map(repr, run.metrics)) == list(map(repr, logged))  # NaN is not equal to itself
    for kind, found in ((TrainRow, run.train), (ValidationRow, run.validation), (Event, run.events)):
        assert list(map(repr, found)) == [repr(row) for row in logged if isinstance(row, kind)]
    assert run.unknown_rows == 0


def test_a_folder_says_what_it_is(tmp_path: Path) -> None:
    writer = RunWriter(path=tmp_path)
    writer.begin({"model": "vit_tiny", "lr": 0.1})
    writer.describe(processes=2)
    kept = read_json(tmp_path / "config.json")
    assert (kept["version"], kept["processes"], kept["what"]) == (VERSION, 2, "wellcond train")
    assert kept["environment"]["versions"]
    run = Run.open(tmp_path)
    assert (run.config, run.model) == ({"model": "vit_tiny", "lr": 0.1}, "vit_tiny")


def test_an_empty_folder_is_an_empty_run(tmp_path: Path) -> None:
    run = Run.open(tmp_path)
    assert (run.config, run.model, run.metrics, run.probe) == ({}, "", [], [])
    with pytest.raises(ValueError, match=r"there is no .*nowhere; give a run folder"):
        Run.open(tmp_path / "nowhere")


def test_the_rows_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """Without a version, and before rows had a gradient norm."""
    write_json(tmp_path / "config.json", {"what": "wellcond train", "config": {"model": "deit3"}, "environment": {}})
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 10, "epoch": 0.5, "split": "train", "loss": 2.25, "lr": 0.1, "images_per_second": 9.0}\n'
        '{"step": 20, "epoch": 1, "split": "val", "loss": 2.5, "top1": 0.5, "best": "-Infinity"}\n'
        '{"step": 20, "split": "event", "event": "diverged"}\n'
    )
    run = Run.open(tmp_path)
    assert run.model == "deit3"
    assert (run.train[0].loss, run.train[0].lr) == (2.25, 0.1)
    assert math.isnan(run.train[0].gradient_norm)
    assert run.validation == [ValidationRow(step=20, epoch=1, metrics={"loss": 2.5, "top1": 0.5}, best=-math.inf)]
    assert run.events == [Event(step=20, event="diverged")]


def test_a_version_that_comes_later_is_refused(tmp_path: Path) -> None:
    write_json(tmp_path / "config.json", {"version": VERSION + 1, "config": {}})
    with pytest.raises(ValueError, match=rf"run of version {VERSION + 1}, and this wellcond reads versions up to"):
        Run.open(tmp_path)


def test_rows_of_no_known_kind_are_counted(tmp_path: Path) -> None:
    """A validation's loss is never taken for a training's; a loss that says nothing is a training's."""
    lines = [{"step": 1, "loss": 2.0}, {"step": 1, "split": "test", "loss": 9.0}, {"epoch": 1}, {"step": "x"}, 3]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run = Run.open(tmp_path)
    assert [(row.step, row.loss) for row in run.train] == [(1, 2.0)]
    assert (run.validation, run.unknown_rows) == ([], 4)


def test_a_file_of_a_probe_is_a_run_with_what_lies_beside_it(tmp_path: Path) -> None:
    append_rows(tmp_path / "early.jsonl", [{"step": 3}])
    RunWriter(path=tmp_path).log(TrainRow(step=1, loss=2.0))
    run = Run.open(tmp_path / "early.jsonl")
    assert run.probe == [{"step": 3}]
    assert [row.loss for row in run.train] == [2.0]


def test_fields_that_this_version_does_not_know_survive_a_resume(tmp_path: Path) -> None:
    new = {"step": 1, "split": "train", "loss": 2.0, "memory": 3.5}
    append_rows(tmp_path / "metrics.jsonl", [new, {**new, "step": 2}])
    RunWriter(path=tmp_path).forget_after(1)
    assert (tmp_path / "metrics.jsonl").read_text() == json.dumps(new) + "\n"
