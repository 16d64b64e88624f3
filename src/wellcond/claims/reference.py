"""report/reference.json: where log κ of the models in our evidence lies, and which advice of a page has a verdict.

    reference(Path("evidence"), {"asa-table2": entry, …})      # written and checked by `wellcond ledger`

It holds log κ by site of the blocks of plain vision transformers (with skips, softmax and ungrayed tokens), after
training and at the random start. The values come from the runs of claims (in float64 where they measured that, else in
float32 unless many samples were at its ceiling) and from models trained by others. Models are kept apart by the shape
of their token matrices, because κ of a matrix depends on how close to square it is.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import quantiles
from typing import Any, NamedTuple

from wellcond.claims.sets import IMAGE_SETS
from wellcond.records import read_json
from wellcond.words import SITES

__all__ = ["ADVICE", "reference"]

ADVICE = {"gray": "asa-table2", "restore_skip": "asa-fig1c", "replace_attention": "sky-table1"}
"""Advice that a page may give (report/advice.py) → the claim that tests it."""
ABOUT = (
    "Where log κ (natural) of models lies: 5 %, 50 % and 95 % of their blocks, by site. Written by `wellcond ledger` "
    "from evidence/; not to be edited."
)
SCALES = ("lab", "paper")
WIDTHS = {"vit_tiny": 192, "vit_small": 384, "vit_base": 768}
NAMES = {"vit_tiny": "ViT-Tiny", "vit_small": "ViT-Small", "vit_base": "ViT-Base"}
TRAINED = {"galileo-nano": ("Galileo-Nano", 144, 128, "satellite images (measured on photographs)")}
"""evidence/trained/NAME.json → its form and data; of others' models only pre-norm ones, as nearly all are."""
CAPPED_MOST = 0.01  # share of samples at float32's ceiling; with more, a mean tells little but the ceiling

Kappas = dict[str, list[float]]  # site → one number per block


class Form(NamedTuple):
    model: str
    tokens: int
    width: int


class Found(NamedTuple):
    """One model: its form, its data set, and log κ at both states."""

    form: Form
    set: str
    trained: Kappas
    untrained: Kappas


def reference(evidence: Path, entries: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of reference.json; `entries` are the ledger's, by id."""
    forms: dict[Form, list[Found]] = {}
    for found in (*_runs(evidence), *_trained(evidence)):
        forms.setdefault(found.form, []).append(found)
    ordered = sorted(forms.items(), key=lambda item: (-len(item[1]), item[0]))
    return {
        "about": ABOUT,
        "models": [
            {
                **form._asdict(),
                "sets": sorted({one.set for one in found}),
                "runs": len(found),
                "trained": _bands([one.trained for one in found]),
                "untrained": _bands([one.untrained for one in found]),
            }
            for form, found in ordered
        ],
        "advice": {
            what: {"claim": id_, "verdict": entries[id_].verdict, "finding": entries[id_].finding}
            for what, id_ in ADVICE.items()
        },
    }


def _bands(models: list[Kappas]) -> dict[str, list[float]]:
    bands = {}
    for site in SITES:
        values = [value for kappas in models for value in kappas.get(site, ())]
        if len(values) > 1:
            cuts = quantiles(values, n=20, method="inclusive")
            bands[site] = [round(cuts[at], 2) for at in (0, 9, 18)]
    return bands


def _runs(evidence: Path) -> Iterator[Found]:
    """Yield models from asa-fig1b's records and from results of runs, which say more: the same run counts once."""
    found: dict[str, Found] = {}
    for scale in SCALES:
        for path in sorted((evidence / "asa-fig1b").glob(f"{scale}-*.json")):
            record = read_json(path)
            for run in record["arms"]["both"]["runs"]:
                if run["status"] == "finished" and run.get("log_kappa"):
                    _, recipe, *_ = run["run"].split("/")
                    size = IMAGE_SETS[record["data"]]
                    form = _form(recipe, {"img_size": size.image_size, "patch_size": size.patch_size})
                    found[f"{scale}/{run['run']}"] = Found(form, size.title, **_in_float32(run["log_kappa"]))
        for path in sorted((evidence / "runs" / scale).glob("*/*/*/seed-*/result.json")):
            run = read_json(path)
            if one := _run(run, path.relative_to(evidence / "runs" / scale).parts[:2]):
                found[f"{scale}/{run['name']}"] = one
    yield from found.values()


def _run(run: Mapping[str, Any], place: tuple[str, ...]) -> Found | None:
    data, recipe = place
    config = run["config"]
    plain = config["task"] == "classify" and not (config["remove_skips"] or config["attention"] or config["gray"])
    if not plain or recipe not in WIDTHS or data not in IMAGE_SETS or run["status"] != "finished":
        return None
    form, title = _form(recipe, config["model_kwargs"]), IMAGE_SETS[data].title
    if config["probe_exact"] == "float64" and run.get("measured"):
        steps = run["measured"]["log_kappa"]
        return Found(form, title, *({site: kappas[at] for site, kappas in steps.items()} for at in (-1, 0)))
    return Found(form, title, **_in_float32(run["log_kappa"])) if run.get("log_kappa") else None


def _form(recipe: str, settings: Mapping[str, Any]) -> Form:
    patches = (settings.get("img_size", 224) // settings.get("patch_size", 16)) ** 2
    return Form(NAMES[recipe], patches + 1, settings.get("embed_dim", WIDTHS[recipe]))


def _in_float32(measured: Mapping[str, Any]) -> dict[str, Kappas]:
    count = measured["images"] * measured["blocks"] * len(measured["trained"])
    states = ("trained", "untrained")
    return {state: measured[state] if measured["capped"][state] <= CAPPED_MOST * count else {} for state in states}


def _trained(evidence: Path) -> Iterator[Found]:
    for name, (model, tokens, width, data) in TRAINED.items():
        path = evidence / "trained" / f"{name}.json"
        if path.exists():
            record = read_json(path)
            rows = [record[f"rows of a float64 copy{of}"] for of in ("", " of the untrained model")]
            yield Found(Form(model, tokens, width), data, *map(_by_site, rows))


def _by_site(rows: list[dict[str, Any]]) -> Kappas:
    found: Kappas = {}
    for row in rows:
        if row["name"] == "log_kappa":
            found.setdefault(row["site"], []).append(row["value"])
    return found
