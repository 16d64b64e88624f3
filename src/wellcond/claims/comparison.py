"""The arms of a comparison, and what their runs on one set say: what a claim judges and draws.

SKIPS["no-sa"].settings                         # {"remove_skips": ["sa"]}
found = Comparison(record, SKIPS, plain="both")         # of evidence/asa-fig1c/lab-cifar10.json
found.values("no-sa")                           # {0: 61.5, 1: 62.0, 2: 60.9}: seed → top-1, in points
found.interval(found.drops("no-sa").values())   # what the plain arm has more, paired by seed, with its interval
found.log_kappa("both", "sa")                   # for each run, log κ of each block after training
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from wellcond.claims.claim import Record
from wellcond.claims.sets import SETS, ClaimSet
from wellcond.verdicts import CONFIDENCE, Interval, differences, interval

__all__ = ["SKIPS", "Arm", "Comparison", "ends_of"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison."""

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its training, where it differs from the recipe: skips, attention, graying, mixup, an optimiser. A
    mapping adds to the recipe's. A learning rate (`lr`) among them is fixed: no grid is tried."""
    recipe: str = ""
    """Another recipe than the claim's: another model."""
    seeds: int | None = None
    """Fewer than the claim's, for exploration: such an arm is trained and shown, and no rule or verdict asks for it."""
    not_on: tuple[str, ...] = ()
    """Sets that it is not trained on."""
    measures: tuple[str, ...] = ()
    """What is measured of its trained models, in addition to what the claim measures of all."""
    grid: tuple[float, ...] = ()
    """Learning rates that are tried at `lab` and `paper` scale, for one that wants others than the claim's other arms:
    the same on all sides of a comparison."""
    start: str = ""
    """The one of the claim's `starts` whose weights it starts from, seed by seed."""


SKIPS = {
    "both": Arm(title="both skips"),
    "no-sa": Arm(title="no attention skip", settings={"remove_skips": ["sa"]}),
    "no-mlp": Arm(title="no MLP skip", settings={"remove_skips": ["mlp"]}),
}
"""ViT-Tiny with and without its skips, for all claims that need them."""


@dataclass(frozen=True)
class Comparison:
    """The arms of one set, as a claim judges and draws them."""

    record: Record
    arms: Mapping[str, Arm]
    plain: str

    @property
    def set(self) -> ClaimSet:
        """The data set."""
        return SETS[self.record["data"]]

    @property
    def title(self) -> str:
        """The data set's name."""
        return self.set.title

    @property
    def confidence(self) -> float:
        """Of the intervals: higher where seeds were added after a first look."""
        return self.record.get("confidence", CONFIDENCE)

    @property
    def paper(self) -> Mapping[str, Any]:
        """The paper's numbers on this set."""
        return self.record.get("paper", {})

    @property
    def trained(self) -> list[str]:
        """The arms that have runs."""
        return [arm for arm in self.arms if self.runs(arm)]

    def runs(self, arm: str) -> list[Mapping[str, Any]]:
        """The runs of an arm, one for each seed."""
        return self.record["arms"].get(arm, {}).get("runs", [])

    def values(self, arm: str, name: str = "top1") -> dict[int, float]:
        """Seed → points."""
        return {run["seed"]: run[name] for run in self.runs(arm)}

    def drops(self, arm: str, name: str = "top1", *, of: str = "") -> dict[int, float]:
        """Seed → points that the plain arm, or the arm `of`, has more. Minus the gain."""
        plain = self.values(of or self.plain, name)
        return dict(zip(sorted(plain), differences(plain, self.values(arm, name)), strict=True))

    def paired(self, arm: str, of: str = "", name: str = "top1") -> dict[int, float]:
        """Seed → points that an arm has more than the plain one, or than the arm `of`, by the seeds that both have."""
        mine, theirs = self.values(arm, name), self.values(of or self.plain, name)
        return {seed: mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())}

    def measurements(self, arm: str, name: str = "log_kappa") -> list[dict[str, Any]]:
        """What was measured of an arm's models, one for each run that finished."""
        return [run[name] for run in self.runs(arm) if run.get(name)]

    def log_kappa(self, arm: str, site: str, when: str = "trained") -> list[list[float]]:
        """For each run that finished, log κ of each block; `when`: trained, or untrained (at its random start)."""
        return [run[when][site] for run in self.measurements(arm)]

    def rates(self, arm: str) -> dict[float, float]:
        """Learning rate → top-1 on held-out images, of the trainings that chose it, without those that diverged."""
        tried = self.record["arms"].get(arm, {}).get("grid", {}).get("rates", [])
        return {rate["lr"]: rate["top1"] for rate in tried if rate["status"] != "diverged"}

    def interval(self, values: Iterable[float]) -> Interval:
        """With the confidence that the number of looks asks for."""
        return interval(list(values), confidence=self.confidence)

    def mean(self, arm: str, name: str = "top1") -> float:
        """The mean of a metric over an arm's seeds."""
        return self.interval(self.values(arm, name).values()).mean

    def reached(self, arm: str) -> str:
        """In words: what an arm's seeds reached, at which rate, and what that was chosen by."""
        one, runs = self.record["arms"][arm], self.runs(arm)
        names = [name for name in ("top1", "top5") if name in runs[0]]
        reached = [f"{name[:3]}-{name[3:]} {self.interval(self.values(arm, name).values())} %" for name in names]
        lost = sum(run["status"] == "diverged" for run in runs)
        tried = ", ".join(map(_tried, one["grid"]["rates"])) if "grid" in one else ""
        return (
            f"{', '.join(reached)}, at lr {one['lr']:g}{f', {lost} diverged' if lost else ''}"
            f"{f'; held out: {tried}' if tried else ''}"
        )


def ends_of(run: Mapping[str, Any], sites: Sequence[str]) -> dict[str, dict[str, list[float]]] | None:
    """Of the result of a run that finished: log κ by site and block, at its first and its last mark. None where one of
    the sites was not measured."""
    found = run["measured"].get("log_kappa", {})
    if run["status"] != "finished" or not all(found.get(site) for site in sites):
        return None
    return {when: {site: found[site][mark] for site in sites} for when, mark in (("untrained", 0), ("trained", -1))}


def _tried(rate: Mapping[str, Any]) -> str:
    return f"{rate['lr']:g} → " + ("diverged" if rate["status"] == "diverged" else f"{rate['top1']:.1f}")
