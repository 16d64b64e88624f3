"""The table says what was measured, and marks what a number does not say by itself."""

import math
from typing import Any

import pytest
from torch import Tensor

from wellcond.probe import Probe
from wellcond.probe.table import table


def row(index: int, site: str, value: float, status: str = "ok", **other: Any) -> dict[str, Any]:
    block = f"blocks.{index}"
    plain = {"run": "", "step": 0, "name": "log_kappa", "count": 4, "dtype": "float32"}
    return {**plain, "block": block, "index": index, "site": site, "value": value, "status": status, **other}


def test_blocks_by_sites(vit: Any, images: Tensor, rows_of: Any) -> None:
    with Probe(vit, sites=["+mlp", "sa"]) as probe:
        vit(images)
    values = rows_of(probe.rows())
    lines = [line.split() for line in probe.table().splitlines()]
    assert lines[0] == ["block", "sa", "+mlp"]
    for line, block in zip(lines[2:4], ("blocks.0", "blocks.1"), strict=True):
        assert line == [block, *(f"{values[block, site]['log_kappa']:.2f}" for site in ("sa", "+mlp"))]
    for column, site in enumerate(("sa", "+mlp"), start=1):
        mean = sum(values[block, site]["log_kappa"] for block in ("blocks.0", "blocks.1")) / 2
        assert lines[4][column] == f"{mean:.2f}"
    assert "log κ at step 0; 4 samples; float32" in probe.table()
    assert "stable_rank at step 0" in probe.table("stable_rank")


def test_columns_are_aligned(vit: Any, images: Tensor) -> None:
    with Probe(vit, sites="*") as probe:
        vit(images)
    lines = probe.table().split("\n\n")[0].splitlines()
    assert len({len(line) for line in lines}) == 1
    assert max(map(len, lines)) < 80


def test_marks_and_gaps() -> None:
    rows = [row(0, "sa", 15.94, "ceiling"), row(0, "mlp", math.nan, "zero"), row(1, "sa", 3.0, "non_finite", count=3)]
    text = table(rows, notes=["a note"])
    assert [line.split() for line in text.splitlines()[2:5]] == [
        ["blocks.0", "≥15.94", "!zero"],
        ["blocks.1", "!3.00", "–"],
        ["mean", "!≥9.47", "–"],
    ]
    assert "≥ some samples are beyond" in text
    assert "! some samples were not finite or all zero" in text
    assert "3–4 samples" in text
    assert text.endswith("a note")


def test_one_sample_is_no_plural() -> None:
    assert "; 1 sample; float32" in table([row(0, "sa", 3.0, count=1)])


def test_a_mean_of_lower_bounds_is_one_and_no_other_mean() -> None:
    at_ceiling = [row(index, "sa", 15.94, "ceiling") for index in range(2)]
    below = [row(index, "mlp", 3.0) for index in range(2)]
    mean = next(line for line in table(at_ceiling + below).splitlines() if line.startswith("mean"))
    assert mean.split() == ["mean", "≥15.94", "3.00"]


def test_a_status_may_hide_that_samples_were_capped() -> None:
    """A NaN in one sample outranks the ceiling in another."""
    hidden = [row(0, "sa", 9.0, "non_finite"), row(0, "sa", 1.0, "non_finite", name="capped")]
    text = table([*hidden, row(1, "sa", 7.0)])
    assert [line.split()[1] for line in text.splitlines()[2:5]] == ["!≥9.00", "7.00", "!≥8.00"]


def test_only_what_the_ceiling_cuts_off_is_a_lower_bound() -> None:
    names = ("log_kappa", "log_kappa_max", "sigma_min", "stable_rank", "effective_rank")
    rows = [row(0, "sa", 5.0, "ceiling", name=name) for name in names]
    shown = {name: table(rows, name) for name in names}
    assert [shown[name].splitlines()[2].split()[1] for name in names] == ["≥5.00", "≥5.00", "~5.00", "5.00", "5.00"]
    assert "rounding has decided it" in shown["sigma_min"]
    assert "ceiling" not in shown["stable_rank"]


def test_the_last_step_is_shown() -> None:
    text = table([row(0, "sa", 1.0), row(0, "sa", 2.0, step=100)])
    assert "2.00" in text
    assert "1.00" not in text
    assert "at step 100" in text


@pytest.mark.parametrize("rows", [[], [row(0, "sa", 1.0)]])
def test_nothing_to_show(rows: list[Any]) -> None:
    assert table(rows, "largest_logit") == "no largest_logit was measured"
