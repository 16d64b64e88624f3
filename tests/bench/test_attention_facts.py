"""What rows say, on made rows whose answer is plain."""

import math

import pytest

from wellcond.bench.attention_facts import (
    GPU,
    TORCH,
    exponent,
    faster,
    losses,
    rows_of,
    spread,
    taken,
    unmoved,
    wins_from,
)


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
    assert [row["both ms"] for row in losses(twice, "skyformer")] == [3]
    assert spread(twice, "skyformer") == 3
    assert spread(twice, TORCH) == 1
    assert math.isnan(spread(made_of((512, 4, 2, 1)), TORCH))


def test_what_was_left_out_has_not_won():
    left_out = made_of((512, 4, 2, 1), (1024, 2, 4, None))
    assert wins_from(left_out, "skyformer") is None
    assert losses(left_out, "skyformer") == []


def test_a_time_that_twice_the_tokens_do_not_change_is_noticed():
    found = unmoved(made_of((512, 1, 1, 1.0), (1024, 1, 4, 1.1)), "skyformer")
    assert [row["n"] for row in found or ()] == [512, 1024]
    assert unmoved(made_of((512, 1, 1, 1.0), (1024, 1, 4, 1.9)), "skyformer") is None
    assert unmoved(made_of((512, 2, 1, 1.0), (1024, 1, 4, 1.0)), "skyformer") is None  # as many tokens


def test_ratios_on_the_gpu_are_to_torchs_time_of_the_same_turn():
    record = made_of((512, 4, 2.0, 1.0), (512, 4, 3.0, 6.0), (1024, 2, 4.0, 1.0))
    for row, time in zip(record["rows"], (1.0, 4.0, 2.0, 1.0, 3.0, None), strict=True):
        row[GPU] = time
    assert [faster(record, row, time=GPU) for row in rows_of(record, "skyformer")] == [0.25, 2.0, None]
    assert [faster(record, row) for row in rows_of(record, "skyformer")] == [2.0, 0.5, 4.0]
    assert [row[GPU] for row in losses(record, "skyformer", time=GPU)] == [4.0]
    assert spread(record, "skyformer", time=GPU) == 4
    assert wins_from(record, "skyformer", time=GPU) is None  # what could not be captured has not won
    record["rows"][-1][GPU] = 2.9
    assert wins_from(record, "skyformer", time=GPU) == 1024
    record["rows"][4][GPU] = None  # torch's own
    assert wins_from(record, "skyformer", time=GPU) is None


def test_the_gpus_exponent_is_the_benchmarks_slope():
    """As called it is what the record says; of the GPU's times it is computed."""
    rows = ((n, 65_536 // n, 1.0, 1.0) for n in (512, 4096, 16_384, 65_536))
    record = {**made_of(*rows), "exponents": {"skyformer": 1.25}}
    assert math.isnan(exponent(record, "skyformer", time=GPU))
    assert exponent(record, "skyformer") == 1.25  # as called it is the benchmark's to say
    assert math.isnan(exponent(record, TORCH))
    for power in (1.0, 2.0):
        for row in record["rows"]:
            row[GPU] = row["batch"] * row["n"] ** power
        assert exponent(record, "skyformer", time=GPU) == pytest.approx(power, rel=1e-12)
    for row in record["rows"]:
        row[GPU] = 1.0 if row["n"] == 512 else None
    assert math.isnan(exponent(record, "skyformer", time=GPU))


def test_a_time_is_taken_where_any_row_has_it():
    record = made_of((512, 4, 2.0, 1.0), (1024, 2, 2.0, 1.0))
    assert not taken(record)
    record["rows"][0][GPU] = None
    assert not taken(record)
    record["rows"][2][GPU] = 1.0
    assert taken(record)
    assert taken(record, TORCH)
    assert not taken(record, "skyformer")
