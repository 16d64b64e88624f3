"""Measurements become rows when they are asked for, each once, in their order."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from wellcond import records
from wellcond.probe.places import Place
from wellcond.probe.statistics import Findings, Sums

PLACE = Place(block="blocks.0", index=0, site="sa")


def measured(*, scale: float = 1.0) -> Sums:
    return Sums.measure([PLACE], {PLACE: scale * torch.eye(3)[None]}, {})


def steps(rows: Sequence[Mapping[str, Any]]) -> list[int]:
    return [row["step"] for row in rows if row["name"] == "sigma_max"]


def test_rows_come_once_and_in_order() -> None:
    findings = Findings("a")
    assert not findings
    for step in (0, 10):
        findings.add(measured(), step)
    assert findings
    assert steps(findings.rows()) == steps(findings.rows()) == [0, 10]
    findings.add(measured(scale=2.0), 20)
    assert steps(findings.rows()) == [0, 10, 20]
    assert {row["run"] for row in findings.rows()} == {"a"}
    assert [row["value"] for row in findings.rows() if row["name"] == "sigma_max"] == [1.0, 1.0, 2.0]


def test_the_file_has_each_row_once_whenever_it_is_named(tmp_path) -> None:
    findings, path = Findings("a"), tmp_path / "probe.jsonl"
    findings.add(measured(), 0)
    findings.write_to(path)
    findings.add(measured(), 1)
    findings.add(measured(), 2, write=False)  # another process's
    findings.add(measured(), 3)
    assert steps(records.read_rows(path)) == [0, 1, 3]
    assert steps(findings.rows()) == [0, 1, 2, 3]
    findings.clear()
    findings.add(measured(), 4)
    assert steps(records.read_rows(path)) == [0, 1, 3, 4]


@pytest.mark.parametrize(("step", "left"), [(1, [1]), (5, [0, 1])])
def test_those_of_a_step_are_kept_where_there_are_any(step: int, left: list[int]) -> None:
    findings = Findings("a")
    for measured_step in (0, 1):
        findings.add(measured(), measured_step)
    assert findings.keep(step) == (step in left)
    assert steps(findings.rows()) == left
