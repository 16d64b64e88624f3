"""What asa-fig7 and asa-fig8 share, which differ only in the graying: the spectra of an attention's Jacobian.

    CLAIM = spectra_claim("asa-fig7", "svd", epsilons=(1.0, 0.9, 0.7, 0.5))

Each spectrum is that of the first block's attention at its random start. Weights and image are the same for every ε, so
only the graying changes. At 64 tokens, 32 wide (Tiny-ImageNet), all singular values are computed; at 197 tokens, in
ViT-Tiny's own width (Imagenette), the largest, and the distribution of the others by a random probe. The claim asks
whether each step down in ε improves the conditioning. With all values known, log κ decides. A probe cannot tell small
values apart and so gives no κ; it is judged by how far the upper decile lies below the largest value. This measure was
chosen after looking at one image and start, where the upper hundredth rose, and at the digits, where the root mean
square hardly moved. Therefore all of them are reported, and the verdict uses other weights.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch

from wellcond.bench.timing import chosen_device
from wellcond.claims.claim import Line, MeasuredOn, Options, Record, TableRow, rounded
from wellcond.claims.figures import altair, arm_color, from_to, titled
from wellcond.claims.jacobians import KINDS, SHORT, Half, halves, image_for, small_vit
from wellcond.claims.sets import GivenData, ImageSet
from wellcond.models.build import create_model
from wellcond.models.surgery import gray, ungray
from wellcond.verdicts import CONFIDENCE, Part, at_least, listed

__all__ = ["exact_row", "probed_row", "spectra_claim"]

EXACT_SEEDS = 5
EXACT_UP_TO = 64  # tokens
POINTS = 33  # of a curve
PROBES, STEPS = 1, {"skip": 64, "bare": 384, "params": 640}  # enough steps that the upper decile no longer moved
FIRST_SEED = 100  # the first seed of the weights
MEASURES = {
    "log κ": "log κ",
    "median": "ln of the largest singular value over the median",
    "tenth": "ln of the largest singular value over the upper decile",
    "hundredth": "ln of the largest singular value over the upper hundredth",
    "rms": "ln of the largest singular value over the root mean square",
}


def measure(method: str, epsilons: Sequence[float], options: Options, data: GivenData) -> Mapping[str, Any]:
    set_ = data.set
    assert isinstance(set_, ImageSet)
    exact = (set_.image_size // set_.patch_size) ** 2 <= EXACT_UP_TO
    device = "cpu" if exact else chosen_device(options.device)
    seeds = options.seeds if options.scale == "smoke" or not exact else max(EXACT_SEEDS, options.seeds)
    known = options.known.get("rows", {})
    size = small_vit(*((8, 2) if options.scale == "smoke" else (32, 2))) if exact else {}
    size |= {"img_size": set_.image_size, "patch_size": set_.patch_size, "depth": 1, "num_classes": 10}
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {
        kind: {e: list(known.get(kind, {}).get(e, [])) for e in (f"{epsilon:g}" for epsilon in epsilons)}
        for kind in KINDS
    }
    shape = {name: options.known[name] for name in ("tokens", "width") if name in options.known}
    first = min(len(found) for by_epsilon in rows.values() for found in by_epsilon.values())
    earlier = {"earlier": made_earlier(options.known, first)} if first else {}
    found: dict[str, Any] = {"graying": method, "exact": exact, **shape, "rows": rows, **earlier}
    with options.steps((seeds - first) * len(epsilons)) as begin:
        for seed in range(first, seeds):
            image = image_for(options, data, seed).to(device)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(FIRST_SEED + seed)
                model = create_model("vit_tiny_patch16_224", {**size, "in_chans": image.shape[1]}).double().to(device)
            for epsilon in epsilons:
                begin(f"{set_.title}, {method}, seed {seed}, ε {epsilon:g}")
                ungray(model)
                if epsilon < 1:
                    gray(model, method, epsilon=epsilon)
                half = halves(model, image)[0]
                shape = {"tokens": half.tokens.shape[1], "width": half.tokens.shape[2]}
                for kind in KINDS:
                    rows[kind][f"{epsilon:g}"].append((exact_row if exact else probed_row)(half, kind))
            found = {"graying": method, "exact": exact, **shape, "rows": rows, **earlier}
            if seed + 1 < seeds:
                options.keep({**found, "seeds": seed + 1})
    return found


def made_earlier(known: Record, seeds: int) -> list[dict[str, Any]]:
    """Return where the rows of the first seeds come from: an earlier command than the one that writes the record."""
    environment = known["environment"]
    made = {name: environment[name] for name in ("command", "device", "commit", "date")}
    return [*known.get("earlier", []), {"seeds": seeds, **made}]


def exact_row(half: Half, kind: str) -> dict[str, Any]:
    """Return log κ, how far some quantiles and the root mean square lie below the largest value (ln), and a curve."""
    found = half.spectrum(kind)
    assert found.values is not None
    values = found.values.flatten()
    below = (values[0] / values.clamp_min(torch.finfo(values.dtype).tiny)).log()
    return {
        "log κ": rounded(found.log_kappa.flatten()[0]),
        "capped": found.status_names()[0] == "ceiling",
        "median": rounded(below.quantile(0.5)),
        "tenth": rounded(below.quantile(0.1)),
        "hundredth": rounded(below.quantile(0.01)),
        "rms": rounded((values[0] / values.square().mean().sqrt()).log()),
        "curve": [rounded(value) for value in below.quantile(torch.linspace(0, 1, POINTS).to(below))],
    }


def probed_row(half: Half, kind: str, steps: Mapping[str, int] = STEPS) -> dict[str, Any]:
    """Return the same as `exact_row` except κ and the median: for the smallest value only an upper bound is known."""
    found = half.spectrum(kind, method="density", probes=PROBES, steps=steps[kind])
    assert found.density is not None
    values = found.density.quantile(torch.linspace(1, 0, POINTS)).flatten().clamp_min(1e-300)
    tenth, hundredth = found.density.quantile(torch.tensor([0.9, 0.99])).flatten()
    rms = (found.density.frobenius_squared()[0].flatten()[0] / found.density.count).sqrt()
    largest = found.largest.flatten()[0]
    return {
        "log κ at least": rounded(found.log_kappa.flatten()[0]),
        "tenth": rounded((largest / tenth).log()),
        "hundredth": rounded((largest / hundredth).log()),
        "rms": rounded((largest / rms).log()),
        "curve": [rounded(value) for value in (largest / values).log().clamp_min(0)],
    }


def judge(records: Mapping[str, Record]) -> Iterable[Part]:
    for record in records.values():
        for kind, title in KINDS.items():
            name = "log κ" if record["exact"] else "tenth"
            yield falls(f"{record['tokens']} tokens, {title}: {MEASURES[name]} falls with ε", record, kind, name)


def falls(asked: str, record: Record, kind: str, name: str) -> Part:
    """Judge whether each step down in ε lowers a measure, in % of its value without graying; return the worst step."""
    values = {epsilon: [row[name] for row in rows] for epsilon, rows in record["rows"][kind].items()}
    plain = next(iter(values.values()))
    parts = []
    for more, less in pairwise(values):
        steps = [100 * (a - b) / abs(p) for a, b, p in zip(values[more], values[less], plain, strict=True)]
        confidence = record.get("confidence", CONFIDENCE)
        parts.append(at_least(f"{asked}, from {more} to {less}", steps, 0.0, unit=" %", confidence=confidence))
    rank = {"holds": 2, "undecided": 1}
    return min(parts, key=lambda part: (rank.get(part.outcome, 0), part.found.mean if part.found else 0.0))


def says(records: Mapping[str, Record]) -> str:
    found: dict[str, dict[str, list[str]]] = {"holds": {}, "does not hold": {}, "undecided": {}}
    for record in records.values():
        for kind, title in SHORT.items():
            outcome = falls("", record, kind, "log κ" if record["exact"] else "tenth").outcome
            found[outcome].setdefault(title, []).append(f"{record['tokens']} tokens")

    def at(sizes: Sequence[str]) -> str:
        return f" (at {listed(sizes)})" if len(sizes) < len(records) else ""

    graying = next(iter(records.values()))["graying"].upper()
    words = {"holds": "this is so", "does not hold": "it is not so", "undecided": "it is undecided"}
    said = "; ".join(
        f"{words[outcome]} {listed(title + at(sizes) for title, sizes in kinds.items())}"
        for outcome, kinds in found.items()
        if kinds
    )
    lead = "The lower" if found["holds"] else "Not shown: the lower"
    return f"{lead} ε of {graying} graying, the better conditioned is an untrained attention's Jacobian: {said}."


def summary(record: Record) -> Iterable[Line]:
    for kind, title in KINDS.items():
        for name in MEASURES if record["exact"] else ("tenth", "hundredth", "rms"):
            means = {f"ε {e}": f"{fmean(row[name] for row in rows):.3g}" for e, rows in record["rows"][kind].items()}
            capped = sum(row.get("capped", False) for rows in record["rows"][kind].values() for row in rows)
            beyond = f" ({capped} beyond float64, counted as its ceiling)" if capped and name == "log κ" else ""
            what = f", {record['tokens']} tokens, {title}: {MEASURES[name]}{beyond}"
            yield TableRow(what, means, "Means over the seeds")
    if not record["exact"]:
        yield (
            f", {record['tokens']} tokens: the upper decile is judged. It was chosen after a look at one image and "
            "start, where the upper hundredth rose; that one is told above with the others"
        )


def figure(records: Sequence[Record]) -> Any:
    """Plot the spectra, a line for each ε, as in the paper, which has no numbers."""
    alt, rows = altair(), []
    for record in records:
        for kind, title in KINDS.items():
            for epsilon, found in record["rows"][kind].items():
                for at, values in enumerate(zip(*(row["curve"] for row in found), strict=True)):
                    share, size = 100 * at / (POINTS - 1), f"{record['tokens']} tokens"
                    row = {"share": share, "log": -fmean(values), "ε": epsilon, "kind": title, "tokens": size}
                    rows.append(row)
    epsilons = list(records[0]["rows"]["params"])
    lines = alt.Chart(alt.Data(values=rows)).mark_line(strokeWidth=2).encode(
        x=alt.X("share:Q", title="% of the singular values, the largest first"),
        y=alt.Y("log:Q", title="ln σ / σmax"),
        color=arm_color(epsilons, field="ε", title="ε"),
    ).properties(width=230, height=200)  # fmt: skip
    chart = lines.facet(
        column=alt.Column("kind:N", sort=list(KINDS.values()), title=None),
        row=alt.Row("tokens:N", sort=[f"{record['tokens']} tokens" for record in records], title=None),
    ).resolve_scale(y="independent")
    seeds = from_to(len(record["rows"]["params"][epsilons[0]]) for record in records)
    caption = (
        f"The first attention of a ViT at its random start, {records[0]['graying'].upper()} graying, means over "
        f"{seeds} seeds, at {records[0]['scale']} scale; at 197 tokens from a random probe, coarse where values are "
        "small. The paper shows curves, and no numbers: lower ε, flatter."
    )
    return titled(chart, "Singular values of an attention's Jacobian, by ε of the graying (1: none)", caption)


def spectra_claim(id_: str, method: str, epsilons: Sequence[float]) -> MeasuredOn:
    return MeasuredOn(
        id=id_,
        claim=f"the lower ε of {method.upper()} graying, the better conditioned the Jacobian of an attention block",
        test=f"exact spectrum at 64 tokens of an attention that is 32 wide, {EXACT_SEEDS} seeds; extreme values and "
        "density at 197; by input with and without the skip, and by parameters",
        holds_if="monotone in ε",
        sets=("tiny-imagenet", "imagenette"),
        seconds=150.0,
        second_look=lambda record: not record["exact"],  # exact records have more seeds from the start
        paper_scale="the paper does not say of which model, tokens and images its spectra are; one attention of a "
        "ViT-Tiny is the lab scale",
        measure=partial(measure, method, epsilons),
        judge=judge,
        says=says,
        summary=summary,
        figure=figure,
    )
