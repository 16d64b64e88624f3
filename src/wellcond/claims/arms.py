"""Trained arms: what all comparisons of trainings share, so that a claim takes a page of code.

    CLAIM = TrainedArms(id="asa-fig1c", arms=SKIPS, sets=("cifar10", …), judge=judge, figure=figure, …)
    CLAIM.reproduce(options, runs)             # tune, train every seed, write evidence/asa-fig1c/lab-cifar10.json
    CLAIM.verdict([record, …]).verdict         # "holds in part"

Every arm has the same budget. First its learning rate is chosen from one grid, on held-out images of the training set;
then each seed is trained with it on the whole training set. The test set is used once, at the end of each of these. A
run that diverges counts as guessing. The whole grid is reported. If three seeds leave a set undecided and a run takes
under two minutes, two more are trained, once, and the interval is then 97.5 % instead of 95.
Runs are named by set, recipe, arm, rate and seed, not by claim: claims that share an arm share its runs.
An arm may start from the weights of another training (`starts`), which is done first, once for each seed.
For long trainings, one seed of every set and arm comes first (`in_rounds`), and evidence is written even if runs are
missing (as with `in_part`).
"""

import contextlib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from wellcond.claims.claim import MORE_SEEDS, SMOKE_RULE, Claim, Line, Options, Record, with_title
from wellcond.claims.comparison import Arm, Comparison
from wellcond.claims.figures import tuning
from wellcond.claims.runs import Planned, Result, Runs, made_by
from wellcond.claims.sets import SETS, ClaimSet, GivenData
from wellcond.records import read_json, write_record
from wellcond.train.config import Config
from wellcond.train.recipes import recipe
from wellcond.train.stopping import OutOfTime
from wellcond.verdicts import CONFIDENCE, SECOND_LOOK, Part, Whole, combine, listed, not_run, undecided

__all__ = ["GRID", "HELD_OUT", "LADDER", "Between", "TrainedArms", "Tuned", "scores", "tune"]

GRID: dict[str, tuple[float, ...]] = {"smoke": (1e-3, 3e-3), "lab": (1e-4, 3e-4, 1e-3), "paper": (1e-4, 3e-4, 1e-3)}
LADDER = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1)  # the rates that a grid may be extended to
GRID_EPOCHS = {"smoke": 1, "lab": 10, "paper": 300}
HELD_OUT = 0.1
LEAST_SEEDS = 3
QUICK = 120.0  # seconds; if runs take longer than this, no seeds are added

OF_ONE_ARM = {"lr", "seed", "data", "cache_dir", "keep", "log_every", "save_every", "epochs", "step_graph"}
"""Settings that differ between runs or belong to this machine; a record's `settings` leaves them out."""


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The learning rate of one arm, and the scores it was chosen by."""

    lr: float
    scores: dict[float, float]
    """The score of every rate that was tried, in ascending order of rates."""
    at_edge: bool
    """Whether the best rate is the smallest or largest that was tried, so that a better one may lie beyond."""


@dataclass(frozen=True, kw_only=True)
class Between:
    """A comparison of each set with the next larger one."""

    asks: str
    """What is asked, with {smaller} and {larger} for the titles of the sets."""
    judge: Callable[[str, Comparison, Comparison], Part]


@dataclass(frozen=True, kw_only=True)
class TrainedArms(Claim):
    """A claim decided by comparing trainings: evidence/ID/SCALE-SET.json for each set."""

    arms: Mapping[str, Arm]
    asks: str = ""
    """What is asked on each set, in short."""
    judge: Callable[[Comparison], Iterable[Part]] = lambda found: ()
    """Judges one set. The names of the parts need not mention the set."""
    summary: Callable[[Comparison], Iterable[Line]] = lambda found: ()
    says: Callable[[Mapping[str, Comparison]], str] = lambda sets: ""
    """The finding on the sets that have runs, in one sentence."""
    figure: Callable[[Sequence[Comparison]], Any] | None = None
    between: Between | None = None
    across: Callable[[Mapping[str, Comparison]], Iterable[Part]] | None = None
    """Judges all sets together; some may have no runs yet."""
    apart: tuple[str, ...] = ()
    """Sets that are trained and shown but not part of any verdict."""
    in_rounds: bool = False
    """Train one seed of every set and arm first, then the next; evidence is written even if runs are missing."""
    in_part: bool = False
    """In the usual order, but evidence is written even if runs are missing; `judge` and the rest must allow for it."""
    rules: Callable[[Comparison], Iterable[str]] = lambda found: ()
    """Further reasons to leave a set undecided, beside the rules for all claims."""
    plain: str = "both"
    """The arm that the others are compared with."""
    trains: tuple[str, ...] = ()
    """Arms that the verdict needs, by default all; the others are shown if another claim has trained them."""
    same_runs_as: str = ""
    """The claim whose runs these are, if it is not this one."""
    starts: Mapping[str, Arm] = field(default_factory=dict)
    """Trainings that arms start from, one run per seed. They are not compared, and use the rate of their settings."""
    seeds: int = LEAST_SEEDS
    """How many the verdict needs; if that is fewer than usual, no more are trained."""
    second_look: bool = True
    """Whether to train two more seeds if the first leave a set undecided and runs are quick; False for a claim with one
    arm far slower than the others."""
    as_a_whole: bool = True
    """Whether every part requires that all arms have their seeds and that the plain one is respectable. Otherwise each
    part is about some of the arms, and `judge` checks both."""
    recipe: str = "vit_tiny"
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By scale and by set: settings of every arm's training beside the usual ones; None keeps the recipe's own."""
    grid: Mapping[str, tuple[float, ...]] = field(default_factory=lambda: GRID)
    """By scale: the learning rates to try. If there are none at a scale, every arm has the rate of its settings."""
    measures: tuple[str, ...] = ("log_kappa",)
    """Measurements of every trained model before its run ends: names in `measurements.MEASUREMENTS`."""
    shows: tuple[str, ...] = ()
    """Further parts of a run's result that its evidence has: `validation`, and what only some arms measure."""
    keeps: tuple[str, ...] = ()
    """Measurements during training that its evidence keeps: log_kappa, attention_entropy, …"""
    reads: Mapping[str, Callable[[Result], Any]] = field(default_factory=dict)
    """By name: further values for its evidence, computed from a run's result."""
    paper: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By set: the paper's numbers."""
    multiplications: float = 1.1e9
    """Multiplications in one forward pass at the paper's scale, for its plan; by default ViT-Tiny/16 at 224 pixels."""

    # ---- training

    def configure(self, options: Options, data: GivenData, arm: str) -> Config:
        """Return the configuration of an arm's training, all but its learning rate and seed."""
        scale = "smoke" if options.scale == "smoke" else "lab"
        settings = data.set.settings(scale)
        for name in (scale, data.set.name):
            settings = {**settings, **self.settings.get(name, {})}
        settings = {name: value for name, value in settings.items() if value is not None}
        usual = recipe(self.recipe_of(data, arm), scale=scale, data=data.spec, keep=1, **settings).as_defaults()
        config = usual.changed(_added(usual, self._arm(arm).settings)).changed(list(options.settings))
        if "warmup_epochs" not in config.given:
            short = {"warmup_epochs": min(config.warmup_epochs, config.epochs)}  # as in the grid
            config = config.changed(short, given=False)
        weights = {"checkpoint": os.devnull} if self._arm(arm).start else {}  # they do not exist yet
        config.changed(weights).check()  # fail now, not after training the grid
        return config

    def _arm(self, name: str) -> Arm:
        return self.arms.get(name) or self.starts[name]

    def recipe_of(self, data: GivenData, arm: str) -> str:
        """Return the recipe that an arm trains with on a data set."""
        return self._arm(arm).recipe or data.set.recipe or self.recipe

    @property
    def needed(self) -> list[str]:
        """The arms that the verdict needs."""
        return [arm for arm in self.trains or self.arms if self.arms[arm].seeds is None]

    def trainings(self, seeds: int, set_: str) -> dict[str, int]:
        """Return how many runs of each arm to train on a set."""
        arms = [arm for arm in self.trains or self.arms if set_ not in self.arms[arm].not_on]
        return {arm: min(seeds, self.arms[arm].seeds or seeds) for arm in arms}

    def reproduce(self, options: Options, runs: Runs) -> list[Line]:
        """Run what is missing, write the evidence of each set, and return the results in words."""
        if self.seeds < LEAST_SEEDS:
            options = replace(options, seeds=self.seeds, second_look=False)
        for data in options.data:
            for arm in (*self.starts, *self.arms):
                self.configure(options, data, arm)
        lines: list[Line] = []
        missing: OutOfTime | None = None
        for seeds in range(1, options.seeds + 1) if self.in_rounds else (options.seeds,):
            calls = [partial(self._reproduce_on, options, data, runs, seeds) for data in options.data]
            try:
                lines = list(chain(*runs.together(calls)))
            except OutOfTime as over:
                missing = over
                if runs.left:
                    break
        if missing is not None:
            raise missing
        return lines

    def _reproduce_on(self, options: Options, data: GivenData, runs: Runs, seeds: int) -> list[Line]:
        late: list[OutOfTime] = []
        before = self._written(options, data)
        confidence = before.get("confidence", CONFIDENCE)
        if before.get("seeds", 0) > options.seeds or confidence != CONFIDENCE:  # what has been looked at stays
            options = replace(options, seeds=max(before["seeds"], options.seeds), second_look=False)
        seeds = seeds if self.in_rounds else options.seeds
        record = self._record(options, data, runs, seeds=seeds, late=late, confidence=confidence)
        if (
            options.second_look
            and seeds == options.seeds
            and not late
            and self._asks_for_more(record, self._samples(options, data))
        ):
            options.say(f"{self.id}: {seeds} seeds leave {data.set.title} undecided; {MORE_SEEDS} more")
            more = replace(options, seeds=seeds + MORE_SEEDS)
            try:
                second = self._record(more, data, runs, seeds=more.seeds, late=late, confidence=SECOND_LOOK)
            except OutOfTime as over:
                late.append(over)
            else:
                record = record if late else second  # a second look counts only if complete
        self._explore(options, data, runs, record, seeds=seeds, late=late)
        if any(arm["runs"] or "grid" in arm for arm in record["arms"].values()):
            self._write(options, data, record)
        if late:
            raise late[0]
        return self.lines(record)

    def _explore(
        self, options: Options, data: GivenData, runs: Runs, record: dict[str, Any], *, seeds: int,
        late: list[OutOfTime],
    ) -> None:  # fmt: skip
        """Train last the arms that no verdict needs, and add them to the record; these may be missing."""
        trains = {arm: n for arm, n in self.trainings(seeds, data.set.name).items() if arm not in self.needed}
        record["arms"] |= {arm: {"runs": []} for arm in trains}
        try:
            record["arms"] |= self._train_arms(options, data, runs, trains, seeds, late)
        except OutOfTime as over:
            late.append(over)

    def _write(self, options: Options, data: GivenData, record: dict[str, Any]) -> None:
        path, before = self._path(options, data), self._written(options, data).get("arms", {})
        if lost := [arm for arm, one in record["arms"].items() if not one["runs"] and before.get(arm, {}).get("runs")]:
            options.say(f"{path} stays as it is: it has runs of {', '.join(lost)}, whose results are no longer there")
            return
        if parts := list(self._parts_on(self._comparison(record))):
            record["verdict on this set"] = combine(parts).as_json()
        write_record(path, record, seed=0)
        options.say(f"wrote {path}")

    def _path(self, options: Options, data: GivenData) -> Path:
        return options.evidence / self.id / f"{options.scale}-{data.set.name}.json"

    def _written(self, options: Options, data: GivenData) -> Record:
        """Return the record that is there; empty if there is none, or it is damaged, or the results are not kept."""
        if options.scale != "smoke":
            with contextlib.suppress(OSError, ValueError):
                return read_json(self._path(options, data))
        return {}

    def _record(
        self, options: Options, data: GivenData, runs: Runs, *, seeds: int, late: list[OutOfTime],
        confidence: float = CONFIDENCE,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the record of one set. Lack of time is noted in `late` if runs may be missing; else OutOfTime."""
        trains = {arm: n for arm, n in self.trainings(seeds, data.set.name).items() if arm in self.needed}
        arms = self._train_arms(options, data, runs, trains, seeds, late)
        beside = {arm: self._trained_elsewhere(data, runs, arm, seeds) for arm in self.arms if arm not in trains}
        config = self.configure(options, data, self.plain)
        of_arms = OF_ONE_ARM.union(*(arm.settings for arm in self.arms.values()))
        differ = config.differences(Config())
        return {
            "claim": self.id,
            "scale": options.scale,
            "data": data.set.name,
            data.set.unit: getattr(config, data.set.unit),
            "seeds": options.seeds,
            "confidence": confidence,
            "settings": {name: mine for name, (mine, _) in differ.items() if name not in of_arms},
            "arms": {arm: arms.get(arm) or {"runs": beside[arm]} for arm in self.arms},
            "paper": dict(self.paper.get(data.set.name, {})),
        }

    def _train_arms(
        self, options: Options, data: GivenData, runs: Runs, trains: Mapping[str, int], seeds: int,
        late: list[OutOfTime],
    ) -> dict[str, dict[str, Any]]:  # fmt: skip
        before = seeds - 1 if self.in_rounds else 0
        runs.expect(sum(len(self._grid(options, arm)) + max(0, count - before) for arm, count in trains.items()))
        self._train_starts(options, data, runs, trains, late)
        calls = [partial(self._train_arm, options, data, runs, arm, count, late) for arm, count in trains.items()]
        return dict(zip(trains, runs.together(calls), strict=True))

    def _train_starts(
        self, options: Options, data: GivenData, runs: Runs, trains: Mapping[str, int], late: list[OutOfTime]
    ) -> None:
        """Train the runs that arms start from and that are still needed, all before any arm, so that each form is
        compiled once. If there is no time for one, only the arms that start from it have to wait."""
        wanted = {
            (self.arms[arm].start, seed)
            for arm, count in trains.items()
            for seed in range(count)
            if self.arms[arm].start and not runs.results(f"{self._folder(data, arm)}/seed-{seed}-lr-*")
        }

        def plan(start: str, seed: int) -> Planned:
            config = self.configure(options, data, start).changed({"seed": seed})
            final = config.changed(_unless_in_steps(config, data.set.final(config)))
            return Planned(
                name=self._start_name(data, start, seed), config=final,
                images=data.set.samples(config), keep_weights=True, turn=0, order=self._order(start, seed),
            )  # fmt: skip

        def train(start: str, seed: int) -> None:
            try:
                runs.run(plan(start, seed))
            except OutOfTime as over:
                self._may_miss(over, late)

        runs.expect(len(wanted))
        runs.together([partial(train, *one) for one in sorted(wanted)])

    def _start_name(self, data: GivenData, start: str, seed: int) -> str:
        return f"{self._folder(data, start)}/start-{seed}" if start else ""

    def _train_arm(
        self, options: Options, data: GivenData, runs: Runs, arm: str, seeds: int, late: list[OutOfTime]
    ) -> dict[str, Any]:
        config, folder = self.configure(options, data, arm), self._folder(data, arm)
        tried: dict[float, Result] = {}
        try:
            tuned = self._tuned(options, data, runs, arm, tried)
        except OutOfTime as over:
            self._may_miss(over, late)
            return {**_grid_record(tried, data.set), "runs": []}
        measure = (*self.measures, *self.arms[arm].measures)

        def plan(seed: int) -> Planned:
            own = _unless_in_steps(config, data.set.final(config))
            final = config.changed({"lr": tuned.lr, "seed": seed, **own})
            name = f"{folder}/seed-{seed}-lr-{tuned.lr:g}"
            return Planned(
                name=name, config=final, images=data.set.samples(config), measure=measure, order=self._order(arm, seed),
                start=self._start_name(data, self.arms[arm].start, seed), turn=1 if self.arms[arm].seeds is None else 2,
            )  # fmt: skip

        def train_seed(seed: int) -> Result | None:
            try:
                return self._trained(options, data, runs, plan(seed))
            except OutOfTime as over:
                self._may_miss(over, late)
                return None

        results = runs.together([partial(train_seed, seed) for seed in range(seeds)])
        later = range(seeds, min(options.seeds, self.arms[arm].seeds or options.seeds)) if self.in_rounds else ()
        results += [runs.finished(plan(seed)) for seed in later]  # from an earlier call that got further
        return self._arm_record(tuned, tried, [one for one in results if one is not None], data.set)

    def _trained(self, options: Options, data: GivenData, runs: Runs, plan: Planned) -> Result:
        result = runs.run(plan)
        if options.scale == "lab":
            data.set.check_trained(result, data.spec)  # a folder may be called cifar10 and hold something else
        return result

    def _may_miss(self, over: OutOfTime, late: list[OutOfTime]) -> None:
        """Add `over` to `late` if evidence may be written with runs missing; otherwise raise it."""
        if not (self.in_rounds or self.in_part):
            raise over
        late.append(over)

    def _tuned(self, options: Options, data: GivenData, runs: Runs, arm: str, tried: dict[float, Result]) -> Tuned:
        """Choose an arm's learning rate. The trainings are added to `tried`, which has those that were done if time
        runs out."""
        config, folder, grid = self.configure(options, data, arm), self._folder(data, arm), self._grid(options, arm)
        if not grid:
            return Tuned(lr=config.lr, scores={}, at_edge=False)
        epochs = min(config.epochs, options.grid_epochs or GRID_EPOCHS[options.scale])
        short = {"epochs": epochs, "eval_every": epochs, "warmup_epochs": min(config.warmup_epochs, epochs)}

        def score(lr: float) -> float:
            changed = config.changed({**_unless_in_steps(config, short), "lr": lr, "holdout": HELD_OUT})
            images = round((1 - HELD_OUT) * data.set.samples(changed))
            start = self._start_name(data, self.arms[arm].start, config.seed)
            plan = Planned(
                name=f"{folder}/grid-{lr:g}", config=changed, images=images, start=start,
                turn=0 if self.arms[arm].seeds is None else 2, order=self._order(arm),
            )  # fmt: skip
            tried[lr] = self._trained(options, data, runs, plan)
            return tried[lr]["metrics"]["top1"] if tried[lr]["metrics"] else -math.inf

        return tune(score, grid=grid, extend=options.scale != "smoke", together=runs.together)

    def _grid(self, options: Options, arm: str) -> tuple[float, ...]:
        if "lr" in self.arms[arm].settings:
            return ()
        own = () if options.scale == "smoke" else self.arms[arm].grid
        return own or self.grid.get(options.scale, ())

    def _order(self, arm: str, seed: int = 0) -> tuple[int, ...]:
        """Return what a run's `order` is: the first seed of every arm, in the order of arms, then the next."""
        return seed, [*self.starts, *self.arms].index(arm)

    def _folder(self, data: GivenData, arm: str) -> str:
        return f"{data.set.name}/{self.recipe_of(data, arm)}/{arm}"

    def _trained_elsewhere(self, data: GivenData, runs: Runs, arm: str, seeds: int) -> list[dict[str, Any]]:
        """Return the finished runs of an arm that this claim does not train, at the rate with the most seeds."""
        found = [run for run in runs.results(f"{self._folder(data, arm)}/seed-*") if run["config"]["seed"] < seeds]
        rates = [run["config"]["lr"] for run in found]
        chosen = [run for run in found if run["config"]["lr"] == max(rates, key=rates.count)]
        return [self._run_record(run, data.set) for run in sorted(chosen, key=lambda run: run["config"]["seed"])]

    def _arm_record(
        self, tuned: Tuned, tried: Mapping[float, Result], results: list[Result], set_: ClaimSet
    ) -> dict[str, Any]:
        chosen = {"lr": tuned.lr} | ({"lr at the edge of the grid": tuned.at_edge} if tried else {})
        return {**chosen, **_grid_record(tried, set_), "runs": [self._run_record(run, set_) for run in results]}

    def _run_record(self, run: Result, set_: ClaimSet) -> dict[str, Any]:
        """Return what the evidence keeps of a run. Its result has everything, with all measurements during training."""
        course = {name: run["measured"][name] for name in self.keeps if name in run["measured"]}
        return {
            "seed": run["config"]["seed"],
            "lr": run["config"]["lr"],
            "run": run["name"],
            **scores(run, set_),
            "images per second": run["images_per_second"],
            "losses": run["losses"],
            **{name: run.get(name) for name in self.measures},
            **{name: run[name] for name in self.shows if name in run},
            **{name: read(run) for name, read in self.reads.items()},
            **({"measured": {"steps": run["measured"]["steps"], **course}} if course else {}),
            **({"data": run["data"]} if run.get("data") else {}),
            **made_by(run),
        }

    def _samples(self, options: Options, data: GivenData) -> int:
        return data.set.samples(self.configure(options, data, self.plain))

    def _asks_for_more(self, record: Record, samples: int) -> bool:
        """Whether more seeds would help: only wide intervals leave the set undecided, and runs are quick."""
        found = self._comparison(record)
        if not self.second_look or record["scale"] != "lab" or self._broken_rules(found):
            return False
        speeds = [run.get("images per second") or 0.0 for arm in found.trained for run in found.runs(arm)]
        quick = max(speeds) * QUICK > samples  # by the fastest: older runs were slower, or shared their GPU
        return quick and any(part.outcome == "undecided" for part in self.judge(found))

    # ---- judging

    def verdict(self, records: Sequence[Record], sets: Sequence[str] = ()) -> Whole:
        """Return the verdict by the rules, from the parts on each set, on each set and the next, and on all sets."""
        sets = sets or self.sets
        judged = [name for name in sets if name not in self.apart]
        by_set = {record["data"]: self._comparison(record) for record in records}
        by_set = {name: by_set[name] for name in judged if name in by_set and self._has_runs(by_set[name])}
        parts: list[Part] = []
        for name in judged:
            if name in by_set:
                parts += self._parts_on(by_set[name])
            elif self.asks:
                parts.append(not_run(f"{SETS[name].title}: {self.asks}"))
        parts += [*self._between(by_set, judged), *self._across(by_set, judged)]
        return combine(parts or [not_run(self.holds_if)])

    def _parts_on(self, found: Comparison) -> Iterable[Part]:
        for part in self.judge(found) if self._has_runs(found) else ():
            yield self._by_the_rules(replace(part, name=f"{found.title}: {part.name}"), found)

    def _across(self, by_set: Mapping[str, Comparison], sets: Sequence[str]) -> Iterable[Part]:
        missing = [SETS[name].title for name in sets if name not in by_set]
        for part in self.across(by_set) if self.across else ():
            if missing:
                part = undecided(part, f"no runs yet on {', '.join(missing)}")
            yield self._by_the_rules(part, *by_set.values())

    def _between(self, by_set: Mapping[str, Comparison], sets: Sequence[str]) -> Iterable[Part]:
        for smaller, larger in pairwise(sets) if self.between else ():
            assert self.between is not None
            name = self.between.asks.format(smaller=SETS[smaller].title, larger=SETS[larger].title)
            pair = [by_set[one] for one in (smaller, larger) if one in by_set]
            if len(pair) < 2:
                yield not_run(name)
            else:
                yield self._by_the_rules(self.between.judge(name, *pair), *pair)

    def _has_runs(self, found: Comparison) -> bool:
        return bool(found.runs(self.plain) if self.as_a_whole and not self.in_part else found.trained)

    def _comparison(self, record: Record) -> Comparison:
        return Comparison(record, self.arms, self.plain)

    def _by_the_rules(self, part: Part, *found: Comparison) -> Part:
        """Return the part, undecided if a rule for all verdicts is not met."""
        if part.outcome == "not run":
            return part
        broken = {one.title: self._broken_rules(one, part.about) for one in found}
        for problem in dict.fromkeys(chain(*broken.values())):
            where = [title for title, problems in broken.items() if problem in problems]
            part = undecided(part, f"{problem} on {', '.join(where)}" if len(where) < len(broken) else problem)
        return part

    def _broken_rules(self, found: Comparison, about: Sequence[str] = ()) -> list[str]:
        """Return the rules that are not met, in words. `about`: the arms to check, by default all that are needed."""
        record, set_, problems = found.record, found.set, []
        about = about or [arm for arm in self.needed if set_.name not in self.arms[arm].not_on]
        if record["scale"] == "smoke":
            problems.append(SMOKE_RULE)
        seeds = min([record["seeds"], *(len(found.runs(arm)) for arm in about)])
        if self.as_a_whole and seeds < self.seeds:
            problems.append(f"{seeds} of {self.seeds} seeds")
        if record[set_.unit] < set_.length:
            problems.append(f"{record[set_.unit]} of {set_.length} {set_.unit}")
        if self.as_a_whole and not found.runs(self.plain):
            problems.append(f"{self.arms[self.plain].title} has not run")
        elif self.as_a_whole and (reached := found.mean(self.plain)) < 100 * set_.respectable:
            plain, asked = self.arms[self.plain].title, 100 * set_.respectable
            problems.append(f"{plain} reach {reached:.1f} % on {set_.title}, below the {asked:.0f} % asked")
        edges = [arm for arm in about if record["arms"][arm].get("lr at the edge of the grid")]
        if edges and record["scale"] != "smoke":
            problems.append(f"the best rate of {', '.join(edges)} is the last that was tried")
        return [*problems, *self.rules(found)]

    # ---- showing

    def lines(self, record: Record) -> list[Line]:
        found = self._comparison(record)
        compared = (self.summary, self._other_data, self._open) if self._has_runs(found) else ()
        tuned = () if self.same_runs_as else chain(found.tuned(), self._other_grid(found))
        said = chain(*(lines(found) for lines in compared), tuned)
        return with_title(found.title, said)

    def _other_grid(self, found: Comparison) -> Iterable[Line]:
        """Say so if the trainings that chose the rates were of another length than the rules prescribe."""
        record = found.record
        lengths = {one["grid"]["epochs"] for one in record["arms"].values() if "grid" in one}
        odd = sorted(lengths - {min(GRID_EPOCHS[record["scale"]], record.get("epochs", math.inf))})
        if odd and record["scale"] == "lab":
            said = " and ".join(map(str, odd))
            yield f": the trainings that chose the rates had {said} epochs, not the {GRID_EPOCHS['lab']} of the rules"

    def _open(self, found: Comparison) -> Iterable[Line]:
        """Say so if the rules allow a second look that has not been taken."""
        record, set_ = found.record, found.set
        once = record["seeds"] == LEAST_SEEDS and found.confidence == CONFIDENCE
        if once and set_.unit == "epochs" and self._asks_for_more(record, set_.train_samples * record["epochs"]):
            yield f": {LEAST_SEEDS} seeds leave it undecided; {MORE_SEEDS} more are allowed, and not trained yet"

    def _other_data(self, found: Comparison) -> Iterable[Line]:
        """Say so if the arms of a seed are not paired, because their training data differ in content or in order."""
        for seed in range(found.record["seeds"]):
            runs = {arm: run for arm in self.needed for run in found.runs(arm) if run["seed"] == seed}
            arms: dict[str, list[str]] = {}
            for arm, run in runs.items():
                if run.get("data"):  # older runs do not record it
                    arms.setdefault(run["data"], []).append(self.arms[arm].title)
            if len(arms) > 1:
                groups = "; ".join(", ".join(titles) for titles in arms.values())
                yield f", seed {seed}: these were trained on data that differ in content or in order: {groups}"

    def finding(self, records: Sequence[Record]) -> str:
        sets = {record["data"]: self._comparison(record) for record in records}
        tuned = [said for found in sets.values() if (said := found.best_tuned())]
        sets = {name: found for name, found in sets.items() if self._has_runs(found)}
        said = self.says(sets) if sets else ""
        if not said and tuned and not sets:
            return f"So far only the trainings that choose the learning rates: {'; '.join(tuned)}."
        if not said and sets:
            titles = {self.arms[arm].title: None for found in sets.values() for arm in found.trained}
            return f"Nothing can be said yet; there are runs of {listed(titles)}."
        counts = {len(found.runs(arm)) for found in sets.values() for arm in self.needed if found.runs(arm)}
        if not said or 1 not in counts or self.seeds == 1:
            return said
        return f"{said.removesuffix('.')} ({'one seed' if counts == {1} else 'some of one seed'})."

    def draw(self, records: Sequence[Record]) -> Any | None:
        order = [name for name in SETS if name in {record["data"] for record in records}]
        ordered = sorted(records, key=lambda record: order.index(record["data"]))
        found = [self._comparison(record) for record in ordered]
        trained = [one for one in found if self._has_runs(one)]
        chart = self.figure(trained) if self.figure and trained else None
        if chart is None and self.figure and any(one.best_tuned() for one in found):
            return tuning(found)
        return chart

    def plan_paper(self, options: Options) -> list[str]:
        if self.paper_scale:
            return super().plan_paper(options)
        config = recipe(self.recipe, scale="paper")
        trainings = {
            name: sum(
                seeds + len(self._grid(options, arm)) for arm, seeds in self.trainings(options.seeds, name).items()
            )
            for name in self.sets
        }
        images = sum(SETS[name].train_samples * count for name, count in trainings.items()) * config.epochs
        flops = 6 * self.multiplications * images  # forward and backward: 6 per multiplication
        days = flops / 1e14 / 86400
        first = f"{self.id} needs the runs of {self.same_runs_as}, and nothing else."
        return [
            *([first] if self.same_runs_as else []),
            f"{self.id} at paper scale, on {', '.join(SETS[name].title for name in self.sets)}: grids and seeds "
            f"together {sum(trainings.values())} trainings of {config.epochs} epochs at {config.image_size} pixels, "
            f"batch {config.batch_size}, the recipe of DeiT (the paper names none).",
            f"That is {images:.2g} images and {flops:.1g} floating point operations: {days:.1f} days at 100 TFLOP/s, "
            "and a model this small keeps up a fraction of that, with pictures to decode and to vary. Several GPUs for "
            "days.",
            "Nothing was run: this scale is out of reach here. "
            f"wellcond train {self.recipe} --scale paper trains one of them.",
        ]


def _grid_record(tried: Mapping[float, Result], set_: ClaimSet) -> dict[str, Any]:
    """Return what the evidence keeps of the trainings that choose a learning rate, if there are any."""
    rates = [
        {"lr": lr, **scores(run, set_), "losses": run["losses"], **made_by(run)} for lr, run in sorted(tried.items())
    ]
    epochs = {run["config"]["epochs"] for run in tried.values()}
    return {"grid": {"epochs": epochs.pop(), "held out": HELD_OUT, "rates": rates}} if tried else {}


def scores(run: Result, set_: ClaimSet) -> dict[str, Any]:
    """Return a run's accuracy in points; top-5 if there are more than five classes. Divergence counts as guessing."""
    chance = {name: number / set_.classes for name, number in (("top1", 1), ("top5", 5)) if number < set_.classes}
    metrics = set_.metrics(run) or chance
    found = {name: round(100 * metrics[name], 3) for name in chance}
    return {"status": run["status"], **found, **({"why": run["why"]} if run["why"] else {})}


def _added(config: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return an arm's settings, with its mappings merged into those of `config`."""
    return {
        name: {**getattr(config, name), **value} if isinstance(value, Mapping) else value
        for name, value in settings.items()
    }


def _unless_in_steps(config: Config, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out lengths in epochs where the user gave the same in steps (`reproduce --set steps=40`)."""
    return {name: value for name, value in settings.items() if config.takes_the_place_of.get(name) not in config.given}


# ---- the learning rate of one arm


Together = Callable[[Sequence[Callable[[], float]]], list[float]]


def tune(
    score: Callable[[float], float], *, grid: Sequence[float], extend: bool = True, together: Together | None = None
) -> Tuned:
    """Try each rate of the grid; while the best is at an edge, also try the next rung of the ladder.

    The rates of the grid do not depend on each other, so `together` may try them side by side.
    """
    if not grid:
        raise ValueError("a grid needs at least one learning rate")
    rates = sorted(grid)
    calls = [partial(score, lr) for lr in rates]
    scores = dict(zip(rates, together(calls) if together else [call() for call in calls], strict=True))
    while extend:
        beyond = _beyond(scores)
        if beyond is None:
            break
        scores[beyond] = score(beyond)
    ordered = dict(sorted(scores.items()))
    best = _best(ordered)
    return Tuned(lr=best, scores=ordered, at_edge=best in (min(ordered), max(ordered)))


def _best(scores: dict[float, float]) -> float:
    """Return the rate with the best score; of equals the smallest, which is also the side to extend if all diverged."""
    return max(sorted(scores), key=lambda lr: (scores[lr], -lr))


def _beyond(scores: dict[float, float]) -> float | None:
    """Return the next rate to try; None if the best is not at an edge, or the ladder ends."""
    best = _best(scores)
    if best == min(scores):
        return max((lr for lr in LADDER if lr < best * 0.99), default=None)
    if best == max(scores) and math.isfinite(scores[best]):
        return min((lr for lr in LADDER if lr > best * 1.01), default=None)
    return None
