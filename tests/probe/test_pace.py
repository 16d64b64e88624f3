"""`every="auto"` takes about a hundredth of the time, whatever a step and a measurement take."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from wellcond.probe import Probe
from wellcond.probe.probe import SHARE, Pace

CPU = torch.device("cpu")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("wellcond.probe.probe.time.perf_counter", clock)
    return clock


def simulate(pace: Pace, clock: Clock, step_time: Any, cost: Any, until: float) -> list[tuple[int, float, float]]:
    """(step, when it began, what it took) of each measurement in so many seconds."""
    found, start, step = [], clock.now, 0
    while clock.now - start < until:
        if pace.due(step):
            began = clock.now
            with pace.timed(CPU):
                clock.now += 0.25 * cost(len(found))
            clock.now += 0.01 * step_time(step)  # the model's own pass, which is none of it
            with pace.timed(CPU):
                clock.now += 0.75 * cost(len(found))
            pace.measured(step)
            found.append((step, began - start, cost(len(found))))
            assert pace.cost == pytest.approx(found[-1][2])
        clock.now += step_time(step)
        step += 1
    return found


@pytest.mark.parametrize("step_time", [0.02, 0.3, 2.0])
@pytest.mark.parametrize("cost", [0.02, 0.11, 1.0, 3.3])
@pytest.mark.parametrize("first", [1, 40])
def test_the_share_of_the_time(clock: Clock, step_time: float, cost: float, first: int) -> None:
    until = 30 * 100 * cost
    found = simulate(
        Pace("auto"), clock, lambda _: step_time, lambda number: cost * (first if number == 0 else 1), until
    )
    assert found[0][0] == 0
    later = [took for _, began, took in found if began > until / 5]  # the first one may be as dear as it likes
    share = sum(later) / (0.8 * until)
    assert share <= SHARE * 1.02
    every_step = len(later) >= 0.8 * until / (step_time + cost) - 2
    assert share >= SHARE / 4 or every_step


def test_the_second_measurement_does_not_wait_for_the_dear_first(clock: Clock) -> None:
    found = simulate(Pace("auto"), clock, lambda _: 0.1, lambda number: 20.0 if number == 0 else 0.05, 300)
    assert 40 <= found[1][1] <= 65  # 20 s of the first, and as much of training: looked at after 128, 256 steps
    assert len(found) > 10


def test_it_follows_what_a_step_takes(clock: Clock) -> None:
    found = simulate(Pace("auto"), clock, lambda step: 0.1 if step < 5000 else 1.0, lambda _: 0.1, 3000)
    gaps = [(before[0], after[0] - before[0]) for before, after in itertools.pairwise(found[1:])]
    fast = [gap for step, gap in gaps if step < 4800]
    slow = [gap for step, gap in gaps if step > 5000]
    assert set(fast) == {128}
    assert set(slow) == {16}


def test_processes_are_asked_seldom_and_have_the_last_word(clock: Clock) -> None:
    asked: list[int] = []
    pace = Pace("auto", agree=lambda answer: bool(asked.append(step)) or len(asked) == 6)
    pace.measured(0)
    for step in range(1, 40):
        clock.now += 1.0
        answers = {pace.due(step) for _ in range(3)}  # asked again it says the same, and asks nobody
        assert answers == {step == 32}
        if True in answers:
            break
    assert asked == [1, 2, 4, 8, 16, 32]


def test_going_back_to_an_earlier_state_measures_at_once(clock: Clock) -> None:
    pace = Pace("auto")
    pace.measured(900)
    assert not pace.due(900)
    assert pace.due(500)


def test_what_fails_takes_its_time_too(clock: Clock) -> None:
    pace = Pace("auto")

    def fail() -> None:
        clock.now += 3.0
        raise RuntimeError("now")

    with pytest.raises(RuntimeError, match="now"), pace.timed(CPU):
        fail()
    pace.measured(0)
    assert pace.cost == 3.0


def test_every_so_many_steps_needs_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellcond.probe.probe.time.perf_counter", None)
    pace = Pace(3, agree=lambda _: pytest.fail("asked"))
    with pace.timed(CPU):
        pass
    assert [step for step in range(10) if pace.due(step)] == [0, 3, 6, 9]


@pytest.mark.parametrize("failing", [False, True])
def test_a_probe_in_training(vit: Any, images: Tensor, clock: Clock, failing: bool) -> None:
    own = []

    def pass_by(module: Any, _args: Any, _output: Any) -> None:
        clock.now += 1.0 if module.training else 3.0
        if not module.training:
            own.append(probe.step)
            if failing:
                raise RuntimeError("out of memory")

    vit.head.register_forward_hook(pass_by)
    vit.train()
    probe = Probe(vit, sites="+mlp", blocks=0, every="auto", max_samples=1, rank_samples=1)
    with probe:
        if failing:
            with pytest.warns(UserWarning, match="could not measure step 0, training goes on"):
                vit(images)
            for _ in range(3):
                vit(images)
        else:
            for _ in range(600):
                vit(images)
    if failing:
        assert own == [0]  # not again and again
        return
    # the second after 3 s, which is seen at 4; then after 297 s, seen at 512
    assert own == [0, 4, 516]
    assert sorted({row["step"] for row in probe.rows()}) == own
    assert repr(probe).endswith("every=auto, step=600)")


def test_measuring_by_oneself(vit: Any, images: Tensor, clock: Clock) -> None:
    vit.head.register_forward_hook(lambda *_: setattr(clock, "now", clock.now + 1.0))
    probe = Probe(vit.train(), sites="+mlp", blocks=0, every="auto", samples=images[:1])
    for step in range(300):
        clock.now += 1.0
        if probe.due(step):
            probe.measure(step)
    assert sorted({row["step"] for row in probe.rows()}) == [0, 1, 129, 257]


@pytest.mark.parametrize("wrong", ["Auto", "", "100", 0, -1, 1.5, None])
def test_wrong_paces(vit: Any, wrong: Any) -> None:
    with pytest.raises(ValueError, match='every must be a whole number from 1 on, or "auto", got'):
        Probe(vit, every=wrong)


@pytest.mark.parametrize("every", [4, "auto"])
def test_the_last_step_is_measured_whatever_the_pace(clock: Clock, every: Any) -> None:
    pace = Pace(every, last=10)
    assert pace.due(0)
    with pace.timed(CPU):
        clock.now += 1.0
    pace.measured(0)
    found = []
    for step in range(1, 11):
        clock.now += 1e-3
        if pace.due(step):
            found.append(step)
            pace.measured(step)
    assert found == ([4, 8, 10] if every == 4 else [10])
