"""The page of runs: how their training went, and how well-conditioned their blocks were.

    page = run_page([Shown(name="my run", train=run.train, validation=run.validation, probe=run.probe)])
    page = conditioning_page({"vit_tiny": probe.rows()}, title="ViT-Tiny, untrained")      # only rows of probes
    page.write("report.html")

The title states what was found. Below it: log κ by block and site with a slider over steps, the last numbers, what
happened, what to look at first, losses and κ over training, spectra, attention. For several runs: the same charts with
a line per run, and where they differ, worst change first. A run may have training rows, a probe or both; what it lacks
is left out, and the page says so.
"""

import itertools
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from wellcond.environment import own_version
from wellcond.records import Event

from .advice import DIVERGED, BlockState, advise, advise_run, first_failure
from .charts import Shaded, grid
from .comparing import compare, differences, largest_rise, share_at_ceiling, summary
from .markup import Html, format_number, tag
from .page import Page, bullets, code_block, note, paragraph, section, slider, table, tiles
from .readings import SITE_WORDS, Readings, bounded
from .reference import Band
from .run_charts import (
    BY_BLOCK,
    HEAT_MAPS_MOST,
    MAP,
    RUNS_MOST,
    Points,
    Shown,
    attention,
    by_block,
    heat_maps,
    kappa_charts,
    metric_name,
    shown_steps,
    spectra,
    start_of,
    training_charts,
)

__all__ = ["conditioning_page", "run_page"]

ADVISED_MOST, SHOWN_LEAST = 12, 3  # rows of the advice table
SENTENCES_MOST = 2  # per row
BESIDE_MOST = 16  # heat maps with at most this many blocks fit side by side
EVENTS_MOST = 12  # lines per run, but for divergences and rollbacks, which are all shown; metrics.jsonl has all
TURNING = DIVERGED, "back to step"  # how the events begin that decide about a run
KAPPA = (
    "κ = σmax/σmin of each sample's token matrix; log κ is its natural logarithm, averaged over samples. A large "
    "value means that some directions among the tokens have almost vanished, which may make training harder."
)
SITE_NAMES = {
    "in": "attention input", "sa": "attention output", "+sa": "stream after attention", "mlp": "MLP output",
    "+mlp": "output", "tokens": "raw patches", "embed": "embedded tokens",
}  # fmt: skip


def conditioning_page(runs: Mapping[str, Iterable[Mapping[str, Any]]], **options: Any) -> Page:
    """Return the page of what probes measured: rows by the name of the run. Options and errors are `run_page`'s."""
    return run_page([Shown(name=name, probe=rows) for name, rows in runs.items()], **options)


def run_page(
    runs: Sequence[Shown],
    *,
    title: str = "",
    notes: Iterable[str] = (),
    warning: str = "",
    reference: Mapping[str, Mapping[str, Band]] | None = None,
) -> Page:
    """Return the page of one or several runs.

    Args:
        runs: the κ of the others is compared with the first that has a probe.
        title: what the page is about, by default the model, or the number of runs; its heading is what was found.
        notes: sentences for a box below the first numbers, such as what could not be read.
        warning: what readers have to know before any number.
        reference: where log κ of models lies, by name and site: the first is shaded in the charts, and all are given
            beside the means of a single run.

    Raises ValueError if there are no runs, and for a probe without rows or without condition numbers.
    """
    if not runs:
        raise ValueError("there are no runs to draw; give at least one, with the rows of its probe")
    # Runs with a probe first, so that each run has the same place and colour in every chart.
    runs = sorted(runs, key=lambda run: run.probe is None)
    measured = [Readings.of(run.name, run.probe) for run in runs if run.probe is not None]
    logged = any(run.logged for run in runs)
    found, sentence, card = _finding(runs, measured)
    page = Page(found, sentence, about=title or _subject(runs, logged), card=card, footer=[_written()])
    notes = [*notes, *(text for run in measured for text in run.notes)]
    if len(runs) > RUNS_MOST:
        notes.append(f"The charts show the first {RUNS_MOST} of {len(runs)} runs; the tables list them all.")
    drawn = measured[:RUNS_MOST]
    if warning:
        page.add(note("Before you read on", paragraph(warning)))
    if blind := [run for run in measured if run.only_ceilings]:
        page.add(note("Only lower bounds", paragraph(_blind(blind))))
    steps = shown_steps(drawn) if drawn else []
    if maps := heat_maps(drawn, steps):
        page.add(section("By block and site", *_map_section(drawn, maps, steps, reference or {})))
    if items := [
        *(_training_tiles(runs[0]) if len(runs) == 1 else ()),
        *(_kappa_tiles(measured, reference or {}) if measured else ()),
    ]:
        page.add(tiles(*items))
    if notes:
        page.add(note("Please note", bullets(*notes)))
    if events := _events(runs):
        page.add(note("What happened", bullets(*events)))
    if general := _general(runs, measured):
        page.add(note("For the whole run", bullets(*general)))
    if measured:
        page.add(_first_section(measured))
    if len(runs) > 1:
        page.add(section("The runs", *_tables(runs, measured)))
    if len(measured) > 1:
        page.add(section("Differences", *differences(measured)))
    last = max(0, *(run.last_step for run in runs), *(run.steps[-1] for run in measured))
    over = [
        charts for charts in (training_charts(runs[:RUNS_MOST], last=last), kappa_charts(drawn, last=last)) if charts
    ]
    if over:
        page.add(section("Over training", *(grid(*charts) for charts in over)))
    elif logged:
        page.add(section("Over training", "No step has been logged."))
    if not measured:
        page.add(_how_to_probe(runs[0]))
        return page
    for heading, charts in (("Singular values", spectra(drawn)), ("Attention", attention(drawn))):
        if charts:
            page.add(section(heading, grid(*charts)))
    page.add(_words_section(measured))
    return page


def _map_section(
    drawn: Sequence[Readings], maps: Sequence[Any], steps: Sequence[int], reference: Mapping[str, Mapping[str, Band]]
) -> list[Any]:
    """Return the heat maps, their slider, and the same numbers as lines, with the first of `reference` shaded."""
    name, spans = next(iter(reference.items()), ("", {}))
    bands = {
        site: Shaded(span.low, span.high, f"the middle 90 % of the blocks of {name}") for site, span in spans.items()
    }
    beside = len(maps) > 1 and max(len(run.blocks) for run in drawn) <= BESIDE_MOST
    shown = [grid(*maps)] if beside else maps
    start = start_of(drawn, steps)
    parts: list[Any] = [slider("step", steps, "step", at=start), *shown, grid(*by_block(drawn, steps, bands))]
    if len(steps) > 1:
        text = f"The slider goes from step {steps[0]:,} to {steps[-1]:,}."
        if steps[start] != steps[-1]:
            text += f" It starts at step {steps[start]:,}, the last without NaN or infinity."
        if len(drawn) > 1:
            text += " Each run shows its latest measurement up to the chosen step."
        if len(steps) < (all_of := len({step for run in drawn for step in run.steps})):
            text += f" It stops at {len(steps)} of {all_of:,} steps, the worst of each stretch; probe.jsonl has all."
        parts.append(tag("p", text, class_="caption needs-script", hidden=True))
    if len(drawn) > HEAT_MAPS_MOST:
        parts.append(f"The heat maps show the first {HEAT_MAPS_MOST} runs.")
    return [part for part in parts if part is not None]


def _subject(runs: Sequence[Shown], logged: bool) -> str:
    if len(runs) > 1:
        return f"{len(runs)} runs compared" if logged else f"Conditioning of {len(runs)} runs"
    run = runs[0]
    return f"{'Training' if logged else 'Conditioning'} of {run.model or run.name}"


# ---- what was found, as a title and a sentence


def _finding(runs: Sequence[Shown], measured: Sequence[Readings]) -> tuple[str, str, str]:
    """Return what heads the page: that a run diverged, else what its κ shows, else how far training got. A title, a
    sentence, and the title of the chart that shows it, "" for the first."""
    lost = sorted(((event.step, run) for run in runs if (event := _lost(run))), key=lambda pair: pair[0])
    if not lost:
        return _kappa_finding(measured) if measured else (*_training_finding(runs), "")
    step, run = lost[0]
    title = f"{'Training' if len(runs) == 1 else run.name} diverged at step {step:,}"
    if len(lost) > 1:
        title = f"{len(lost)} of {len(runs)} runs diverged, {run.name} first, at step {step:,}"
    own = [one for one in measured if one.run == run.name]
    if not own:
        return title, f"{run.name} was trained without a probe: how its blocks were conditioned is not known.", ""
    worst, sentence, _ = _kappa_finding(own)
    return title, f"{worst}. {sentence}", f"{MAP}, {run.name}" if len(measured) > 1 else ""


def _lost(run: Shown) -> Event | None:
    """Return the divergence that ended a run; None if there was none, or it went back and on."""
    lost = None
    for event in run.events:
        if event.event.startswith(TURNING):
            lost = event if event.event.startswith(DIVERGED) else None
    return None if lost and run.train and run.train[-1].step > lost.step else lost


def _kappa_finding(runs: Sequence[Readings]) -> tuple[str, str, str]:
    """Return a title (the worst place of a run, or the largest rise between runs), a sentence, and the title of the
    chart that shows it, "" for the first."""

    def card(run: Readings) -> str:
        return f"{MAP}, {run.run}" if len(runs) > 1 else ""

    first = runs[0]
    for run in runs:
        if failure := first_failure(run):
            of = f" in {run.run}" if len(runs) > 1 else ""
            where = f"first in {_place(run, failure.block, failure.site)}"
            where = "from the first measured site on" if failure.at_once else where
            return f"NaN{of} {failure.when}, {where}", _sentence(run), card(run)
    rise = largest_rise(compare(runs)) if len(runs) > 1 else None
    if rise:
        found, _ = rise
        where = _place(first, found.block, found.site)
        by = f"log κ {'at least ' if found.sense == 'at least' else ''}{found.change:.1f} higher"
        by = by if math.isfinite(found.change) else str(found)
        worse = f"{where[0].upper()}{where[1:]} is worse in {found.run} than in {first.run}: {by}"
        chart = BY_BLOCK.format(found.site) if found.block else ""
        return worse, _sentence(first, next(run for run in runs if run.run == found.run)), chart
    worst = [(states[0], run) for run in runs if (states := _states(run))]
    if not worst:
        site = first.outside[0]
        at = first.last, "", site
        value = bounded(first.value("log_kappa", *at), first.lower_bound(*at))
        return f"log κ of the {SITE_NAMES[site]} is {value}", _sentence(first), ""
    state, run = max(worst, key=lambda pair: pair[0].rank)
    where = _place(run, state.block, state.worst_site)
    of = f", in {run.run}" if len(runs) > 1 else ""
    return f"{where[0].upper()}{where[1:]} is worst: log κ {_number(state)}{of}", _sentence(run), card(run)


def _place(run: Readings, block: str, site: str) -> str:
    """Return e.g. "block 11's attention output"; a block whose name does not end with its place keeps its name."""
    if not block:
        return f"the {SITE_NAMES[site]}"
    place = next(one.place for one in run.blocks if one.name == block)
    name = f"block {place}" if block.rpartition(".")[2] == str(place) else block
    return f"{name}'s {SITE_NAMES[site]}"


def _means(run: Readings) -> dict[str, str]:
    """Return the mean log κ over blocks, by site, at the last step without NaN."""
    means = {site: mean for site in run.sites if (mean := run.mean_over_blocks(run.last, site))}
    return {site: bounded(mean.value, mean.lower_bound) for site, mean in means.items()}


def _sentence(run: Readings, other: Readings | None = None) -> str:
    """Say what the run's means at the last step tell about its skips; or compare the means of two runs."""
    last, texts = run.last, _means(run)
    if other and (both := {site: text for site, text in _means(other).items() if site in texts}):
        changes = ", ".join(f"{texts[site]} to {text} at {site}" for site, text in both.items())
        return f"From {run.run} to {other.run}, log κ (natural logarithm, mean over blocks) goes from {changes}."
    when = f"At step {last:,} of {run.run}" if len(run.steps) > 1 else f"In {run.run}"
    when += ", the last without NaN" if last != run.steps[-1] else ""
    said = [
        f"{texts[site]} at {name}'s output and {texts[f'+{site}']} after its skip"
        for site, name in (("sa", "attention"), ("mlp", "the MLP"))
        if site in texts and f"+{site}" in texts
    ]
    if not said:
        said = [f"{text} at {site}" for site, text in texts.items()]
    if not said:
        return f"{when}, nothing inside the blocks was measured."
    return f"{when}, log κ (natural logarithm, mean over blocks) is {'; '.join(said)}."


def _training_finding(runs: Sequence[Shown]) -> tuple[str, str]:
    """Return how far training got, as title and sentence; for several runs, which is best."""
    sentence = "How training went, from metrics.jsonl; no condition numbers were measured."
    for name, points, best in (
        ("top-1", lambda run: run.metric("top1"), max),
        ("validation loss", lambda run: run.metric("loss"), min),
        ("training loss", lambda run: run.trained("loss"), min),
    ):
        ends = [(points(run)[-1][1], points(run)[-1][0], run.name) for run in runs if points(run)]
        ends = [end for end in ends if math.isfinite(end[0])]
        if ends:
            value, step, run = best(ends)
            of = f"{run} is best: " if len(runs) > 1 else ""
            return f"{of}{_value(name, value)} {name} after {step:,} steps", sentence
    return _subject(runs, logged=True), sentence


def _written() -> str:
    return f"Written by wellcond {own_version()} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."


# ---- how the training went


def _training_tiles(run: Shown) -> list[tuple[str, str, str]]:
    """Return the last step, the losses and the accuracy, each with its best value."""
    found = [("steps", f"{run.last_step:,}", "the last one logged")] if run.logged else []
    for name, points, best in (
        ("training loss", run.trained("loss"), min),
        (metric_name("loss"), run.metric("loss"), min),
        (metric_name("top1"), run.metric("top1"), max),
    ):
        if points:
            finite = [(value, step) for step, value in points if math.isfinite(value)]
            value, at = best(finite, default=(math.nan, 0))
            about = f"at step {points[-1][0]:,}; best {_value(name, value)}, at step {at:,}" if finite else ""
            found.append((name, _value(name, points[-1][1]), about))
    return found


def _value(name: str, value: float) -> str:
    """Format a training number according to its name on the page."""
    if not math.isfinite(value):
        return format_number(value, 4)
    return f"{value:.1%}" if name.startswith("top-") else f"{value:#.4g}".removesuffix(".")


def _events(runs: Sequence[Shown]) -> list[str]:
    """Return what happened to each run, in order, in words."""
    found = []
    for run in runs:
        who = f"{run.name}, step" if len(runs) > 1 else "Step"
        groups = _grouped(run.events)
        others = [place for place, (text, _) in enumerate(groups) if not text.startswith(TURNING)]
        cut = set(others[max(0, EVENTS_MOST - (len(groups) - len(others))) :])
        found += [f"{who}{_steps(steps)}: {text}" for place, (text, steps) in enumerate(groups) if place not in cut]
        if cut:
            found.append(f"{run.name}: {len(cut)} more; metrics.jsonl has all.")
    return found


def _grouped(events: Sequence[Event]) -> list[tuple[str, list[int]]]:
    """Return the text of each event and its step; the same text several times in a row is one, with all its steps."""
    return [(text, [event.step for event in same]) for text, same in itertools.groupby(events, lambda e: e.event)]


def _steps(steps: Sequence[int]) -> str:
    """Return what follows the word "step": " 4", "s 4 to 13", or "s 4 to 31 (10 of them)" if some are missing."""
    if len(steps) == 1:
        return f" {steps[0]:,}"
    first, last = min(steps), max(steps)
    return f"s {first:,} to {last:,}" + (f" ({len(steps)} of them)" if len(steps) <= last - first else "")


def _tables(runs: Sequence[Shown], measured: Sequence[Readings]) -> list[Html | None]:
    """Return losses and accuracies of the runs that were trained, κ of those that were measured, and what differs."""
    models = {run.name: run.model for run in runs}
    parts: list[Html | None] = []
    if logged := [run for run in runs if run.logged]:
        parts.append(_training_table(logged))
    if measured:
        parts.append(summary(measured, models))
    parts.append(_settings(runs))
    return parts


def _settings(runs: Sequence[Shown]) -> Html | None:
    """Return a table of the settings that differ between runs; None if those of fewer than two are known."""
    known = [run.config for run in runs if run.config]
    if len(known) < 2:
        return None
    names = dict.fromkeys(name for config in known for name in config)
    values = {name: {json.dumps(config[name]) if name in config else "" for config in known} for name in names}
    differ = [name for name in names if len(values[name]) > 1]
    if not differ:
        return paragraph("No setting differs between the runs whose config.json is known.")
    rows = [[name, *(_setting(run.config, name) for run in runs)] for name in differ]
    caption = "Settings that differ, from each run's config.json. –: not in it."
    return table(["setting", *(run.name for run in runs)], rows, caption=caption)


def _setting(config: Mapping[str, Any], name: str) -> str:
    """Return a setting as JSON; of a path only the last part, since a page must not reveal a machine's folders."""
    if name not in config:
        return "–"
    text = json.dumps(config[name], ensure_ascii=False)
    text = text.strip('"') if isinstance(config[name], str) and config[name] else text
    return re.sub(r"(^|[:=\"])/(?!/)[^:\",]*/", r"\1…/", text)


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
    caption = "Last values of each run: one step's training loss, and the last validation."
    return table(header, rows, numeric=set(range(2 if with_models else 1, len(header))), caption=caption)


def _how_to_probe(run: Shown) -> Html:
    """Say how to switch the probe on: in another folder, since that is another configuration."""
    return section(
        "Condition numbers",
        "Trained without a probe, so the conditioning of the blocks is not known. With probe_every, the same command "
        "measures it during training, and its page shows it block by block:",
        code_block(f"wellcond train {run.recipe or 'RECIPE'} … --set probe_every=100 --output runs/{run.name}-probed"),
    )


# ---- what the probes measured


def _blind(runs: Sequence[Readings]) -> str:
    dtypes = sorted({cell.dtype for run in runs for (name, *_), cell in run.cells.items() if name == "log_kappa"})
    return (
        f"Every number of {', '.join(run.run for run in runs)} is a lower bound, because samples were at the ceiling "
        f"of their dtype ({', '.join(dtypes)}): κ is larger by an unknown amount, and no curve below shows what the "
        'model did. Measure again in a separate pass: Probe(model) computes in float32, Probe(model, exact="float64") '
        "in float64; in wellcond train, set probe_exact=float64."
    )


def _states(run: Readings) -> list[BlockState]:
    """Return the blocks at the last step without NaN, worst first; one without a number ranks worst."""
    began = first_failure(run)
    states = [BlockState.of(run, run.last, position, began) for position in range(len(run.blocks))]
    return sorted((s for s in states if s.cells), key=lambda state: state.rank, reverse=True)


def _number(state: BlockState) -> str:
    """Format log κ of a block where it is worst, with the mark of a lower bound."""
    if not math.isfinite(state.worst):
        return "all zero" if state.cells[state.worst_site].status == "zero" else "NaN"
    return bounded(state.worst, state.lower_bound(state.worst_site))


def _kappa_tiles(runs: Sequence[Readings], reference: Mapping[str, Mapping[str, Band]]) -> list[tuple[str, str, str]]:
    worst = [(states[0], run) for run in runs if (states := _states(run))]
    items, last = [], runs[0].last
    if worst:
        state, run = max(worst, key=lambda pair: pair[0].rank)
        of = f", {run.run}" if len(runs) > 1 else ""
        items.append(("worst block", state.block, f"at {state.worst_site}, step {run.last:,}{of}"))
        kappa = format_number(float(f"{math.exp(state.worst):.2g}"), 2) if 0 <= state.worst < 500 else ""
        about = "at least" if state.lower_bound(state.worst_site) else "about"
        items.append(("its log κ", _number(state), f"κ {about} {kappa}" if kappa else "see below"))
    if len(runs) == 1:
        run = runs[0]
        share, counted = share_at_ceiling(run, last)
        items.append(("at the ceiling", share, f"{counted}: κ beyond what their dtype can resolve"))
        items += [_site_tile(run, site, reference) for site in run.sites]
    else:
        if found := largest_rise(compare(runs)):
            rise, certain = found
            what = f"largest {'' if certain else 'known '}rise from {runs[0].run}"
            items.append((what, str(rise), f"{rise.run}: {rise.block} {rise.site}"))
    if not worst:  # only what comes before the blocks was measured
        for site in runs[0].outside:
            at = last, "", site
            number = bounded(runs[0].value("log_kappa", *at), runs[0].lower_bound(*at))
            items.append((f"log κ at {site}", number, SITE_WORDS[site]))
    return items


def _site_tile(run: Readings, site: str, reference: Mapping[str, Mapping[str, Band]]) -> tuple[str, str, str]:
    mean = run.mean_over_blocks(run.last, site)
    if mean is None:  # not measured at that step
        return f"mean log κ at {site}", "–", SITE_WORDS[site]
    text = SITE_WORDS[site]
    if mean.blocks > 1 and mean.left_out < mean.blocks:
        count = f"{mean.blocks - mean.left_out} of {mean.blocks}" if mean.left_out else f"{mean.blocks}"
        text = f"{count} blocks, {bounded(*mean.least)} to {bounded(*mean.most)}"
    text = "; ".join([text, *(f"{who} {bands[site]}" for who, bands in reference.items() if site in bands)])
    return f"mean log κ at {site}", bounded(mean.value, mean.lower_bound), text


def _general(runs: Sequence[Shown], measured: Sequence[Readings]) -> list[str]:
    """Return advice on whole runs."""
    found, readings = [], {one.run: one for one in measured}
    for run in runs:
        own = readings.get(run.name)
        texts = advise_run(own, own.last if own else 0, events=run.events, config=run.config)
        found += [f"{run.name}: {text}" if len(runs) > 1 else text for text in texts]
    return found


def _first_section(runs: Sequence[Readings]) -> Html:
    """Return the worst blocks, with one or two sentences each."""
    groups: dict[tuple[str, str], list[BlockState]] = {}
    for run in runs:
        for position, state in enumerate(_states(run)):
            said = " ".join(advise(state)[:SENTENCES_MOST])
            if said:
                groups.setdefault((run.run, said), []).append(state)
            elif position < SHOWN_LEAST and len(runs) == 1:
                groups[run.run, f"–{position}"] = [state]
    ordered = sorted(groups.items(), key=lambda item: (item[0][1][0] != "–", item[1][0].rank), reverse=True)
    parts: list[Any] = []
    if all(said.startswith("–") for _, said in groups):
        parts.append("None of the rules flagged a block.")
    if ordered:
        when = "the last step"
        if any(run.last != run.steps[-1] for run in runs):
            when = "the last step" if len(runs) > 1 else f"step {runs[0].last:,}, the last"
            when += " without NaN or infinity"
        rest = len(ordered) - ADVISED_MOST
        parts.append(_advice_table(ordered[:ADVISED_MOST], several=len(runs) > 1, left_out=rest, when=when))
    return section("Worst blocks first", *parts)


def _advice_table(
    groups: Sequence[tuple[tuple[str, str], list[BlockState]]], *, several: bool, left_out: int, when: str
) -> Html:
    """Return the advice table: blocks with the same advice share a row, with the numbers of the worst of them."""
    rows, advised = [], any(not said.startswith("–") for (_, said), _ in groups)
    for (run, said), states in groups:
        first = states[0]
        more = tag("span", f" and {len(states) - 1} more", title=", ".join(state.block for state in states))
        name = [first.block, more if len(states) > 1 else None]
        cells = [name, first.worst_site, _number(first), *(["–" if said.startswith("–") else said] if advised else ())]
        rows.append([run, *cells] if several else cells)
    caption = f"Each block at its worst site, at {when}."
    caption += f" {left_out} more rows are left out." if left_out > 0 else ""
    if advised:
        caption += (
            " The advice follows rules of thumb, such as a log κ of 10 or more after an add or a logit of 50 or more. "
            "It says what may help, not what will."
        )
    start = 1 if several else 0
    header = [*(["run"] if several else []), "block", "worst at", "log κ", *(["what to do"] if advised else ())]
    blocks = [states[0].block for _, states in groups]
    prose = {start + 3} if advised else ()
    return table(header, rows, numeric={start + 2}, prose=prose, caption=caption, blocks=blocks)


def _words_section(runs: Sequence[Readings]) -> Html:
    sites = {site for run in runs for site in (*run.sites, *run.outside)}
    dtypes = sorted({cell.dtype for run in runs for cell in run.cells.values()})
    items = [[tag("code", site), f": {text}"] for site, text in SITE_WORDS.items() if site in sites]
    return section(
        "Terms",
        KAPPA,
        bullets(*items),
        paragraph(
            f"Measured on {', '.join(dtypes)} tensors. A κ above 1/eps of the tensor's dtype cannot be "
            "resolved and counts as that ceiling (log κ = 15.9 for float32). The attention's output is ill-conditioned "
            "in healthy models too, even untrained ones; what matters is how much of it is left after the skip."
        ),
    )
