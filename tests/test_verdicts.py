import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from wellcond.verdicts import (
    Interval,
    at_least,
    at_most,
    clopper_pearson,
    combine,
    differences,
    in_most,
    interval,
    listed,
    not_run,
    out_of,
    out_of_reach,
    rank_correlation,
    reaches,
    smallest_effect,
    stays_below,
    undecided,
    within,
    written,
)

VALUES = st.lists(st.floats(-100, 100), min_size=2, max_size=12)


@given(VALUES)
def test_intervals_are_scipys(values):
    found = interval(values)
    error = stats.sem(values)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-9)
    if error > 1e-9:
        truth = stats.t.interval(0.95, len(values) - 1, loc=np.mean(values), scale=error)
        assert (found.low, found.high) == pytest.approx(truth, rel=1e-6, abs=1e-6)
    else:
        assert found.low == pytest.approx(found.high, abs=1e-6)


def test_one_value_has_no_interval_and_decides_nothing():
    found = interval([3.0])
    assert (found.low, found.high) == (-math.inf, math.inf)
    assert at_least("a", [1e9], 0.0).outcome == "undecided"
    assert "one seed can show nothing" in at_least("a", [1e9], 0.0).why


def test_no_values_or_nan_are_refused():
    for values in ([], [1.0, math.nan], [math.inf]):
        with pytest.raises(ValueError, match="finite"):
            interval(values)


def test_without_values_nothing_is_run():
    parts = [judge("a", {}.values(), 1.0) for judge in (at_least, at_most, within)]
    assert [*parts, in_most("a", [], 1.0, share=0.9)] == [not_run("a")] * 4
    assert at_least("a", {0: 1.0, 1: 1.1}.values(), 0.0, about=("x",)).about == ("x",)


def test_only_the_same_seeds_are_paired():
    assert differences({0: 3.0, 1: 5.0}, {1: 1.0, 0: 1.0}) == [2.0, 4.0]
    with pytest.raises(ValueError, match="not the same"):
        differences({0: 3.0}, {1: 1.0})


def test_a_rank_correlation_is_spearmans_and_its_interval_draws_groups():
    draw = np.random.default_rng(1)
    x = draw.normal(size=60)
    pairs = list(zip(x.tolist(), (x + 0.5 * draw.normal(size=60)).tolist(), strict=True))
    alone, together = rank_correlation([[pair] for pair in pairs]), rank_correlation([pairs[i::6] for i in range(6)])
    truth = stats.spearmanr([a for a, _ in pairs], [b for _, b in pairs]).statistic
    assert alone.mean == pytest.approx(truth)
    assert together.mean == pytest.approx(truth)
    assert (alone.count, together.count) == (60, 6)
    assert alone.low < truth < alone.high < 1
    fisher = [math.tanh(math.atanh(truth) + sign * 1.96 * 1.06 / math.sqrt(57)) for sign in (-1, 1)]
    assert (alone.low, alone.high) == pytest.approx(fisher, abs=0.08)
    # Where a group is one value twelve times, sixty pairs say no more than five do.
    same = [[(float(value), float(value % 3))] * 12 for value in range(5)]
    assert rank_correlation(same).high - rank_correlation(same).low > 1
    with pytest.raises(ValueError, match="several pairs"):
        rank_correlation([[(1.0, 2.0)], [(1.0, 3.0)]])


def test_one_group_decides_nothing():
    found = rank_correlation([[(1.0, 2.0), (2.0, 3.0), (3.0, 4.0), (4.0, 3.5)], []])
    assert found == Interval(mean=pytest.approx(0.8), low=-math.inf, high=math.inf, count=1)
    assert reaches("a", found, 0.7).outcome == stays_below("a", found, 0.9).outcome == "undecided"


def test_an_interval_reaches_a_bound_or_does_not():
    found = interval([0.8, 0.9, 0.85])
    assert [reaches("a", found, bound).outcome for bound in (0.7, 0.85, 0.99)] == [
        "holds",
        "undecided",
        "does not hold",
    ]


@given(VALUES, st.floats(-50, 50))
def test_a_bound_is_decided_by_the_whole_interval(values, bound):
    part, found = at_least("a", values, bound), interval(values)
    expected = "holds" if found.low >= bound else "does not hold" if found.high < bound else "undecided"
    assert part.outcome == expected
    assert ("could have seen" in part.why) is (expected == "undecided")


def test_equivalence_is_an_interval_inside_the_margin():
    assert within("a", [0.1, -0.1, 0.05], 1.0).outcome == "holds"
    assert within("a", [-5.0, 5.0, 0.0], 1.0).outcome == "undecided"  # a wide interval around zero shows nothing
    assert within("a", [5.0, 5.1, 4.9], 1.0).outcome == "does not hold"
    with pytest.raises(ValueError, match="positive"):
        within("a", [0.0, 0.1], 0.0)


def test_the_smallest_effect_is_seen_four_times_out_of_five():
    generator = np.random.default_rng(0)
    seen = []
    for _ in range(4000):
        noise = generator.normal(size=6)
        true = (stats.t.ppf(0.975, 5) + stats.t.ppf(0.8, 5)) / math.sqrt(6)  # by the true deviation, 1
        seen.append(interval(list(noise + true)).low >= 0)
    assert 0.75 < np.mean(seen) < 0.95
    assert smallest_effect([1.0]) == math.inf
    assert smallest_effect([1.0, 2.0, 3.0]) == pytest.approx((4.302653 + 1.060660) / math.sqrt(3), rel=1e-5)


def test_parts_make_a_whole():
    yes, no = at_least("yes", [1.0, 1.1, 1.2], 0.0), at_least("no", [1.0, 1.1, 1.2], 5.0)
    open_ = at_least("open", [-1.0, 1.0, 0.5], 0.0)
    for parts, verdict in (
        ([yes, yes], "holds"),
        ([yes, no], "holds in part"),
        ([no, open_], "does not hold"),
        ([yes, open_], "undecided"),
        ([yes, not_run("later")], "undecided"),
    ):
        assert combine(parts).verdict == verdict
    with pytest.raises(ValueError, match="at least one"):
        combine([])
    broken = undecided(yes, "two seeds are too few")
    assert broken.outcome == "undecided"
    assert broken.found == yes.found
    assert combine([yes]).as_json()["parts"][0]["found"]["seeds"] == 3


@given(st.integers(1, 600), st.floats(0, 1), st.sampled_from([0.9, 0.95, 0.99]))
def test_it_is_scipys_exact_interval(draws, part, confidence):
    failures = round(part * draws)
    expected = stats.binomtest(failures, draws).proportion_ci(confidence, method="exact")
    assert clopper_pearson(failures, draws, confidence) == pytest.approx((expected.low, expected.high), abs=1e-8)


@pytest.mark.parametrize(("failures", "draws"), [(-1, 5), (6, 5), (0, 0)])
def test_no_rate_without_draws(failures, draws):
    with pytest.raises(ValueError, match="make no rate"):
        clopper_pearson(failures, draws)


def test_a_confidence_is_a_part():
    with pytest.raises(ValueError, match="between 0 and 1"):
        clopper_pearson(1, 2, 1.0)


@pytest.mark.parametrize(
    ("far", "near", "outcome"), [(10, 2, "holds"), (9, 3, "undecided"), (9, 0, "does not hold"), (0, 12, "undecided")]
)
def test_most_blocks_count_by_their_whole_intervals(far, near, outcome):
    blocks = [interval([2.0, 2.1, 2.2])] * far + [interval([1.4, 1.5, 1.6])] * near
    blocks += [interval([0.0, 0.1, 0.2])] * (12 - len(blocks))
    part = in_most("gap", blocks, 1.5, share=10 / 12)
    assert part.outcome == outcome
    assert f"in {far} of 12 blocks" in part.why
    assert part.found == blocks[9]  # on which it hangs: the tenth best


def test_what_is_out_of_reach_is_neither_judged_nor_undecided():
    far, holds, fails = out_of_reach("a", "a cluster"), at_least("b", [8, 9, 8], 0), at_least("c", [-8, -9, -8], 0)
    assert combine([far]).verdict == "out of reach here"
    assert combine([far, holds]).verdict == "holds in part"
    assert combine([far, fails]).verdict == "does not hold"
    assert combine([far, holds, fails]).verdict == "holds in part"
    assert combine([far, undecided(holds, "too few")]).verdict == "undecided"
    assert undecided(far, "a smoke run") is far


def test_an_undecided_part_says_what_was_drawn():
    assert "these 3 groups could have seen" in at_least("a", [-1, 0, 1], 0.0, of="groups").why


def test_at_most_is_at_least_the_other_way_round():
    assert at_most("a", [0.8, 0.81, 0.79], 1.0).outcome == "holds"
    assert at_most("a", [1.2, 1.21, 1.19], 1.0).outcome == "does not hold"
    part = at_most("a", [0.8, 1.3, 1.0], 1.0, unit=" ×", of="rounds")
    assert part.outcome == "undecided"
    assert "asked: at most 1.00 ×; these 3 rounds could have seen" in part.why
    assert part.asked == (-math.inf, 1.0)


def test_no_difference_of_a_ratio_is_around_one():
    part = within("a", [1.01, 1.02, 1.0], 0.05, around=1.0)
    assert (part.outcome, part.asked) == ("holds", (0.95, 1.05))
    assert part.why.endswith("asked: within 1 ± 0.05")
    assert within("a", [0.01, 0.02, 0.0], 0.05, around=1.0).outcome == "does not hold"


def test_numbers_in_prose_have_a_minus_and_no_minus_before_zero():
    assert [written(value) for value in (-1.25, -0.01, 2.0)] == ["−1.2", "0.0", "2.0"]
    assert [written(value, "+z.1f") for value in (-0.5, -0.01, 0.5)] == ["−0.5", "+0.0", "+0.5"]
    assert [listed("abc"[:number]) for number in range(4)] == ["", "a", "a and b", "a, b and c"]
    assert [out_of(some, 3) for some in range(4)] == ["none of 3", "1 of 3", "2 of 3", "all 3"]
    assert out_of(1, 1) == "1 of 1"
