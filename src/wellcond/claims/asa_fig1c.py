"""asa-fig1c: how much accuracy a ViT-Tiny loses without its attention skips, and without its MLP skips.

    wellcond reproduce asa-fig1c --scale smoke                                     # the digits, on a CPU
    wellcond reproduce asa-fig1c --scale lab --data-dir cifar10=data/cifar10       # one GPU

Three arms, the same budget for each: both skips, no attention skip, no MLP skip. First each arm's learning rate, from
one grid, by held-out images of the training set; then every seed with it on the whole training set. The test set is
looked at once, at the end of each of these. A run that diverges counts as guessing. The whole grid is reported.
"""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

from wellcond.claims.image_sets import IMAGE_SETS, GivenData, ImageSet
from wellcond.claims.options import Options, evidence_path, kept_results
from wellcond.claims.runs import Planned, Result, Runs, made_by
from wellcond.claims.tuning import Tuned, tune
from wellcond.records import write_record, write_text
from wellcond.report.bars import Bar, bar_chart
from wellcond.report.figures import Chart
from wellcond.train.config import Config
from wellcond.train.recipes import recipe
from wellcond.verdicts import Part, Whole, at_least, combine, differences, interval, not_run, undecided

__all__ = ["ARMS", "GRID", "PAPER", "configure", "figure", "judge", "plan_paper", "reproduce", "summary", "train_arms"]

ARMS: dict[str, dict[str, Any]] = {
    "both": {},
    "no-sa": {"remove_skips": ["sa"]},
    "no-mlp": {"remove_skips": ["mlp"]},
}
WORDS = {"both": "both skips", "no-sa": "no attention skip", "no-mlp": "no MLP skip"}
SETS = ("cifar10", "cifar100", "tiny-imagenet")
GRID = {"smoke": (1e-3, 3e-3), "lab": (1e-4, 3e-4, 1e-3), "paper": (1e-4, 3e-4, 1e-3)}
GRID_EPOCHS = {"smoke": 1, "lab": 10, "paper": 300}
HELD_OUT = 0.1
RATIO = 3.0  # drop(sa) ≥ 3 × drop(mlp)
LEAST_SEEDS = 3
PAPER = {"cifar10": {"no-sa": -22.0, "no-mlp": -2.0}}
"""Points of top-1 against both skips, where the paper gives a number; on Tiny-ImageNet `no-sa` "fails to train"."""

SMOKE = {
    "epochs": 2, "batch_size": 64, "warmup_epochs": 0, "padding": 0, "clip_grad": 1.0, "log_every": 5, "image_size": 8,
    "model_kwargs": {
        "img_size": 8, "patch_size": 2, "depth": 2, "embed_dim": 32, "num_heads": 2, "class_token": False,
        "global_pool": "avg", "weight_init": "jax",
    },
}  # fmt: skip
# Mixed images and smoothed labels: a ViT this small learns 50,000 images by heart without them, long before epoch 100.
# κ in float64: without its attention skip a ViT's `sa` lies at float32's ceiling.
LAB = {
    "mixup": 0.8, "cutmix": 1.0, "label_smoothing": 0.1, "log_every": 100, "save_every": 2000, "probe_marks": True,
    "probe_exact": "float64", "probe_sites": ["embed", "in", "sa", "+sa", "mlp", "+mlp"],
}  # fmt: skip


def configure(options: Options, data: GivenData, arm: str) -> Config:
    """The training of an arm, but for its learning rate and seed."""
    scale = "smoke" if options.scale == "smoke" else "lab"
    settings = SMOKE if scale == "smoke" else {**data.set.settings, **LAB}
    config = recipe("vit_tiny", scale=scale, data=data.spec, keep=1, **settings).changed(ARMS[arm])
    config = config.changed(list(options.settings))
    if not any(setting.partition("=")[0].strip() == "warmup_epochs" for setting in options.settings):
        config = config.changed({"warmup_epochs": min(config.warmup_epochs, config.epochs)})  # as in the grid
    config.check()  # now, and not when the grid has been trained
    return config


def train_arms(options: Options, data: GivenData, runs: Runs, arms: Sequence[str] = tuple(ARMS)) -> dict[str, Any]:
    """Tune and train these arms on one set: arm → its rate, the grid and the runs, as they go into the evidence."""
    runs.expect(len(arms) * (len(GRID[options.scale]) + options.seeds))
    trained = runs.together([partial(_train_arm, options, data, runs, arm) for arm in arms])
    return dict(zip(arms, trained, strict=True))


def _train_arm(options: Options, data: GivenData, runs: Runs, arm: str) -> dict[str, Any]:
    config, folder = configure(options, data, arm), f"{data.set.name}/{arm}"
    epochs = min(config.epochs, options.grid_epochs or GRID_EPOCHS[options.scale])
    short = {"epochs": epochs, "eval_every": epochs, "warmup_epochs": min(config.warmup_epochs, epochs)}
    tried: dict[float, Result] = {}

    def score(lr: float) -> float:
        changes = {**short, "lr": lr, "holdout": HELD_OUT}
        name = f"{folder}/grid-{lr:g}"
        tried[lr] = runs.run(Planned(name=name, config=config.changed(changes), first=True))
        return tried[lr]["metrics"]["top1"] if tried[lr]["metrics"] else -math.inf

    tuned = tune(score, grid=GRID[options.scale], extend=options.scale != "smoke", together=runs.together)

    def train_seed(seed: int) -> Result:
        final = config.changed({"lr": tuned.lr, "seed": seed, "eval_every": config.epochs})
        plan = Planned(name=f"{folder}/seed-{seed}-lr-{tuned.lr:g}", config=final, measure=True)
        return runs.run(plan)

    results = runs.together([partial(train_seed, seed) for seed in range(options.seeds)])
    return _arm_record(tuned, tried, results, data.set, epochs)


def _arm_record(tuned: Tuned, tried: Mapping[float, Result], results: list[Result], set_: ImageSet, epochs: int) -> Any:
    return {
        "lr": tuned.lr,
        "lr at the edge of the grid": tuned.at_edge,
        "grid": {
            "epochs": epochs,
            "held out": HELD_OUT,
            "rates": [
                {"lr": lr, **_scores(tried[lr], set_), "losses": tried[lr]["losses"], "measured": tried[lr]["measured"]}
                for lr in tuned.scores
            ],
        },
        "runs": [
            {
                "seed": run["config"]["seed"],
                **_scores(run, set_),
                "images per second": run["images_per_second"],
                "losses": run["losses"],
                "measured": run["measured"],
                **made_by(run),
            }
            for run in results
        ],
    }


def _scores(run: Result, set_: ImageSet) -> dict[str, Any]:
    """In points. A run that diverged knows nothing: it counts as guessing."""
    chance = {"top1": 1 / set_.classes, "top5": min(1.0, 5 / set_.classes)}
    metrics = run["metrics"] or chance
    found = {name: round(100 * metrics[name], 3) for name in ("top1", "top5")}
    return {"status": run["status"], **found, **({"why": run["why"]} if run["why"] else {})}


def reproduce(options: Options) -> list[str]:
    """Run what is missing, write the evidence of each set, and say in words what came out."""
    root = options.output / "asa-fig1c" / options.scale
    runs = Runs(root, console=options.console, device=options.device, jobs=options.jobs, kept=kept_results(options))
    return list(chain(*runs.together([partial(_reproduce_on, options, data, runs) for data in options.data])))


def _reproduce_on(options: Options, data: GivenData, runs: Runs) -> list[str]:
    arms = train_arms(options, data, runs)
    config = configure(options, data, "both")
    record = {
        "claim": "asa-fig1c",
        "scale": options.scale,
        "data": data.set.name,
        "epochs": config.epochs,
        "seeds": options.seeds,
        "settings": _settings(config),
        "arms": arms,
        "paper": PAPER.get(data.set.name, {}),
    }
    record["verdict on this set"] = judge([record], sets=[data.set.name]).as_json()
    path = evidence_path(options, "asa-fig1c", data.set.name)
    write_record(path, record, seed=0)
    write_text(path.with_suffix(".svg"), figure([record]).svg)
    options.console.print(f"wrote {path}", highlight=False)
    return summary(record)


def _settings(config: Config) -> dict[str, Any]:
    """What differs from the defaults, but for what differs from arm to arm or is of this machine."""
    differ = config.differences(Config())
    hidden = {
        "lr",
        "seed",
        "data",
        "cache_dir",
        "remove_skips",
        "keep",
        "log_every",
        "save_every",
        "epochs",
        "step_graph",
    }
    return {name: mine for name, (mine, _) in differ.items() if name not in hidden}


def judge(records: Sequence[Mapping[str, Any]], sets: Sequence[str] = SETS) -> Whole:
    """The verdict by the rules: on each set drop(sa) ≥ 3 × drop(mlp), and from set to set drop(sa) grows."""
    by_set = {record["data"]: record for record in records}
    parts = [_ratio_part(name, by_set.get(name)) for name in sets]
    for smaller, larger in pairwise(sets):
        name = f"drop(sa) is larger on {IMAGE_SETS[larger].title} than on {IMAGE_SETS[smaller].title}"
        if smaller not in by_set or larger not in by_set:
            parts.append(not_run(name))
            continue
        values = differences(_drops(by_set[larger], "no-sa"), _drops(by_set[smaller], "no-sa"))
        parts.append(_by_the_rules(at_least(name, values, 0.0, unit=" points"), by_set[smaller], by_set[larger]))
    return combine(parts)


def _ratio_part(name: str, record: Mapping[str, Any] | None) -> Part:
    title = f"{IMAGE_SETS[name].title}: drop(sa) ≥ {RATIO:g} × drop(mlp)"
    if record is None:
        return not_run(title)
    sa, mlp = _drops(record, "no-sa"), _drops(record, "no-mlp")
    excess = [sa[seed] - RATIO * mlp[seed] for seed in sorted(sa)]
    part = at_least(f"{title}, that is drop(sa) − {RATIO:g} × drop(mlp) ≥ 0", excess, 0.0, unit=" points")
    return _by_the_rules(part, record)


def _drops(record: Mapping[str, Any], arm: str) -> dict[int, float]:
    """Seed → points of top-1 lost against both skips."""
    top1 = {name: {run["seed"]: run["top1"] for run in found["runs"]} for name, found in record["arms"].items()}
    lost = differences(top1["both"], top1[arm])
    return dict(zip(sorted(top1["both"]), lost, strict=True))


def _by_the_rules(part: Part, *records: Mapping[str, Any]) -> Part:
    """Undecided where a rule for all verdicts is not met."""
    for record in records:
        for problem in _broken_rules(record):
            part = undecided(part, problem)
    return part


def _broken_rules(record: Mapping[str, Any]) -> list[str]:
    found, set_ = [], IMAGE_SETS[record["data"]]
    if record["scale"] == "smoke":
        found.append("a smoke run shows that it runs, and nothing else")
    if record["seeds"] < LEAST_SEEDS:
        found.append(f"{record['seeds']} seeds are fewer than {LEAST_SEEDS}")
    if record["epochs"] < set_.epochs:
        found.append(f"{record['epochs']} epochs are fewer than {set_.epochs}")
    plain = interval([run["top1"] for run in record["arms"]["both"]["runs"]]).mean
    if plain < 100 * set_.respectable:
        found.append(f"both skips reach {plain:.1f} % on {set_.title}, below the {100 * set_.respectable:.0f} % asked")
    edges = [arm for arm, one in record["arms"].items() if one["lr at the edge of the grid"]]
    if edges and record["scale"] != "smoke":
        found.append(f"the best rate of {', '.join(edges)} is the last that was tried")
    return found


def figure(records: Sequence[Mapping[str, Any]]) -> Chart:
    """Top-1 of the three arms on each set, as in the paper; a mark where the paper's drop would lie."""
    groups = {}
    for record in records:
        plain = interval([run["top1"] for run in record["arms"]["both"]["runs"]]).mean
        bars = []
        for arm, one in record["arms"].items():
            found = interval([run["top1"] for run in one["runs"]])
            drop = record["paper"].get(arm)
            mark = None if drop is None else plain + drop
            bars.append(Bar(name=WORDS[arm], value=found.mean, low=found.low, high=found.high, mark=mark))
        groups[IMAGE_SETS[record["data"]].title] = bars
    scale = records[0]["scale"]
    caption = f"Means over {records[0]['seeds']} seeds with 95 % intervals, at {scale} scale."
    return bar_chart(
        groups, title="ViT-Tiny without skips", y="top-1, %", mark="the paper's drop from our both skips",
        caption=caption, limits=(0.0, 100.0),
    )  # fmt: skip


def summary(record: Mapping[str, Any]) -> list[str]:
    """What came out on one set, in lines."""
    title = IMAGE_SETS[record["data"]].title
    lines = []
    for arm, one in record["arms"].items():
        top1, top5 = (interval([run[name] for run in one["runs"]]) for name in ("top1", "top5"))
        tried = ", ".join(_tried(rate) for rate in one["grid"]["rates"])
        lost = sum(run["status"] == "diverged" for run in one["runs"])
        said = f"{title}, {WORDS[arm]}: top-1 {top1} %, top-5 {top5} %, at lr {one['lr']:g}"
        lines.append(f"{said}{f', {lost} diverged' if lost else ''}; held out: {tried}")
    for arm in ("no-sa", "no-mlp"):
        drop = interval(list(_drops(record, arm).values()))
        paper = record["paper"].get(arm)
        beside = "" if paper is None else f"; the paper: {-paper:g}"
        lines.append(f"{title}, drop with {WORDS[arm]}: {drop} points{beside}")
    return lines


def _tried(rate: Mapping[str, Any]) -> str:
    return f"{rate['lr']:g} → " + ("diverged" if rate["status"] == "diverged" else f"{rate['top1']:.1f}")


def plan_paper(options: Options) -> list[str]:
    """What the paper's scale would take; nothing is run."""
    config = recipe("vit_tiny", scale="paper")
    per_set = len(ARMS) * (len(GRID["paper"]) + options.seeds)
    images = sum(IMAGE_SETS[name].train_images for name in SETS) * per_set * config.epochs
    flops = 6 * 1.1e9 * images  # forward and backward: 6 per multiplication, 1.1e9 of them in a ViT-Tiny/16 at 224
    days = flops / 1e14 / 86400
    return [
        f"asa-fig1c at paper scale: {len(SETS)} sets × {len(ARMS)} arms × ({len(GRID['paper'])} rates + "
        f"{options.seeds} seeds) = {len(SETS) * per_set} trainings of {config.epochs} epochs at {config.image_size} "
        f"pixels, batch {config.batch_size}, the recipe of DeiT (the paper names none).",
        f"That is {images:.2g} images and {flops:.1g} floating point operations: {days:.1f} days at 100 TFLOP/s, and a "
        "model this small keeps up a fraction of that, with pictures to decode and to vary. Several GPUs for days.",
        "Nothing was run: this scale is out of reach here. wellcond train vit_tiny --scale paper trains one of them.",
    ]
