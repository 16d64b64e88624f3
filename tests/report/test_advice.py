import dataclasses
import math

import pytest

from wellcond.records import Event
from wellcond.report.advice import (
    HIGH,
    LARGE_LOGIT,
    LOW_ENTROPY,
    BlockState,
    Failure,
    advise,
    advise_run,
    first_failure,
)
from wellcond.report.readings import Cell, Readings


def state(*, entering=5.0, capped=None, entropy=math.nan, logit=math.nan, status=None, began=None, **values):
    names = {"sa": "sa", "plus_sa": "+sa", "mlp": "mlp", "plus_mlp": "+mlp", "inside": "in"}
    cells = {
        names[key]: Cell(value, 64, "float32", (status or {}).get(names[key], "ok")) for key, value in values.items()
    }
    return BlockState(
        block="blocks.3",
        cells=cells,
        capped=capped or {},
        entering=entering,
        entropy=entropy,
        logit=logit,
        began=began,
    )


def only(found, *words):
    assert len(found) == 1
    for word in words:
        assert word in found[0]


@pytest.mark.parametrize("entering", [5.0, math.nan])
def test_a_healthy_block_gets_no_advice(entering):
    """Levels of a trained ViT: attention's output is ill-conditioned, and the skip makes up for it."""
    assert advise(state(sa=12.0, plus_sa=6.0, mlp=7.0, plus_mlp=6.0, entering=entering, entropy=3.0, logit=12.0)) == []
    assert advise(state(sa=15.9, plus_sa=6.0, mlp=7.0, plus_mlp=6.0, capped={"sa": 60}, entering=entering)) == []
    assert advise(state()) == []


def test_a_missing_skip_is_named_whatever_comes_in():
    for entering in (5.0, math.nan, 12.0):
        found = advise(state(sa=12.0, plus_sa=12.0, mlp=7.0, plus_mlp=9.0, entering=entering))
        assert "restore_skip" in found[0]
        assert "attention" in found[0]
    only(advise(state(sa=9.0, plus_sa=6.0, mlp=12.0, plus_mlp=12.0)), "restore_skip", "MLP")


def test_what_comes_in_badly_is_not_blamed_on_the_block():
    only(
        advise(state(sa=13.0, plus_sa=12.5, mlp=9.0, plus_mlp=8.0, entering=12.6)),
        "input is already ill-conditioned",
        "wellcond.gray",
    )
    assert advise(state(sa=13.0, plus_sa=6.0, mlp=9.0, plus_mlp=6.0, entering=12.6)) == []


def test_attention_is_blamed_where_it_makes_things_worse():
    only(advise(state(sa=15.0, plus_sa=11.0, mlp=7.0, plus_mlp=9.0)), "replace_attention", "15.0", "11.0", "may")
    parallel = state(sa=15.0, mlp=7.0, plus_mlp=11.0)
    only(advise(parallel), "replace_attention")


def test_numbers_beyond_the_ceiling_are_marked():
    capped = {"sa": 64}
    only(advise(state(sa=15.9, plus_sa=11.0, capped=capped)), "output has log κ ≥ 15.9, and 11.0 remains")
    both = advise(state(sa=15.9, plus_sa=14.0, capped={**capped, "+sa": 1}))
    assert "output has log κ ≥ 15.9, and ≥ 14.0 remains" in both[0]


def test_what_lies_beyond_the_ceiling_is_not_compared():
    found = advise(state(sa=15.9, plus_sa=15.9, capped={"sa": 64, "+sa": 64}))
    assert "beyond the ceiling both before and after the attention's add" in found[0]
    assert "restore_skip" in found[0]
    assert advise(state(sa=15.9, plus_sa=15.2, capped={"sa": 64})) == []  # how far it came down nobody knows
    only(advise(state(sa=15.2, plus_sa=15.2)), "κ hardly drops, or even rises, at the attention's add")


def test_thresholds_are_where_they_are_said_to_be():
    for above, expected in ((HIGH, 1), (HIGH - 0.01, 0)):
        assert len(advise(state(sa=15.0, plus_sa=above))) == expected
    for logit, expected in ((LARGE_LOGIT, 1), (LARGE_LOGIT - 0.1, 0)):
        assert len(advise(state(sa=9.0, logit=logit))) == expected
    for entropy, expected in ((LOW_ENTROPY, 1), (LOW_ENTROPY + 0.01, 0)):
        assert len(advise(state(sa=9.0, entropy=entropy))) == expected


def test_large_logits_and_collapsed_entropy_are_said_once():
    only(advise(state(sa=9.0, logit=80.0, entropy=0.0)), "80.0", "QK-norm")
    only(advise(state(sa=9.0, logit=8.0, entropy=0.0)), "0.00 nats", "QK-norm")


def test_a_ceiling_after_an_add_asks_for_float64():
    only(advise(state(sa=5.0, plus_sa=9.0, capped={"+sa": 7})), "7 of 64 samples", "float64", "lower bound")
    finest = dataclasses.replace(state(), cells={"+sa": Cell(9.0, 64, "float64", "ok")}, capped={"+sa": 7})
    only(advise(finest), "7 of 64 samples", "beyond what float64 can resolve", "lower bound")
    assert "Measuring" not in advise(finest)[0]  # there is nothing finer


def test_beside_nan_nothing_else_is_said():
    values = {"sa": math.nan, "plus_sa": 12.0, "mlp": 12.0, "plus_mlp": 12.0}
    broken = {"status": {"sa": "non_finite"}, "logit": 90.0, **values}
    only(advise(state(**broken)), "NaN or infinite")
    only(advise(state(began=Failure(400, "blocks.3", "sa"), **broken)), "first seen here at step 400, at sa")
    only(advise(state(began=Failure(400, "blocks.3", "sa", 300), **broken)), "here between steps 300 and 400, at sa")
    only(advise(state(began=Failure(400, "blocks.3", "sa", at_once=True), **broken)), "the weights and the input first")
    only(advise(state(began=Failure(400, "blocks.1", "mlp"), **broken)), "first seen at mlp of blocks.1")
    only(advise(state(began=Failure(400, "", "embed"), **broken)), "first seen at embed")


def test_a_dead_branch_is_named():
    only(advise(state(sa=math.nan, plus_sa=5.0, status={"sa": "zero"})), "all zero", "sa", "LayerScale")


def test_the_worst_site_is_the_highest_or_the_one_without_a_number():
    assert state(sa=12.0, plus_sa=6.0).worst_site == "sa"
    assert state(sa=12.0, mlp=math.nan).worst_site == "mlp"


def test_a_bound_of_half_precision_ranks_above_an_exact_number():
    blind, seen = Cell(4.85, 64, "bfloat16", "ceiling"), Cell(5.1, 64, "float32", "low_precision")
    for cells, capped, worst in (
        ({"sa": blind, "+sa": seen}, {"sa": 64}, "sa"),
        ({"sa": blind, "+sa": seen}, {}, "sa"),  # rows without a count
        ({"sa": blind, "+sa": seen}, {"sa": 5}, "+sa"),  # of 64, which hardly moves the mean
        ({"sa": blind, "+sa": seen._replace(value=math.nan)}, {"sa": 64}, "+sa"),
        ({"sa": blind._replace(dtype="float32", value=15.2), "+sa": seen._replace(value=15.5)}, {"sa": 50}, "+sa"),
    ):
        found = dataclasses.replace(state(), cells=cells, capped=capped)
        assert found.worst_site == worst
        other = dataclasses.replace(state(), cells={"+sa": cells["+sa"]})
        assert max(found, other, key=lambda one: one.rank).rank == found.rank
    assert state().rank < state(sa=0.0).rank


def test_low_precision_is_that_of_the_computation(probe_rows):
    """Under autocast the stream is float32 and was computed from bfloat16."""
    rows = [{**r, "status": "low_precision"} for r in probe_rows()]
    branches = [{**r, "dtype": "bfloat16", "status": "ceiling"} if r["site"] in ("sa", "mlp") else r for r in rows]
    only(advise_run(Readings.of("a", branches), 0), "All numbers", "in low precision (bfloat16), which")
    streams = Readings.of("a", [r for r in branches if r["site"] in ("+sa", "+mlp")])
    only(advise_run(streams, 0, config={"amp_dtype": "float16"}), "in low precision (float16), which")
    only(advise_run(streams, 0), "in low precision, which")


def test_what_enters_a_block_is_its_input_or_what_the_block_before_put_out(probe_rows):
    with_input = Readings.of("a", probe_rows(blocks=3, sites=("in", "sa", "+mlp")))
    assert BlockState.of(with_input, 0, 1).entering == with_input.value("log_kappa", 0, "blocks.1", "in")
    without = Readings.of("a", probe_rows(blocks=3, outside=("embed",)))
    assert BlockState.of(without, 0, 2).entering == without.value("log_kappa", 0, "blocks.1", "+mlp")
    assert BlockState.of(without, 0, 0).entering == without.value("log_kappa", 0, "", "embed")


def test_nan_is_traced_to_its_first_step_and_place(probe_rows):
    rows = probe_rows(steps=(0, 10, 20), blocks=4)
    for r in rows:
        if r["name"] == "log_kappa" and (r["step"], r["index"], r["site"]) in {
            (10, 2, "+sa"),
            (10, 3, "in"),
            (20, 0, "sa"),
        }:
            r |= {"value": math.nan, "status": "non_finite"}
    readings = Readings.of("a", rows)
    assert first_failure(readings) == Failure(10, "blocks.2", "+sa", before=0)
    only(advise_run(readings, 20), "between steps 0 and 10", "+sa of blocks.2")
    assert first_failure(Readings.of("a", probe_rows())) is None


def test_a_run_that_diverged_is_told_of_its_rate_first(probe_rows):
    lost = [Event(step=3, event="left out: its gradient was not finite"), Event(step=9, event="diverged: the loss")]
    readings = Readings.of("a", [{**r, "status": "low_precision"} for r in probe_rows()])
    for found in (readings, None):
        for config, words in (
            ({"lr": 3.0, "clip_grad": None}, "a smaller lr than 3, or clip_grad=1, may help"),
            ({"lr": 3e-4, "clip_grad": 1.0}, "a smaller lr than 0.0003 may help"),
            ({"lr": 0.5, "clip_value": 0.1}, "a smaller lr than 0.5 may help"),
            ({}, "a smaller learning rate, or clip_grad=1, may help"),
        ):
            assert advise_run(found, 0, events=lost, config=config)[0] == f"Training diverged: {words}."
        assert "diverged 3 times" in advise_run(found, 0, events=3 * lost)[0]
    assert advise_run(None, events=lost[:1]) == []


def test_what_concerns_the_whole_run_is_said_once(probe_rows):
    assert advise_run(Readings.of("a", probe_rows(outside=("tokens", "embed"))), 0) == []
    low = [{**r, "status": "low_precision", "dtype": "bfloat16"} for r in probe_rows()]
    only(advise_run(Readings.of("a", low), 0), "All numbers", "bfloat16", "Probe(model)")
    some = [*low[:8], *probe_rows()[8:]]
    only(advise_run(Readings.of("a", some), 0), "Some numbers")
    only(
        advise_run(
            Readings.of(
                "a",
                probe_rows(outside=("tokens",), shift=-6)
                + [
                    {**r, "value": 11.0}
                    for r in probe_rows(outside=("tokens",))
                    if r["site"] == "tokens" and r["name"] == "log_kappa"
                ],
            ),
            0,
        ),
        "raw tokens have log κ 11.0",
        "trial",
    )
