"""The Long Range Arena for Skyformer's claims: the arms, the tasks, and what all of these claims share.

    CLAIM = ArenaArms(id="sky-lra", claim=…, across=judge, figure=figure, …)
    reproduce(["sky-lra", "sky-fig1", "sky-fig2", "sky-approx"], …)      # one set of runs for all four

Published learning rates and 50,000 steps, without a grid. Settings are fixed for every arm: all tokens within a
sequence's length count, including black pixels, and Skyformer's landmarks are among them. Four arms more have one seed
each. Skyformer as its authors run it, on the published tasks: their masks, float16, and no state from the first fifth.
The other three are exploration: on Pathfinder, softmax with the authors' masks, which hide the background, and softmax
in float16, which has three more bits than bfloat16, both added when softmax had been at chance there; on Text and
ListOps, softmax with the embedded sequence grayed, to see whether the cure of the other paper helps here.
The state that is best on the development part is tested once, at the end of its run; Image is validated every 500 steps
like the other published tasks, not every 50. Text has no development part: a tenth of its training part is held out.
Retrieval's texts may not be redistributed; its stand-in, which verdicts on accuracy leave out, asks whether two film
reviews share an opinion.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median
from typing import Any

from wellcond.claims import lra_measurements  # noqa: F401 (which registers what the arms measure)
from wellcond.claims.arms import TrainedArms
from wellcond.claims.claim import Line, Options
from wellcond.claims.comparison import Arm, Comparison
from wellcond.claims.figures import arm_color
from wellcond.claims.runs import Result, Runs
from wellcond.claims.sets import TASK_SETS, GivenData, TaskSet
from wellcond.records import read_json
from wellcond.train.recipes import recipe
from wellcond.verdicts import listed

__all__ = [
    "ARMS",
    "MAIN",
    "STAND_IN",
    "TASKS",
    "ArenaArms",
    "at_chance",
    "attention_color",
    "chance",
    "column",
    "shown",
    "titles",
    "unpaired",
    "who_guesses",
]

TASKS = tuple(TASK_SETS)
STAND_IN, PATHFINDER = "imdb_pairs", "lra_pathfinder"
ALL_BUT_PATHFINDER = tuple(task for task in TASKS if task != PATHFINDER)
MAIN = ("softmax", "kernelized", "nystrom", "skyformer")
ARMS = {
    "softmax": Arm(title="softmax", measures=("attention_spectrum", "approximations")),
    "kernelized": Arm(title="kernelized", settings={"attention": "kernelized"}),
    "nystrom": Arm(title="Nyströmformer", settings={"attention": "nystrom"}),
    "skyformer": Arm(title="Skyformer", settings={"attention": "skyformer"}),
    "compat": Arm(
        title="Skyformer as published",
        settings={
            "attention": "skyformer", "attention_kwargs": {"compat": True}, "data_kwargs": {"mask": "published"},
            "keep_best_after": 0.2, "amp_dtype": "float16",
        },
        seeds=1,
        not_on=(STAND_IN,),  # nothing was published about it
    ),
    "softmax-masked": Arm(
        title="softmax, black is padding", settings={"data_kwargs": {"mask": "published"}}, seeds=1,
        not_on=ALL_BUT_PATHFINDER,
    ),
    "softmax-float16": Arm(
        title="softmax, float16", settings={"amp_dtype": "float16"}, seeds=1, not_on=ALL_BUT_PATHFINDER,
    ),
    "softmax-grayed": Arm(
        title="softmax, SVD-grayed", settings={"gray": "svd", "epsilon": 0.7}, seeds=1,
        not_on=(STAND_IN, PATHFINDER, "lra_image"),
    ),
}  # fmt: skip
"""Every attention that has landmarks has 128."""
LEARNT = 2.0  # points above chance
SMOKE = {"steps": 2, "eval_steps": 1, "save_every": 1, "log_every": 1, "batch_size": 8, "warmup_steps": 1}


@dataclass(frozen=True, kw_only=True)
class ArenaArms(TrainedArms):
    """A comparison of attentions on the tasks."""

    arms: Mapping[str, Arm] = field(default_factory=lambda: ARMS)
    sets: tuple[str, ...] = TASKS
    plain: str = "softmax"
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: {"smoke": SMOKE})
    measures: tuple[str, ...] = ("test_accuracy",)
    reads: Mapping[str, Callable[[Result], Any]] = field(default_factory=lambda: {"start": _start_of})
    in_rounds: bool = True

    def _record(self, options: Options, data: GivenData, runs: Runs, **asked: Any) -> dict[str, Any]:
        """Add sky-time's step time of each arm, measured alone on the GPU: several runs may share it."""
        record = super()._record(options, data, runs, **asked)
        return record | {
            "ms alone": {arm: ms for arm, ms in _alone(options, data.set.name).items() if arm in self.arms}
        }

    def _other_data(self, found: Comparison) -> Iterable[Line]:
        yield from super()._other_data(found)
        for seed, groups in unpaired(found).items():
            said = "; ".join(", ".join(ARMS[arm].title for arm in group) for group in groups)
            yield f", seed {seed}: not paired, since their data came in another order: {said}"

    def plan_paper(self, options: Options) -> list[str]:
        """Return what the paper's scale takes. It is the lab scale except for Retrieval; times are from sky-time."""
        trainings = {(set_, arm): n for set_ in self.sets for arm, n in self.trainings(options.seeds, set_).items()}
        number = sum(trainings.values())
        lines = [
            f"{self.id} at paper scale: {len(self.sets)} tasks, {number} trainings of "
            f"{recipe('lra_listops', scale='paper').steps:,} steps, with the paper's model, batches and rates. That is "
            "the lab scale, too, but for Retrieval: it needs the texts of the AAN (lra_retrieval:FOLDER)."
        ]
        hours = {(set_, arm): self._hours(options, set_, arm) for set_, arm in trainings}
        known = {one: count for one, count in trainings.items() if hours[one]}
        if known:
            guess = number * sum(hours[one] * count for one, count in known.items()) / sum(known.values())
            lines.append(f"At the speed that sky-time measured: {guess:.1f} hours of one such GPU.")
        else:
            lines.append(f"{options.evidence} does not say yet how long that takes; a step is 2 to 6 ms on an H200.")
        return [*lines, f"Nothing was run: wellcond reproduce {self.id} --scale lab does."]

    def _hours(self, options: Options, name: str, arm: str) -> float:
        """Return the hours of one training; 0 if they are not known."""
        config = recipe(TASK_SETS[name].recipe, scale="lab")
        steps = TASK_SETS[name].samples(config) / config.batch_size
        return steps * _alone(replace(options, scale="lab"), name).get(arm, 0.0) / 3.6e6


def _alone(options: Options, name: str) -> dict[str, float]:
    """Return ms per step of each arm alone on the GPU, as measured by sky-time; empty if it has not been run."""
    path = options.evidence / "sky-time" / f"{options.scale}-{name}.json"
    return {arm: median(times) for arm, times in read_json(path)["time"].items()} if path.exists() else {}


def _start_of(run: Result) -> float | None:
    """Return log κ of the embedded samples at the random start: all attentions of a seed share it on the same data."""
    embeds = run.get("measured", {}).get("log_kappa", {}).get("embed", [])
    return round(fmean(embeds[0]), 3) if embeds else None


def unpaired(found: Comparison) -> dict[int, list[list[str]]]:
    """Return the groups of attentions that had different samples, by seed, where there are several; of runs that kept
    no checksum of their data."""
    groups: dict[int, dict[float, list[str]]] = {}
    for arm in MAIN:
        for run in found.runs(arm):
            if not run.get("data") and (start := run.get("start")) is not None:
                groups.setdefault(run["seed"], {}).setdefault(start, []).append(arm)
    return {seed: [*starts.values()] for seed, starts in sorted(groups.items()) if len(starts) > 1}


def column(found: Comparison) -> str:
    """Return a task's title, with the name of the task that it stands in for, if any."""
    set_ = found.set
    assert isinstance(set_, TaskSet)
    return f"{set_.title}, for {set_.stands_for}" if set_.stands_for else set_.title


def chance(found: Comparison) -> float:
    """Return the accuracy of guessing, in %."""
    return 100 / found.set.classes


def at_chance(found: Comparison, arm: str = "softmax") -> bool:
    """Whether trained models, softmax by default, do no better than guessing: what they compute says nothing about the
    task."""
    return bool(found.runs(arm)) and found.mean(arm) < chance(found) + LEARNT


def who_guesses(found: Comparison) -> str:
    """Say which of the attentions do no better than guessing."""
    guessing, others = (
        [ARMS[arm].title for arm in MAIN if found.runs(arm) and at_chance(found, arm) is guesses]
        for guesses in (True, False)
    )
    if len(guessing) == 1:
        return f"{guessing[0]} only guesses"
    return f"{f'all but {listed(others)}' if len(others) < 2 and others else listed(guessing)} only guess"


def titles(arms: Sequence[str] = MAIN) -> list[str]:
    return [ARMS[arm].title for arm in arms]


def attention_color(arms: Sequence[str] = MAIN) -> Any:
    """Return the encoding of a field `arm`: an attention has the same colour in every figure."""
    return arm_color(titles(arms), among=titles(tuple(ARMS)))


def shown(sets: Iterable[Comparison], arms: Sequence[str] = MAIN) -> Iterable[tuple[Comparison, str]]:
    """Return every pair of a task and an arm that has runs on it."""
    return ((found, arm) for found in sets for arm in arms if found.runs(arm))
