import math

import pytest

from wellcond.report.readings import Readings


def test_rows_are_found_where_they_were_measured(probe_rows):
    rows = probe_rows(steps=(0, 10), blocks=3, sigma=(0, 4, 9), outside=("tokens",))
    readings = Readings.of("a", rows)
    assert readings.steps == [0, 10]
    assert [block.name for block in readings.blocks] == ["blocks.0", "blocks.1", "blocks.2"]
    assert readings.sites == ["sa", "+sa", "mlp", "+mlp"]
    assert readings.outside == ["tokens"]
    for row in rows:
        block = "" if row["site"] == "tokens" else row["block"]
        assert readings.value(row["name"], row["step"], block, row["site"]) == row["value"]
    spectrum = readings.spectrum(10, "blocks.1", "sa")
    assert [i for i, _ in spectrum] == [0, 4, 9]
    assert -math.log(spectrum[-1][1]) == pytest.approx(readings.value("log_kappa", 10, "blocks.1", "sa"))


def test_means_are_over_the_blocks_that_have_the_site(probe_rows):
    rows = [r for r in probe_rows(blocks=4) if (r["index"], r["site"]) != (2, "+sa")]
    readings = Readings.of("a", rows)
    values = [r["value"] for r in rows if r["name"] == "log_kappa" and r["site"] == "+sa"]
    assert len(values) == 3
    assert readings.mean(0, "+sa") == pytest.approx(sum(values) / 3)
    assert readings.log_kappa(0, "blocks.2", "+sa") is None


def test_a_mean_with_nan_in_it_is_nan(probe_rows):
    rows = probe_rows(blocks=3)
    bad = next(r for r in rows if r["name"] == "log_kappa" and r["site"] == "sa")
    bad |= {"value": math.nan, "status": "non_finite"}
    readings = Readings.of("a", rows)
    assert math.isnan(readings.mean(0, "sa"))
    assert math.isfinite(readings.mean(0, "mlp"))
    assert readings.worst(0) == math.inf


def test_the_later_of_two_rows_counts(probe_rows):
    first, again = probe_rows(blocks=1), probe_rows(blocks=1, shift=1.0)
    readings = Readings.of("a", first + again)
    assert readings.cells == Readings.of("a", again).cells


def test_of_two_runs_in_one_file_the_last_counts(probe_rows):
    old, new = probe_rows(steps=range(0, 60, 10), blocks=3), probe_rows(steps=(0, 10, 20), blocks=2, shift=1.0)
    more = probe_rows(steps=(0, 10, 20), blocks=2, shift=1.0, sites=("in", "sa", "+sa"))
    for rows in (new, more):
        readings = Readings.of("a", old + rows)
        alone = Readings.of("a", rows)
        assert (readings.steps, readings.blocks, readings.cells) == ([0, 10, 20], alone.blocks, alone.cells)
        assert readings.notes == [
            f"a: rows of an earlier run in the same file were left out ({len(old)}, up to step 50)."
        ]
    third = Readings.of("a", old + old + new)
    assert third.cells == Readings.of("a", new).cells
    assert f"({2 * len(old):,}, up to step 50)" in third.notes[0]


def test_a_resumed_run_goes_on_where_it_stopped(probe_rows):
    """It measures the steps after its checkpoint again, and those before it stay."""
    before, after = probe_rows(steps=(0, 10, 20, 30), blocks=2), probe_rows(steps=(20, 30, 40), blocks=2, shift=1.0)
    readings = Readings.of("a", before + after)
    assert readings.steps == [0, 10, 20, 30, 40]
    assert readings.cells == {**Readings.of("a", before).cells, **Readings.of("a", after).cells}
    assert readings.notes == []


def test_rows_in_another_order_are_those_of_one_run(probe_rows):
    rows = probe_rows(steps=(0, 10, 20), blocks=2)
    by_block = sorted(rows, key=lambda r: (r["block"], r["site"], r["name"], r["step"]))
    two_probes = [r for site in ("sa", "mlp") for r in rows if r["site"].endswith(site)]
    for other in (by_block, two_probes):
        assert Readings.of("a", other).cells == Readings.of("a", rows).cells
        assert Readings.of("a", other).notes == []


def test_the_last_step_of_a_page_is_the_last_with_finite_numbers(probe_rows):
    rows = probe_rows(steps=(0, 10, 20), blocks=2)

    def last(since, **fields):
        changed = [{**r, **fields} if r["step"] >= since and r["index"] == 1 else r for r in rows]
        return Readings.of("a", changed).last

    assert last(30) == 20
    assert last(20, value=math.nan, status="non_finite") == 10
    assert last(10, value=math.inf, status="non_finite") == 0
    assert last(0, value=math.nan, status="non_finite") == 20  # nowhere
    assert last(10, value=math.nan, status="zero") == 20  # a dead branch
    assert last(10, status="non_finite") == 20  # some samples, which are left out


def test_blocks_that_share_indexes_keep_their_order(probe_rows):
    rows = []
    for stage in range(2):
        rows += [{**r, "block": f"layers.{stage}.{r['block']}"} for r in probe_rows(blocks=2)]
    blocks = Readings.of("a", rows).blocks
    assert [block.name for block in blocks] == [f"layers.{s}.blocks.{b}" for s in range(2) for b in range(2)]
    assert [block.place for block in blocks] == [0, 1, 2, 3]


def test_blocks_are_ordered_by_index_not_by_name(probe_rows):
    rows = probe_rows(blocks=12)
    assert [b.place for b in Readings.of("a", reversed(rows)).blocks] == list(range(12))


def test_unknown_names_and_sites_are_left_out_with_a_note(probe_rows):
    known = probe_rows(blocks=1)
    strange = [{**known[0], "name": "colour"}, {**known[0], "site": "elsewhere"}, {**known[0], "name": "sigma.-1"}]
    readings = Readings.of("a", known + strange)
    assert readings.cells == Readings.of("a", known).cells
    assert len(readings.notes) == 1
    for word in ("a: ", "'colour' (1 rows)", "'elsewhere' (1 rows)", "'sigma.-1'"):
        assert word in readings.notes[0]
    assert Readings.of("a", known).notes == []


def test_mistakes_are_named(probe_rows):
    rows = probe_rows(blocks=1)
    with pytest.raises(ValueError, match="the run 'a' has no rows"):
        Readings.of("a", [])
    with pytest.raises(ValueError, match="none of the 1 rows of the run 'a' is a log_kappa"):
        Readings.of("a", [{**rows[0], "name": "stable_rank"}])
    with pytest.raises(ValueError, match="row 2 of the run 'a' has no field 'site'"):
        Readings.of("a", [rows[0], {k: v for k, v in rows[0].items() if k != "site"}])
    for wrong in ({**rows[0], "value": "much"}, {**rows[0], "step": None}, 3, ["a"]):
        with pytest.raises(ValueError, match="row 1 of the run 'a' is not a measurement"):
            Readings.of("a", [wrong])
