"""A training is lost when its loss is not finite, or stays or ends above where it began; not when it learns nothing."""

import json
import math
from collections.abc import Iterable

import pytest
import torch

from wellcond.train.divergence import WINDOW, Divergence, Watch


def seen(
    watch: Watch, losses: Iterable[float], *, first: int = 1, every: int = 7, at_end: bool = False
) -> Divergence | None:
    for step, loss in enumerate(losses, first):
        watch.see(step, torch.tensor(loss))
        problem = watch.judge() if step % every == 0 else None
        if problem:
            return problem
        last = step
    watch.see(last + 1, torch.tensor(loss))
    return watch.judge(at_end=at_end)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_is_named_with_its_step(bad: float) -> None:
    problem = seen(Watch(patience=10), [2.0, 1.9, bad, 1.8, bad])
    assert problem is not None
    assert problem.step == 3
    assert "the loss became" in problem.why


def test_a_loss_that_stays_above_its_start_is_lost_after_some_patience() -> None:
    problem = seen(Watch(patience=50), [2.0] * WINDOW + [9.0] * 200)
    assert problem is not None
    first = WINDOW + WINDOW // 2 + 1  # from then on the median is above
    assert f"above its start, 2, since step {first}" in problem.why
    assert problem.step == first + 50


def test_a_loss_that_comes_down_again_is_not() -> None:
    assert seen(Watch(patience=100), [2.0] * WINDOW + [9.0] * 30 + [0.1] * 300, at_end=True) is None


def test_one_bad_batch_is_not() -> None:
    for place in (1, 2, 50, 99):
        losses = [2.0] * 100
        losses[place] = 1e7
        assert seen(Watch(patience=10), losses, at_end=True) is None


def test_losses_that_exploded_are_no_start() -> None:
    """As at lr=10 without a warm-up: from 2.3 to thousands, and at the end at chance."""
    losses = [2.3, 616.5, 5110.0, 1147.0, *[1000.0] * 40, *[2.31] * 150]
    problem = seen(Watch(patience=50, chance=math.log(10)), losses)
    assert problem is not None
    assert "above its start, 2.303" in problem.why
    for end in (2.31, 2.303, 2.29):  # a long patience: the end tells, also where it is at chance
        losses[-150:] = [end] * 150
        assert seen(Watch(patience=500, chance=math.log(10)), losses) is None
        problem = seen(Watch(patience=500, chance=math.log(10)), losses, at_end=True)
        assert problem is not None
        assert f"rose to 5110 and ended at {end:.4g}" in problem.why
    losses[-50:] = [2.0] * 50  # it has learned something after all
    assert seen(Watch(patience=500, chance=math.log(10)), losses, at_end=True) is None


def test_a_training_that_ends_above_its_start_is_lost_without_patience() -> None:
    watch = Watch(patience=500)
    problem = seen(watch, [2.0] * 30 + [2.3] * 20, at_end=True)
    assert problem is not None
    assert "ended at 2.3, above its start, 2" in problem.why
    assert not watch.sound


def test_losses_below_zero_are_judged_as_those_above() -> None:
    """A likelihood's may be; a loss that falls from -1 is no explosion, and one that rises to 0 is."""
    falling = [-1.0 - step / 100 for step in range(300)]
    watch = Watch(patience=50)
    assert seen(watch, falling, at_end=True) is None
    assert watch.sound
    assert seen(Watch(patience=50), [-1.0, *[-0.97] * 300], at_end=True) is None  # learns nothing
    problem = seen(Watch(patience=50), [-2.0] * WINDOW + [-0.5] * 200)
    assert problem is not None
    assert "the loss, -0.5, has been above its start, -2" in problem.why
    back = [-2.0] * WINDOW + [-0.5] * 30 + [-2.01] * 30  # exploded, and no better than at the start
    assert seen(Watch(patience=500), back, at_end=True) is not None
    assert seen(Watch(patience=500), [*back, *[-2.1] * 30], at_end=True) is None


def test_a_lucky_first_batch_is_not_the_start() -> None:
    losses = [0.4, *[2.3] * 300]
    assert seen(Watch(patience=50, chance=math.log(10)), losses, at_end=True) is None
    assert seen(Watch(patience=50), losses, at_end=True) is not None  # the comparison would see it


def test_all_processes_judge_by_their_mean() -> None:
    """Each sees its own part of the batches; what one finds is what all do, and what is saved."""
    watches, losses = (Watch(patience=50), Watch(patience=50)), ([2.0] * 100, [9.0] * 100)
    for step in range(100):
        for watch, mine in zip(watches, losses, strict=True):
            watch.see(step, torch.tensor(mine[step]))
    for watch in watches:
        assert watch.judge(lambda values: values * 0 + 5.5) is None
    assert watches[0].state_dict() == watches[1].state_dict()
    assert watches[0].start == 5.5


def test_a_model_that_learns_nothing_is_not_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    noise = (2.303 + 0.05 * torch.randn(2000, generator=generator)).tolist()
    assert seen(Watch(patience=50, chance=math.log(10)), noise, at_end=True) is None


def test_a_resumed_watch_finds_the_same() -> None:
    losses = [2.0] * WINDOW + [9.0] * 200
    whole = seen(Watch(patience=50), losses)
    first, second = Watch(patience=50), Watch(patience=50)
    for step, loss in enumerate(losses[:33], 1):
        first.see(step, torch.tensor(loss))
    assert first.judge() is None
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert seen(second, losses[33:], first=34) == whole
