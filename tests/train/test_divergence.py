"""A training is lost when its loss is not finite, or stays above where it began; not when it only learns nothing."""

import json
import math
from collections.abc import Iterable

import pytest
import torch

from wellcond.train.divergence import FIRST, Divergence, Watch


def seen(watch: Watch, losses: Iterable[float], *, first: int = 1, every: int = 7) -> Divergence | None:
    for step, loss in enumerate(losses, first):
        watch.see(step, torch.tensor(loss))
        problem = watch.judge() if step % every == 0 else None
        if problem:
            return problem
    return watch.judge()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_named_with_its_step(bad: float) -> None:
    problem = seen(Watch(patience=10), [2.0, 1.9, bad, 1.8, bad])
    assert problem is not None
    assert problem.step == 3
    assert "the loss became" in problem.why


def test_a_loss_that_stays_above_its_start_is_lost_after_some_patience() -> None:
    problem = seen(Watch(patience=50), [2.0] * FIRST + [9.0] * 200)
    assert problem is not None
    assert "since step 21" in problem.why
    assert problem.step == 21 + 50


def test_a_loss_that_comes_down_again_is_not() -> None:
    assert seen(Watch(patience=100), [2.0] * FIRST + [9.0] * 30 + [0.1] * 300) is None


def test_a_model_that_learns_nothing_is_not_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = (2.303 + 0.05 * torch.randn(2000, generator=generator)).tolist()
    assert seen(Watch(patience=50), noise) is None


def test_a_resumed_watch_finds_the_same() -> None:
    losses = [2.0] * FIRST + [9.0] * 200
    whole = seen(Watch(patience=50), losses)
    first, second = Watch(patience=50), Watch(patience=50)
    assert seen(first, losses[:33]) is None
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen(second, losses[33:], first=34) == whole
