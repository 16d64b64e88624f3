"""asa-table1: what graying adds to the time of training: with the SVD it takes 6.3 times as long, with the DCT 1.012.

    wellcond reproduce asa-table1 --scale smoke                                    # a small model on a CPU: it runs
    wellcond reproduce asa-table1 --scale lab                                      # one GPU, three minutes

A training step of ViT-B/16 on 256 photographs of 224 pixels, compiled, in bfloat16, with graying (ε = 0.95) before it.
The SVD is torch.linalg.svd, as the algorithm is written. The DCT and its inverse are products with a basis on each
side, compiled, in TF32 and in float32: the paper does not say which, so both are judged. Our own graying is timed
beside them, but not judged. The arms take turns, so that each ratio compares neighbours in time; the interval is over
the rounds. The SVD runs separately, after the others: it keeps the GPU nearly idle for seconds, and in turns, the arm
after it once took less time than a plain step, which is impossible. The paper reports days of training, including the
time to read images.
"""

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from wellcond.bench.graying import STEPS, Changed, grayed_copies, published_grayings, step_times
from wellcond.bench.timing import chosen_device
from wellcond.claims.claim import THE_PAPER, Line, MeasuredOn, Options, Record, TableRow
from wellcond.claims.figures import INK, altair, paper_marks, titled
from wellcond.claims.measurements import images_of
from wellcond.claims.sets import PHOTOGRAPHS, GivenData
from wellcond.models.build import create_model
from wellcond.verdicts import Part, at_least, at_most, undecided, written

__all__ = ["CLAIM", "ratios"]

EPSILON, PATCH, BATCH, ROUNDS = 0.95, 16, 256, 10
SLOW, CHEAP = 3.0, 2.0  # × a plain step; % added to one
TITLES = {
    "plain": "no graying",
    "svd": "SVD, torch.linalg.svd",
    "dct": "DCT, products in TF32",
    "dct float32": "DCT, products in float32",
    "our svd": "SVD, ours",
    "our dct": "DCT, ours",
}
PAPER = {"svd": 6.30, "dct": 1.012, "dct float32": 1.012}  # 4.552 and 0.732 days over 0.723
SMALL = {"depth": 1, "embed_dim": 32, "num_heads": 2}


def measure(options: Options, data: GivenData) -> Mapping[str, Any]:
    smoke = options.scale == "smoke"
    device = chosen_device(options.device)
    if device.type != "cuda" and not smoke:
        raise ValueError("asa-table1 at lab scale times steps of a ViT-B on a GPU, and there is none here")
    images = images_of(options, data, 2 if smoke else BATCH).to(device)
    torch.manual_seed(0)
    model = create_model("vit_base_patch16_224", SMALL if smoke else {}).to(device).train()
    models = [model, *grayed_copies(model, [("svd", EPSILON), ("dct", EPSILON)])]
    plain, *grayed = models if smoke else [cast(nn.Module, torch.compile(one)) for one in models]
    published = published_grayings(images.shape, PATCH, EPSILON, device, compiled=not smoke)
    arms = {name: Changed(change, plain) for name, change in published.items()}
    arms |= dict(zip(("our svd", "our dct"), grayed, strict=True))
    milliseconds: dict[str, list[float]] = {name: [] for name in arms}  # fixes their order
    turns = (([name for name in arms if name != "svd"], STEPS), (["svd"], 1))  # one SVD takes seconds
    with options.steps(len(turns)) as begin:
        for names, steps in turns:
            begin(f"timing {', '.join(TITLES[name] for name in names)}")
            times = step_times(
                images, [arms[name] for name in names], repeats=2 if smoke else ROUNDS, steps=1 if smoke else steps
            )
            milliseconds |= {name: [round(ms, 4) for ms in one] for name, one in zip(names, times, strict=True)}
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return {"device": named, "batch": len(images), "epsilon": EPSILON, "ms": milliseconds, "paper": PAPER}


def ratios(record: Record, arm: str) -> list[float]:
    """Return the time of a step with this graying over that of a plain one, round by round."""
    return [mine / plain for mine, plain in zip(record["ms"][arm], record["ms"]["plain"], strict=True)]


def judge(records: Mapping[str, Record]) -> Iterable[Part]:
    for record in records.values():
        slow = ratios(record, "svd")
        parts = [at_least(f"{TITLES['svd']}: at least {SLOW:g} × a plain step", slow, SLOW, unit=" ×", of="rounds")]
        for arm in ("dct", "dct float32"):
            added = [100 * (ratio - 1) for ratio in ratios(record, arm)]
            name = f"{TITLES[arm]}: adds at most {CHEAP:g} % to a plain step"
            parts.append(at_most(name, added, CHEAP, unit=" %", of="rounds"))
        yield from (undecided(part, "a CPU was timed") if record["device"] == "cpu" else part for part in parts)


def says(records: Mapping[str, Record]) -> str:
    (record,) = records.values()
    times = {arm: median(ratios(record, arm)) for arm in TITLES if arm != "plain"}
    added = {arm: f"{written(100 * (ratio - 1))} %" for arm, ratio in times.items()}
    return (
        f"SVD graying by torch.linalg.svd makes a training step of ViT-B/16 {times['svd']:.3g} times as long; DCT "
        f"graying adds {added['dct']} in TF32 and {added['dct float32']} in float32; our own versions add "
        f"{added['our svd']} (SVD) and {added['our dct']} (DCT)."
    )


def summary(record: Record) -> Iterable[Line]:
    plain = record["ms"]["plain"]
    yield (
        f": a plain step of ViT-B/16, batch {record['batch']}, takes {median(plain):.4g} ms ({min(plain):.4g} to "
        f"{max(plain):.4g}) on {record['device']}"
    )
    for arm, title in list(TITLES.items())[1:]:
        found = ratios(record, arm)
        paper, spread = record["paper"].get(arm), f"{min(found):.4g} to {max(found):.4g}"
        cells = {"× a plain step, the median": f"{median(found):.4g}", f"in {len(found)} rounds": spread}
        yield TableRow(f", {title}", {**cells, THE_PAPER: f"{paper:g}" if paper else ""})
    svd = median(record["ms"]["svd"]) - median(plain)
    yield (
        f": the SVD takes {svd:,.0f} ms of its own, whatever the step; one of {svd / (PAPER['svd'] - 1):.0f} ms would "
        f"become {PAPER['svd']:g} times as long, as in the paper, which times a whole training on an unnamed machine"
    )


def figure(records: Sequence[Record]) -> Any:
    """Plot the ratios, with the paper's ratios of days of training."""
    alt, record = altair(), records[0]
    rows = [
        {"arm": title, "ratio": ratio, "paper": record["paper"].get(arm)}
        for arm, title in list(TITLES.items())[1:]
        for ratio in ratios(record, arm)
    ]
    axis = alt.Axis(minExtent=160)  # room for fonts wider than the one used for the layout
    base = alt.Chart(alt.Data(values=rows)).encode(y=alt.Y("arm:N", sort=list(TITLES.values()), title=None, axis=axis))
    x = alt.X(
        "ratio:Q",
        title="time of a training step, over one without graying",
        scale=alt.Scale(type="log", nice=False, padding=14),
    )
    points = base.mark_tick(thickness=2, size=22).encode(x=x)
    labels = base.mark_text(dy=-18, fontSize=11, color=INK).encode(
        x=alt.X("median(ratio):Q"), text=alt.Text("median(ratio):Q", format=".4~g")
    )
    paper = paper_marks(base, "the paper, of days of training", x=True)
    chart = alt.layer(points, labels, paper).properties(width=560, height=260)
    caption = (
        f"ViT-B/16, batch {record['batch']}, {record['device']}, at {record['scale']} scale: a tick for each round, "
        "the median written above."
    )
    return titled(chart, "How long a training step takes with graying", caption)


CLAIM = MeasuredOn(
    id="asa-table1",
    claim="SVD graying makes training 6.3 times as long, DCT graying 1.012 times",
    test="ViT-B step, batch 256, bf16",
    holds_if="SVD by `torch.linalg.svd` ≥ 3 ×, DCT ≤ 1.02 × a plain step, in TF32 and in float32; ours beside",
    sets=(PHOTOGRAPHS.name,),
    seconds=240.0,
    paper_scale="three trainings of ViT-B on ImageNet-1K, .7 to 4.6 days each on the paper's machine, which it does "
    "not name; a step of one is the lab scale",
    measure=measure,
    judge=judge,
    says=says,
    summary=summary,
    figure=figure,
)
