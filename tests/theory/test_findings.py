import math

import pytest
import torch

from wellcond.theory.findings import SEEN, compare, rate, verdict


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_a_violation_is_counted_and_the_worst_draw_gives_the_margin():
    case = compare("x", tensor(2, 2, 2), tensor(1, 4, 1.5), part="claim", n=3)
    assert (case.failures, case.draws, case.margin, case.outcome) == (1, 3, 0.5, "does not hold")
    assert (case.bound, case.measured, case.settings) == (2, 1.5, {"n": 3})


def test_an_attained_bound_holds_and_a_strict_one_does_not():
    assert compare("x", tensor(3), tensor(3 * (1 + 1e-12)), part="claim").outcome == "holds"
    assert compare("x", tensor(3), tensor(3), part="claim", strict=True).outcome == "does not hold"


def test_what_float64_cannot_tell_is_neither_a_violation_nor_a_proof():
    case = compare("x", tensor(10 * SEEN, 5), tensor(math.inf, 1), part="claim")
    assert (case.failures, case.undecided, case.outcome) == (0, 1, "holds")
    assert compare("x", tensor(10 * SEEN), tensor(math.inf), part="claim").outcome == "undecided"
    assert compare("x", tensor(5), tensor(math.inf), part="claim").outcome == "does not hold"


def test_a_nan_is_no_measurement():
    with pytest.raises(ValueError, match="NaN"):
        compare("x", tensor(1), tensor(math.nan), part="claim")


@pytest.mark.parametrize(
    ("failures", "draws", "outcome"), [(0, 400, "holds"), (0, 20, "undecided"), (100, 400, "does not hold")]
)
def test_a_rate_is_judged_by_its_interval(failures, draws, outcome):
    assert rate("x", failures=failures, draws=draws, allowed=0.1, part="claim").outcome == outcome


def test_the_verdict_looks_at_the_claim_alone():
    good = compare("good", tensor(2), tensor(1), part="claim")
    bad = compare("bad", tensor(1), tensor(2), part="claim")
    open_ = rate("open", failures=0, draws=5, allowed=0.1, part="claim")
    beyond = compare("beyond", tensor(1), tensor(2), part="beyond")
    assert verdict([good, beyond]) == "holds"
    assert verdict([good, bad]) == "holds in part"
    assert verdict([bad, open_]) == "does not hold"
    assert verdict([good, open_]) == "undecided"
    with pytest.raises(ValueError, match="no case"):
        verdict([beyond])
