"""The page of runs: how their training went, and how well-conditioned their blocks were.

    page = run_page([Shown(name="my run", train=run.train, validation=run.validation, probe=run.probe)])
    page = conditioning_page({"vit_tiny": probe.rows()}, title="ViT-Tiny, untrained")      # the rows of probes alone
    page.write("report.html")

One run: its last numbers, what happened, losses and κ over training, what to look at first, log κ by block and site
with a slider over steps, spectra, attention. Several: the same charts with one line per run, and where they differ, the
worst change first. A run may have a training, a probe or both; what it has not is left out, and the page says so.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from wellcond.environment import own_version

from .advice import BlockState, advise, advise_run, first_failure
from .axes import format_number
from .by_block import block_section
from .comparing import compare, differences, largest_rise, share_at_ceiling, summary
from .markup import Html, tag
from .page import Page, bullets, code_block, note, paragraph, section, side_by_side, table, tiles
from .readings import SITE_WORDS, Readings, bounded
from .reference import Band
from .spectra import attention, spectra
from .training import RUNS_MOST, Points, Shown, kappa_charts, metric_name, training_charts

__all__ = ["conditioning_page", "run_page"]

ADVISED_MOST, SHOWN_LEAST = 12, 3  # rows of the table of what to do
SENTENCES_MOST = 2  # in one row
EVENTS_MOST = 12  # of one run; metrics.jsonl has all
TRAINING_LEAD = "How the training went, from the rows of metrics.jsonl."
KAPPA_LEAD = (
    "κ = σmax/σmin of each sample's token matrix; log κ is its natural logarithm, averaged over samples. Large means "
    "that some directions among the tokens have almost vanished, and training has a hard time with them."
)


def conditioning_page(runs: Mapping[str, Iterable[Mapping[str, Any]]], **options: Any) -> Page:
    """The page of what probes measured: the rows of each, by the name of its run. Options and errors of `run_page`."""
    return run_page([Shown(name=name, probe=rows) for name, rows in runs.items()], **options)


def run_page(
    runs: Sequence[Shown],
    *,
    title: str = "",
    notes: Iterable[str] = (),
    warning: str = "",
    reference: Mapping[str, Mapping[str, Band]] | None = None,
) -> Page:
    """The page of one or several runs.

    Args:
        runs: the first that has a probe is what the κ of others is compared with.
        title: by default the model, or the number of runs.
        notes: sentences to show above everything else, such as what could not be read.
        warning: what a reader has to know before any number.
        reference: where log κ of models lies, by their name and by site, for the means of one run.

    Raises ValueError for no runs, and for a probe without rows or without condition numbers.
    """
    if not runs:
        raise ValueError("there are no runs to draw; give at least one, with the rows of its probe")
    # Those with a probe first, so that a run has the same place, and colour, in every chart.
    runs = sorted(runs, key=lambda run: run.probe is None)
    measured = [Readings.of(run.name, run.probe) for run in runs if run.probe is not None]
    logged = any(run.logged for run in runs)
    lead = [TRAINING_LEAD] * logged + [KAPPA_LEAD] * bool(measured)
    page = Page(title or _title(runs, logged), " ".join(lead), footer=[_written()])
    notes = [*notes, *(text for run in measured for text in run.notes)]
    if len(runs) > RUNS_MOST:
        notes.append(f"The charts show the first {RUNS_MOST} of {len(runs)} runs; the tables have all.")
    drawn = measured[:RUNS_MOST]
    if warning:
        page.add(note("Before you read on", paragraph(warning)))
    if blind := [run for run in measured if run.only_ceilings]:
        page.add(note("Nothing but ceilings", paragraph(_blind(blind))))
    if items := [
        *(_training_tiles(runs[0]) if len(runs) == 1 else ()),
        *(_kappa_tiles(measured, reference or {}) if measured else ()),
    ]:
        page.add(tiles(*items))
    if notes:
        page.add(note("Please note", bullets(*notes)))
    if events := _events(runs):
        page.add(note("What happened", bullets(*events)))
    if len(runs) > 1:
        page.add(section("The runs", *_tables(runs, measured)))
    last = max(0, *(run.last_step for run in runs), *(run.steps[-1] for run in measured))
    if charts := [*training_charts(runs[:RUNS_MOST], last=last), *kappa_charts(drawn, last=last)]:
        page.add(section("Over training", side_by_side(*charts)))
    elif logged:
        page.add(section("Over training", "No step has been logged."))
    if not measured:
        page.add(_how_to_probe(runs[0]))
        return page
    if len(measured) > 1:
        page.add(section("Differences", *differences(measured)))
    page.add(_first_section(measured), block_section(drawn))
    for heading, charts in (("Singular values", spectra(drawn)), ("Attention", attention(drawn))):
        if charts:
            page.add(section(heading, side_by_side(*charts)))
    page.add(_words_section(measured))
    return page


def _title(runs: Sequence[Shown], logged: bool) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared" if logged else f"Conditioning of {len(runs)} runs"
    run = runs[0]
    return f"{'Training' if logged else 'Conditioning'} of {run.model or run.name}"


def _written() -> str:
    return f"Written by wellcond {own_version()} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."


# ---- how the training went


def _training_tiles(run: Shown) -> list[tuple[str, str, str]]:
    """The last step, the losses and the accuracy, each with the best there was."""
    found = [("steps", f"{run.last_step:,}", "the last with a row")] if run.logged else []
    for name, points, best in (
        ("training loss", run.trained("loss"), min),
        (metric_name("loss"), run.metric("loss"), min),
        (metric_name("top1"), run.metric("top1"), max),
    ):
        if points:
            finite = [(value, step) for step, value in points if math.isfinite(value)]
            value, at = best(finite, default=(math.nan, 0))
            about = f"at step {points[-1][0]:,}; the best was {_value(name, value)}, at {at:,}" if finite else ""
            found.append((name, _value(name, points[-1][1]), about))
    return found


def _value(name: str, value: float) -> str:
    """A number of a training, by what it is called on the page."""
    if not math.isfinite(value):
        return format_number(value, 4)
    return f"{value:.1%}" if name.startswith("top-") else f"{value:#.4g}".removesuffix(".")


def _events(runs: Sequence[Shown]) -> list[str]:
    """What happened to the runs, in words, each in its order."""
    found = []
    for run in runs:
        who = f"{run.name}, step" if len(runs) > 1 else "Step"
        found += [f"{who} {event.step:,}: {event.event}" for event in run.events[:EVENTS_MOST]]
        if len(run.events) > EVENTS_MOST:
            found.append(f"{run.name}: {len(run.events) - EVENTS_MOST} more; metrics.jsonl has all.")
    return found


def _tables(runs: Sequence[Shown], measured: Sequence[Readings]) -> list[Html]:
    """Losses and accuracies of the runs that were trained, κ of those that were measured."""
    models = {run.name: run.model for run in runs}
    parts = [_training_table([run for run in runs if run.logged])] if any(run.logged for run in runs) else []
    if measured:
        parts.append(summary(measured, models))
    return parts


def _training_table(runs: Sequence[Shown]) -> Html:
    names = list(dict.fromkeys(name for run in runs for row in run.validation for name in row.metrics))
    with_models = any(run.model for run in runs)
    header = ["run", *(["model"] if with_models else []), "step", "training loss", *map(metric_name, names)]

    def last(name: str, points: Points) -> str:
        return _value(name, points[-1][1]) if points else "–"

    rows = []
    for run in runs:
        losses = [last("training loss", run.trained("loss")), *(last(metric_name(n), run.metric(n)) for n in names)]
        rows.append([run.name, *([run.model] if with_models else []), f"{run.last_step:,}", *losses])
    caption = "The last of each: a step's loss in training, and the last validation."
    return table(header, rows, numeric=set(range(2 if with_models else 1, len(header))), caption=caption)


def _how_to_probe(run: Shown) -> Html:
    """How to switch the probe on: in another folder, since it is another configuration."""
    return section(
        "Condition numbers",
        "Trained without a probe: nothing is known of how well-conditioned the blocks were. With probe_every the same "
        "command measures them as it trains, and its page shows them, block by block:",
        code_block(f"wellcond train {run.recipe or 'RECIPE'} … --set probe_every=100 --output runs/{run.name}-probed"),
    )


# ---- what the probes measured


def _blind(runs: Sequence[Readings]) -> str:
    dtypes = sorted({cell.dtype for run in runs for (name, *_), cell in run.cells.items() if name == "log_kappa"})
    return (
        f"Every number of {', '.join(run.run for run in runs)} is the ceiling of its dtype ({', '.join(dtypes)}): κ is "
        "larger, by how much is not known, and no curve below shows what the model did. Measure again in a pass of its "
        'own: Probe(model), which computes in float32, or Probe(model, exact="float64"); in wellcond train '
        "probe_exact=float64."
    )


def _states(run: Readings) -> list[BlockState]:
    """The blocks at the last step, worst first; one without a number is worse than any."""
    began = first_failure(run)
    states = [BlockState.of(run, run.steps[-1], position, began) for position in range(len(run.blocks))]
    return sorted((s for s in states if s.cells), key=_rank, reverse=True)


def _rank(state: BlockState) -> float:
    return state.worst if math.isfinite(state.worst) else math.inf


def _number(state: BlockState) -> str:
    """log κ of a block where it is worst, with the mark of a lower bound."""
    if not math.isfinite(state.worst):
        return "all zero" if state.cells[state.worst_site].status == "zero" else "NaN"
    return bounded(state.worst, state.lower_bound(state.worst_site))


def _kappa_tiles(runs: Sequence[Readings], reference: Mapping[str, Mapping[str, Band]]) -> list[tuple[str, str, str]]:
    worst = [(states[0], run) for run in runs if (states := _states(run))]
    items, last = [], runs[0].steps[-1]
    if worst:
        state, run = max(worst, key=lambda pair: _rank(pair[0]))
        of = f", {run.run}" if len(runs) > 1 else ""
        items.append(("worst block", state.block, f"at {state.worst_site}, step {run.steps[-1]:,}{of}"))
        kappa = format_number(float(f"{math.exp(state.worst):.2g}"), 2) if 0 <= state.worst < 500 else ""
        about = "at least" if state.lower_bound(state.worst_site) else "about"
        items.append(("its log κ", _number(state), f"κ {about} {kappa}" if kappa else "see below"))
    if len(runs) == 1:
        run = runs[0]
        share, counted = share_at_ceiling(run, last)
        items.append(("at the ceiling", share, f"{counted}: κ beyond what their dtype can see"))
        items += [_site_tile(run, site, reference) for site in run.sites]
    else:
        if found := largest_rise(compare(runs)):
            rise, certain = found
            what = f"largest {'' if certain else 'known '}rise from {runs[0].run}"
            items.append((what, str(rise), f"{rise.run}: {rise.block} {rise.site}"))
    if not worst:  # nothing but what comes before the blocks
        for site in runs[0].outside:
            at = last, "", site
            number = bounded(runs[0].value("log_kappa", *at), runs[0].lower_bound(*at))
            items.append((f"log κ at {site}", number, SITE_WORDS[site]))
    return items


def _site_tile(run: Readings, site: str, reference: Mapping[str, Mapping[str, Band]]) -> tuple[str, str, str]:
    mean = run.mean_over_blocks(run.steps[-1], site)
    if mean is None:  # not at the last step
        return f"mean log κ at {site}", "–", SITE_WORDS[site]
    text = SITE_WORDS[site]
    if mean.blocks > 1 and mean.left_out < mean.blocks:
        count = f"{mean.blocks - mean.left_out} of {mean.blocks}" if mean.left_out else f"{mean.blocks}"
        text = f"{count} blocks, {bounded(*mean.least)} to {bounded(*mean.most)}"
    text = "; ".join([text, *(f"{who} {bands[site]}" for who, bands in reference.items() if site in bands)])
    return f"mean log κ at {site}", bounded(mean.value, mean.lower_bound), text


def _first_section(runs: Sequence[Readings]) -> Html:
    """What concerns whole runs, then the worst blocks with one or two sentences each."""
    general = [
        f"{run.run}: {text}" if len(runs) > 1 else text for run in runs for text in advise_run(run, run.steps[-1])
    ]
    groups: dict[tuple[str, str], list[BlockState]] = {}
    for run in runs:
        for position, state in enumerate(_states(run)):
            said = " ".join(advise(state)[:SENTENCES_MOST])
            if said:
                groups.setdefault((run.run, said), []).append(state)
            elif position < SHOWN_LEAST and len(runs) == 1:
                groups[run.run, f"–{position}"] = [state]
    ordered = sorted(groups.items(), key=lambda item: (item[0][1][0] != "–", _rank(item[1][0])), reverse=True)
    parts: list[Any] = [note("For the whole run", bullets(*general))] if general else []
    if all(said.startswith("–") for _, said in groups):
        parts.append("None of the rules found anything to do in a block.")
    if ordered:
        parts.append(_advice_table(ordered[:ADVISED_MOST], several=len(runs) > 1, left_out=len(ordered) - ADVISED_MOST))
    return section("Worst blocks first", *parts)


def _advice_table(groups: Sequence[tuple[tuple[str, str], list[BlockState]]], *, several: bool, left_out: int) -> Html:
    """Blocks of which the same is to be said share a row, with the numbers of the worst of them."""
    rows = []
    for (run, said), states in groups:
        first = states[0]
        more = tag("span", f" and {len(states) - 1} more", title=", ".join(state.block for state in states))
        name = [first.block, more if len(states) > 1 else None]
        cells = [name, first.worst_site, _number(first), "–" if said.startswith("–") else said]
        rows.append([run, *cells] if several else cells)
    more = f" {left_out} more rows are left out." if left_out > 0 else ""
    caption = (
        f"At the last step, each block where it is worst.{more} The sentences are rules of thumb: a log κ of 10 or "
        "more after an add, a logit of 50 or more, and the like. They name what may help, not what will."
    )
    start = 1 if several else 0
    header = [*(["run"] if several else []), "block", "worst at", "log κ", "what to do"]
    return table(header, rows, numeric={start + 2}, prose={start + 3}, caption=caption)


def _words_section(runs: Sequence[Readings]) -> Html:
    sites = {site for run in runs for site in (*run.sites, *run.outside)}
    dtypes = sorted({cell.dtype for run in runs for cell in run.cells.values()})
    items = [[tag("code", site), f": {text}"] for site, text in SITE_WORDS.items() if site in sites]
    return section(
        "Words",
        bullets(*items),
        paragraph(
            f"Measured on {', '.join(dtypes)} tensors. A κ above 1/eps of the tensor's dtype cannot be seen, and "
            "counts as that ceiling (15.9 in log scale for float32). The attention's output is ill-conditioned in "
            "healthy models too, untrained ones included; what counts is what the skip leaves of it."
        ),
    )
