import math

import pytest

from wellcond.claims.tuning import LADDER, tune

GRID = (1e-4, 3e-4, 1e-3)


@pytest.mark.parametrize("peak", LADDER)
def test_the_grid_follows_the_best_wherever_it_is(peak):
    asked = []

    def score(lr: float) -> float:
        asked.append(lr)
        return -abs(math.log(lr / peak))

    found = tune(score, grid=GRID)
    assert found.lr == peak
    assert list(found.scores) == sorted(asked)
    assert len(asked) == len(set(asked))
    assert set(GRID) <= set(asked)
    assert found.at_edge is (peak in (LADDER[0], LADDER[-1]))


def test_a_grid_may_be_fixed():
    found = tune(lambda lr: lr, grid=(3e-4, 1e-3), extend=False)
    assert (found.lr, found.at_edge, list(found.scores)) == (1e-3, True, [3e-4, 1e-3])


def test_where_all_diverge_smaller_rates_are_tried():
    found = tune(lambda lr: -math.inf, grid=GRID)
    assert min(found.scores) == LADDER[0]
    assert max(found.scores) == max(GRID)
    assert found.at_edge


def test_a_diverged_run_is_never_chosen():
    assert tune(lambda lr: -math.inf if lr > 2e-4 else 0.1, grid=GRID).lr < 2e-4
    with pytest.raises(ValueError, match="at least one"):
        tune(lambda lr: 0.0, grid=())
