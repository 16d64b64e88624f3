"""The arms of a comparison, and the results of their runs on one set, which a claim judges and draws.

SKIPS["no-sa"].settings                         # {"remove_skips": ["sa"]}
found = Comparison(record, SKIPS, plain="both")         # of evidence/asa-fig1c/lab-cifar10.json
found.values("no-sa")                           # {0: 61.5, 1: 62.0, 2: 60.9}: seed → top-1, in points
found.interval(found.drops("no-sa").values())   # the plain arm's lead, paired by seed, with its interval
found.log_kappa("both", "sa")                   # for each run, log κ of each block after training
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from wellcond.claims.claim import Record, TableRow
from wellcond.claims.sets import SETS, ClaimSet
from wellcond.verdicts import CONFIDENCE, Interval, differences, interval

__all__ = ["CEILING", "SKIPS", "Arm", "Comparison", "ends_of"]


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One side of a comparison."""

    title: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its training that differ from the recipe: skips, attention, graying, mixup, an optimiser. A mapping is
    added to the recipe's. If they set a learning rate (`lr`), it is fixed and no grid is tried."""
    recipe: str = ""
    """A recipe other than the claim's, that is another model."""
    seeds: int | None = None
    """Fewer than the claim's, for exploration: such an arm is trained and shown, but no rule or verdict needs it."""
    not_on: tuple[str, ...] = ()
    """Data sets that it is not trained on."""
    measures: tuple[str, ...] = ()
    """Measurements of its trained models, in addition to those that the claim makes of all arms."""
    grid: tuple[float, ...] = ()
    """Learning rates to try at `lab` and `paper` scale, if not those of the claim's other arms; the same on all sides
    of a comparison."""
    start: str = ""
    """The entry of the claim's `starts` whose weights it starts from, seed by seed."""


CEILING = "at the ceiling (lower bounds)"
"""The column that says how much of a mean of log κ counts as the ceiling of its dtype."""
TITLES = {"top1": "top-1", "top5": "top-5"}
SKIPS = {
    "both": Arm(title="both skips"),
    "no-sa": Arm(title="no attention skip", settings={"remove_skips": ["sa"]}),
    "no-mlp": Arm(title="no MLP skip", settings={"remove_skips": ["mlp"]}),
}
"""ViT-Tiny with and without its skips, for all claims that need them."""


@dataclass(frozen=True)
class Comparison:
    """The arms on one data set, as a claim judges and draws them."""

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
        """The confidence of the intervals: higher if seeds were added after a first look."""
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
        """Return a metric of an arm by seed, in points."""
        return {run["seed"]: run[name] for run in self.runs(arm)}

    def drops(self, arm: str, name: str = "top1", *, of: str = "") -> dict[int, float]:
        """Return, by seed, how many points an arm loses against the plain arm or the arm `of`: minus the gain."""
        plain = self.values(of or self.plain, name)
        return dict(zip(sorted(plain), differences(plain, self.values(arm, name)), strict=True))

    def paired(self, arm: str, of: str = "", name: str = "top1") -> dict[int, float]:
        """Return, for seeds that both have, how many points an arm gains over the plain arm or the arm `of`."""
        mine, theirs = self.values(arm, name), self.values(of or self.plain, name)
        return {seed: mine[seed] - theirs[seed] for seed in sorted(mine.keys() & theirs.keys())}

    def measurements(self, arm: str, name: str = "log_kappa") -> list[Any]:
        """Return a measurement of an arm's models, one for each run that finished."""
        return [run[name] for run in self.runs(arm) if run.get(name)]

    def log_kappa(self, arm: str, site: str, when: str = "trained") -> list[list[float]]:
        """Return log κ of each block, for each run that finished; `when`: trained, or untrained (the random start)."""
        return [run[when][site] for run in self.measurements(arm)]

    def mean_log_kappa(self, arm: str, site: str, when: str = "trained") -> list[float]:
        """Return the mean log κ over the blocks, for each run of a claim that reads the `ends_of` its runs."""
        return [fmean(run[when][site]) for run in self.measurements(arm, "kappa")]

    def conditioned(self, arm: str, sites: Sequence[str], when: str = "trained") -> dict[str, str]:
        """Return the cells that say what `mean_log_kappa` is at each of the sites, and of how many matrices only a
        lower bound is known: then so it is of the mean. Empty without a run."""
        runs, cells, full = self.measurements(arm, "kappa"), dict[str, str](), dict[str, int]()
        if not runs:
            return {}
        for site in sites:
            values = self.mean_log_kappa(arm, site, when)
            full[site] = sum(run.get("capped", {}).get(when, {}).get(site, 0) for run in runs)
            cells[site] = f"≥ {fmean(values):.2f}" if full[site] else f"{self.interval(values)}"
        counts = ", ".join(f"{count:,} ({site})" for site, count in full.items() if count)
        return cells | {CEILING: f"{counts} matrices" if counts else ""}

    def rates(self, arm: str) -> dict[float, float]:
        """Return top-1 on held-out images by learning rate, from the trainings on the grid that did not diverge."""
        tried = self.record["arms"].get(arm, {}).get("grid", {}).get("rates", [])
        return {rate["lr"]: rate["top1"] for rate in tried if rate["status"] != "diverged"}

    def best_tuned(self) -> str:
        """Say in words what the best trainings on the grid reached, if there are any."""
        tried = {one.title: rates for arm, one in self.arms.items() if (rates := self.rates(arm))}
        best = ", ".join(f"{max(rates.values()):.1f} % {title}" for title, rates in tried.items())
        epochs = next((one["grid"]["epochs"] for one in self.record["arms"].values() if "grid" in one), 0)
        return f"on held-out images of {self.title}, after {epochs} epochs, top-1 is at best {best}" if best else ""

    def tuned(self) -> Iterable[TableRow]:
        """Yield, for each arm with trainings on the grid, their scores by learning rate, the chosen one in bold."""
        for arm, one in self.record["arms"].items():
            if "grid" not in one:
                continue
            rates, tried = self.rates(arm), [rate["lr"] for rate in one["grid"]["rates"]]
            best = max(rates, key=lambda lr: rates[lr], default=None)
            edge = ", and the best is the last that was tried" if best in (min(tried), max(tried)) else ""
            missing = f" (no seeds yet{edge})" if not one["runs"] else ""
            cells = {lr: f"{rates[lr]:.1f}" if lr in rates else "diverged" for lr in tried}
            cells |= {lr: f"**{cells[lr]}**" for lr in tried if lr == one.get("lr")}
            table = f"Top-1 in % on held-out images by learning rate, after {one['grid']['epochs']} epochs"
            yield TableRow(f", {self.arms[arm].title}{missing}", {f"{lr:g}": cell for lr, cell in cells.items()}, table)

    def interval(self, values: Iterable[float]) -> Interval:
        """Return the interval of `values`, with this comparison's confidence."""
        return interval(list(values), confidence=self.confidence)

    def mean(self, arm: str, name: str = "top1") -> float:
        """Return the mean of a metric over an arm's seeds."""
        return self.interval(self.values(arm, name).values()).mean

    @property
    def metrics(self) -> dict[str, str]:
        """The accuracies that its runs have, with their titles."""
        have = next((self.runs(arm)[0] for arm in self.trained), {})
        return {name: title for name, title in TITLES.items() if name in have}

    def reached(self, arm: str) -> dict[str, str]:
        """Return the cells of a table that say what an arm's seeds reached, and at which learning rate."""
        one, runs = self.record["arms"][arm], self.runs(arm)
        lr = one["lr"] if "lr" in one else runs[0]["lr"]  # of an arm that another claim has trained
        lost = sum(run["status"] == "diverged" for run in runs)
        reached = {title: self.told(self.values(arm, name), " %") for name, title in self.metrics.items()}
        return {**reached, "learning rate": f"{lr:g}", "diverged": f"{lost} of {len(runs)}" if lost else ""}

    def gained(self, arm: str, of: str = "") -> dict[str, str]:
        """Return the cells that say how many points an arm gains over the plain arm or the arm `of`."""
        return {title: self.told(self.paired(arm, of, name), " points") for name, title in self.metrics.items()}

    def told(self, values: Mapping[int, float], unit: str = "") -> str:
        """Return in words the interval of values by seed, with a unit; empty if there are none."""
        return self.interval(values.values()).with_unit(unit) if values else ""


def ends_of(run: Mapping[str, Any], sites: Sequence[str]) -> dict[str, dict[str, Any]] | None:
    """Return log κ by site and block at a run's first and last mark, and how many matrices are at the ceiling of what
    can be measured; None if it did not finish, or if one of the sites was not measured."""
    found, capped = (run["measured"].get(name, {}) for name in ("log_kappa", "capped"))
    if run["status"] != "finished" or not all(found.get(site) for site in sites):
        return None
    ends = (("untrained", 0), ("trained", -1))
    return {
        **{when: {site: found[site][mark] for site in sites} for when, mark in ends},
        "capped": {
            when: {site: int(sum(capped[site][mark])) for site in sites if site in capped} for when, mark in ends
        },
    }
