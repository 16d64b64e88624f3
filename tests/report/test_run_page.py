import csv
import io
import json
import math
import re
from html import unescape

import pytest

from wellcond.records import Event, TrainRow, ValidationRow
from wellcond.report import conditioning_page
from wellcond.report.run_charts import Shown
from wellcond.report.run_page import run_page

pytestmark = pytest.mark.usefixtures("without_drawing")
FULL = {
    "sites": ("in", "sa", "+sa", "mlp", "+mlp"),
    "sigma": (0, 5, 9),
    "attention": True,
    "outside": ("tokens", "embed"),
}


def shown(name, *, steps=(10, 20, 30), loss=2.0, **more):
    """A run of three logged steps and one validation."""
    train = [TrainRow(step=s, epoch=s / 10, loss=loss * 10 / s, lr=0.1, gradient_norm=1.0 + s) for s in steps]
    metrics = {"loss": 1.5 * loss, "top1": 0.625, "top5": 0.875}
    return Shown(name=name, train=train, validation=[ValidationRow(step=30, epoch=3, metrics=metrics)], **more)


def headings(html, level):
    return [unescape(text) for text in re.findall(rf"<h{level}>(.*?)(?:<a .*?</a>)?</h{level}>", html)]


def charts(html):
    """What each figure hands to the script, by its title."""
    found = re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)
    return dict(zip(headings(html, 3), map(json.loads, found), strict=True))


def tiles(html):
    return {unescape(what): unescape(value) for what, value in re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", html)}


def test_one_run_has_all_its_parts(probe_rows):
    rows = probe_rows(steps=(0, 100, 200), blocks=6, **FULL)
    html = run_page([shown("a", model="vit_tiny", probe=rows)]).to_html()
    assert "Training of vit_tiny" in html
    assert headings(html, 2) == [
        "By block and site",
        "Worst blocks first",
        "Over training",
        "Singular values",
        "Attention",
        "Terms",
    ]
    for heading in headings(html, 2):
        assert f">{heading}</a>" in html  # its contents
    figures = headings(html, 3)
    assert len(figures) == len(set(figures)) == 1 + 5 + 6 + 2 + 5 + 2
    assert figures[0] == "log κ by block and site"
    ids = re.findall(r' id="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    for chart in charts(html).values():
        header, *lines = csv.reader(io.StringIO(chart["csv"]))
        assert header == list(chart["parse"])
        assert lines
        assert {len(line) for line in lines} == {len(header)}


def test_the_title_is_what_was_found(probe_rows):
    rows = probe_rows(steps=(0, 100), blocks=6)
    last = [r for r in rows if r["step"] == 100 and r["name"] == "log_kappa"]
    worst = max(last, key=lambda r: r["value"])
    number = f"{'≥ ' if worst['status'] == 'ceiling' else ''}{worst['value']:.1f}"

    def title(runs, **more):
        return headings(conditioning_page(runs, **more).to_html(), 1)

    assert title({"a": rows}) == [f"Block {worst['index']}'s attention output is worst: log κ {number}"]
    named = [{**r, "block": f"stage.{r['index'] + 1}"} for r in rows]  # a name that counts from one
    assert title({"a": named})[0].startswith(f"Stage.{worst['index'] + 1}'s attention output is worst")
    worse = probe_rows(steps=(0, 100), blocks=6, shift=1.0, sites=("+sa",))
    assert re.fullmatch(
        r"Block \d's stream after attention is worse in b than in a: log κ 1.0 higher", *title({"a": rows, "b": worse})
    )
    assert title({"a": worse, "b": rows})[0].endswith("in b")  # where nothing rose, the worst of all
    for r in rows:
        if r["name"] == "log_kappa" and r["index"] >= 2 and r["step"] == 100:
            r |= {"value": math.nan, "status": "non_finite"}
    assert title({"a": rows}) == ["NaN between steps 0 and 100, first in block 2's attention output"]
    assert title({"a": probe_rows(blocks=0, outside=("tokens",))}) == ["log κ of the raw patches is 8.6"]


def test_the_card_shows_the_chart_of_the_finding(probe_rows):
    rows, worse = probe_rows(blocks=6), probe_rows(blocks=6, shift=1.0, sites=("+sa",))
    for runs, shown in (
        ({"a": rows}, None),
        ({"a": rows, "b": worse}, "log-kappa-by-block-after-sa"),
        ({"a": worse, "b": rows}, "log-kappa-by-block-and-site-b"),
    ):
        html = conditioning_page(runs).to_html()
        found = re.search('data-card="(.*?)"', html)
        assert (found[1] if found else None) == shown
        assert shown is None or f'<figure class="chart" id="{shown}">' in html


def test_the_title_of_a_training_is_how_far_it_came():
    def title(*runs):
        return headings(run_page(runs).to_html(), 1)[0]

    assert title(shown("a")) == "62.5% top-1 after 30 steps"
    assert title(shown("a"), shown("b", loss=1.0)) == "b is best: 62.5% top-1 after 30 steps"
    lost = [Event(step=31, event="diverged: the loss became nan")]
    assert title(shown("a", events=lost)) == "Training diverged at step 31"
    assert title(shown("a", events=[Event(step=11, event="diverged: back to step 10")])).startswith("62.5%")
    assert title(Shown(name="a", train=[TrainRow(step=7, loss=0.5)])) == "0.5000 training loss after 7 steps"


LOST = [Event(step=31, event="diverged: the loss became nan")]


def test_divergence_heads_the_page_and_condition_numbers_follow(probe_rows):
    def head(*runs):
        html = unescape(run_page(runs).to_html())
        return headings(html, 1)[0], re.search('<p class="lead">(.*?)</p>', html)[1]

    rows = probe_rows(steps=(0, 30), blocks=6)
    kappa, sentence = head(shown("a", probe=rows))
    assert head(shown("a", probe=rows, events=LOST)) == ("Training diverged at step 31", f"{kappa}. {sentence}")
    healthy = shown("b", probe=probe_rows(steps=(0, 30), blocks=6, shift=2.0))
    assert head(healthy, shown("a", probe=rows, events=LOST)) == ("a diverged at step 31", f"{kappa}. {sentence}")
    title, sentence = head(healthy, shown("a", events=LOST))
    assert (title, "a was trained without a probe" in sentence) == ("a diverged at step 31", True)
    earlier = shown("c", events=[Event(step=30, event="diverged: the loss rose")])
    assert head(healthy, shown("a", events=LOST), earlier)[0] == "2 of 3 runs diverged, c first, at step 30"


@pytest.mark.parametrize("probed", [True, False])
def test_a_run_that_diverged_is_told_of_its_rate(probe_rows, probed):
    probe = probe_rows() if probed else None
    one = shown("a", probe=probe, events=LOST, config={"lr": 3.0})
    text = unescape(run_page([one]).to_html())
    assert "<li>Training diverged: a smaller lr than 3, or clip_grad=1, may help.</li>" in text
    text = unescape(run_page([one, shown("b", probe=probe)]).to_html())
    assert "<li>a: Training diverged: a smaller lr than 3, or clip_grad=1, may help.</li>" in text


def test_a_run_that_went_back_and_on_is_not_lost(probe_rows):
    back = Event(step=31, event="back to step 0 with lr × 0.5, rollback 1 of 3")

    def title(*events):
        return headings(run_page([shown("a", probe=probe_rows(), events=events)]).to_html(), 1)[0]

    assert "is worst" in title(*LOST, back)  # to its last step, 30
    assert title(*LOST, back, *LOST) == "Training diverged at step 31"


def test_tiles_name_the_worst_block_and_the_means(probe_rows):
    rows = probe_rows(steps=(0, 100), blocks=6)
    shown = tiles(conditioning_page({"a": rows}).to_html())
    last = [r for r in rows if r["step"] == 100 and r["name"] == "log_kappa"]
    worst = max(last, key=lambda r: r["value"])
    assert shown["worst block"] == worst["block"]
    assert shown["its log κ"] == f"{'≥ ' if worst['status'] == 'ceiling' else ''}{worst['value']:.1f}"
    for site in ("sa", "+sa", "mlp", "+mlp"):
        here = [r for r in last if r["site"] == site]
        mark = "≥ " if any(r["status"] == "ceiling" for r in here) else ""
        assert shown[f"mean log κ at {site}"] == f"{mark}{sum(r['value'] for r in here) / 6:.1f}"
    assert shown["mean log κ at sa"].startswith("≥ ")
    assert not shown["mean log κ at +sa"].startswith("≥")


def test_tiles_say_what_is_a_lower_bound(probe_rows):
    """Of six blocks the last are beyond the ceiling: the mean and the largest are lower bounds, the smallest is not."""
    html = conditioning_page({"a": probe_rows(blocks=6, shift=1.5)}).to_html()
    assert '<dd class="small">κ at least ' in html
    assert re.search(r"6 blocks, 1\d\.\d to ≥ 1\d\.\d", unescape(html))
    html = conditioning_page({"a": probe_rows(blocks=6)}).to_html()
    assert "κ about" in html
    assert "≥" not in "".join(tiles(html).values())
    html = conditioning_page({"a": probe_rows(blocks=6, shift=9.0)}).to_html()
    assert "6 blocks, ≥ 15.9 to ≥ 15.9" in html
    assert "the true value may lie above the line" in html
    outside = conditioning_page({"a": [{**r, "status": "ceiling"} for r in probe_rows(blocks=0, outside=("tokens",))]})
    assert tiles(outside.to_html())["log κ at tokens"] == "≥ 8.6"


def test_a_healthy_run_gets_no_advice(probe_rows):
    html = conditioning_page({"a": probe_rows()}).to_html()
    assert "None of the rules flagged a block" in html
    for word in ("wellcond.gray", "restore_skip", "replace_attention", "QK-norm"):
        assert word not in html


def test_blocks_of_which_the_same_is_said_share_a_row(probe_rows):
    rows = probe_rows(blocks=6)
    for r in rows:
        if r["name"] == "log_kappa" and r["index"] >= 2:
            r |= {"value": math.nan, "status": "non_finite"}
    html = conditioning_page({"a": rows}).to_html()
    assert "NaN or infinity was first seen here at step 0, at sa" in html
    assert "blocks.3<span" in html
    assert 'data-block="blocks.3"' in html  # which charts highlight
    assert "and 2 more</span>" in html
    assert tiles(html)["its log κ"] == "NaN"


def broken(rows, since, index=0):
    """The rows of a run that is NaN from a step on, from a block on in the first of these steps."""
    later = {r["step"] for r in rows if r["step"] > since}
    return [
        {**r, "value": math.nan, "status": "non_finite"}
        if r["step"] in later or (r["step"] == since and r["index"] >= index)
        else r
        for r in rows
    ]


def test_a_run_that_ended_in_nan_opens_where_its_numbers_end(probe_rows):
    rows = probe_rows(steps=range(0, 60, 10), blocks=6, **FULL)
    for since, index in ((20, 3), (20, -1)):
        html = conditioning_page({"a": broken(rows, since, index)}).to_html()
        alone = conditioning_page({"a": [r for r in rows if r["step"] < since]}).to_html()
        assert tiles(html) == tiles(alone)
        assert 'max="5" value="1"' in html  # the slider, at step 10
        text = unescape(html)
        assert "At step 10 of a, the last without NaN, log κ" in text
        assert "It starts at step 10, the last without NaN or infinity." in text
        assert "Each block at its worst site, at step 10, the last without NaN or infinity." in text
        for name in ("Spectrum at sa", "Attention entropy by block"):
            assert "NaN" not in charts(html)[name]["csv"]


def test_the_slider_stops_where_the_numbers_end(probe_rows):
    rows = broken(probe_rows(steps=range(1000), blocks=12, brief=True), since=501)
    assert "It starts at step 500, the last without NaN" in conditioning_page({"a": rows}).to_html()


def test_nan_everywhere_points_at_weights_and_input(probe_rows):
    def title_and_advice(rows):
        html = unescape(conditioning_page({"a": rows}).to_html())
        return headings(html, 1)[0], html

    rows = probe_rows(steps=(0, 10, 20), blocks=6)
    title, text = title_and_advice(broken(rows, 10))
    assert title == "NaN between steps 0 and 10, from the first measured site on"
    assert "look at the weights and the input rather than at that block" in text
    title, text = title_and_advice(broken(rows, 0))
    assert title == "NaN at step 0, from the first measured site on"
    assert "from sa of blocks.0 on: look at the weights and the input first" in text
    title, text = title_and_advice(broken(rows, 10, index=3))
    assert title == "NaN between steps 0 and 10, first in block 3's attention output"
    assert "weights and the input" not in text


def test_runs_are_compared(probe_rows):
    runs = {"a": probe_rows(steps=(0, 10), **FULL), "b & c": probe_rows(steps=(0, 5), shift=5.0)}
    html = conditioning_page(runs).to_html()
    assert "Conditioning of 2 runs" in html
    assert headings(html, 2)[:4] == ["By block and site", "Worst blocks first", "The runs", "Differences"]
    assert "log κ by block and site, b & c" in headings(html, 3)
    assert "log κ by block, +mlp" in headings(html, 3)
    assert tiles(html)["largest known rise from a"].startswith("+")  # at sa some are beyond the ceiling in both
    assert "b & c" not in re.sub("<script.*?</script>", "", html)


def test_long_runs_stay_small_and_say_what_they_leave_out(probe_rows):
    html = conditioning_page({"a": probe_rows(steps=range(1000), brief=True)}).to_html()
    assert len(html) < 1_000_000  # beside the script that draws it
    assert "It stops at 100 of 1,000 steps" in html
    assert "probe.jsonl has all" in html


def test_many_runs_are_drawn_in_part_and_all_in_the_tables(probe_rows):
    html = conditioning_page({f"run {i}": probe_rows(blocks=2, sites=("sa",)) for i in range(14)}).to_html()
    assert "the first 12 of 14 runs" in html
    assert html.count("<td>run 13</td>") >= 1
    assert len([title for title in headings(html, 3) if title.startswith("log κ by block and site")]) == 6


def test_notes_and_unknown_names_are_shown(probe_rows):
    rows = probe_rows(blocks=1)
    html = conditioning_page({"a": [*rows, {**rows[0], "name": "<new>"}]}, title="T <1>", notes=["<torn>"]).to_html()
    assert "T &lt;1&gt;" in html
    assert "&lt;torn&gt;" in html
    assert "&lt;new&gt;" in html
    assert "<torn>" not in html


def test_mistakes_are_named():
    with pytest.raises(ValueError, match="no runs"):
        conditioning_page({})
    with pytest.raises(ValueError, match="'a' has no rows"):
        conditioning_page({"a": []})


def _blind(rows, levels):
    """These rows as a probe of bfloat16 has them: nothing but its ceiling."""
    return [
        {**row, "value": levels, "dtype": "bfloat16", "status": "ceiling"} if row["name"] == "log_kappa" else row
        for row in rows
    ]


def test_a_page_of_nothing_but_ceilings_says_so_first(probe_rows):
    rows = _blind(probe_rows(steps=(0, 100)), 4.85)
    text = unescape(conditioning_page({"blind": rows}).to_html())
    assert "Only lower bounds" in text
    assert text.index("Only lower bounds") < text.index("By block and site", text.index("<main>"))
    assert "bfloat16" in text
    one_number = [
        {**row, "status": "ok"} if row["name"] == "log_kappa" and row["site"] == "+sa" else row for row in rows
    ]
    assert "Only lower bounds" not in unescape(conditioning_page({"sees": one_number}).to_html())


def test_what_half_precision_cannot_see_is_worst(probe_rows):
    rows = [
        {**row, "value": 4.85, "dtype": "bfloat16", "status": "ceiling"}
        if row["name"] == "log_kappa" and row["site"] in ("sa", "mlp")
        else {**row, "value": 64.0} if row["name"] == "capped" and row["site"] in ("sa", "mlp") else row
        for row in probe_rows(steps=(0, 10))
    ]  # fmt: skip
    html = unescape(conditioning_page({"a": rows}).to_html())
    assert headings(html, 1) == ["Block 0's attention output is worst: log κ ≥ 4.8"]
    assert tiles(html)["its log κ"] == "≥ 4.8"
    assert "log κ over training, sa" in headings(html, 3)


def test_single_tokens_are_named_and_no_worst_block(probe_rows):
    rows = probe_rows(blocks=3)
    rows += [
        {**row, "block": "cls.0", "index": 3, "value": math.nan, "status": "single"} for row in probe_rows(blocks=1)
    ]
    html = conditioning_page({"cait": rows}).to_html()
    assert "a single token has no condition number: cls.0" in unescape(html)
    assert tiles(html)["worst block"].startswith("blocks.")


# ---- training: with a probe and without one it is the same page


TRAINING = ["Training loss", "Validation loss", "Top-1 accuracy", "Top-5 accuracy", "Learning rate", "Gradient norm"]


def test_with_and_without_a_probe_the_training_is_shown_alike(probe_rows):
    with_probe = run_page([shown("a", model="vit_tiny", probe=probe_rows(steps=(0, 30)))]).to_html()
    without = run_page([shown("a", model="vit_tiny", recipe="digits")]).to_html()
    for html in (with_probe, without):
        assert "Training of vit_tiny" in html
        assert [title for title in headings(html, 3) if title in TRAINING] == TRAINING
        assert tiles(html) | {
            "steps": "30",
            "training loss": "0.6667",
            "validation loss": "3.000",
            "top-1": "62.5%",
        } == (tiles(html))
        assert "What happened" not in html
    assert headings(without, 2) == ["Over training", "Condition numbers"]
    assert "wellcond train digits … --set probe_every=100 --output runs/a-probed" in without
    assert "probe_every=100" not in with_probe
    assert "worst block" in tiles(with_probe)


def test_what_happened_is_said_before_anything_is_drawn(probe_rows):
    events = [Event(step=1234, event="diverged: the loss became <nan>"), Event(step=1234, event="back to step 20")]
    for rows in (None, probe_rows()):
        html = run_page([shown("mine", events=events, probe=rows)]).to_html()
        assert "Step 1,234: diverged: the loss became &lt;nan&gt;" in html
        assert html.index("What happened") < html.index("<h2>Over training")
    html = run_page([shown("a"), shown("b", events=events)]).to_html()
    assert "<li>b, step 1,234: back to step 20</li>" in html
    html = run_page([shown("a", events=[Event(step=s, event=f"note {s}") for s in range(40)])]).to_html()
    assert "a: 28 more; metrics.jsonl has all." in html


def test_what_decides_about_a_run_is_never_cut():
    left_out = "left out: its gradient was not finite"
    events = [
        *(Event(step=s, event=left_out) for s in range(4, 14)),
        Event(step=14, event="diverged: the loss became nan"),
        Event(step=14, event="back to step 0 with lr × 0.5, rollback 1 of 3"),
        *(Event(step=s, event=left_out) for s in (4, 6, 9)),
        *(Event(step=s, event=f"note {s}") for s in range(20, 40)),
        Event(step=44, event="diverged: the loss rose"),
    ]
    text = unescape(run_page([shown("a", events=events)]).to_html())
    lines = re.findall("<li>(.*?)</li>", text[text.index("What happened") : text.index("For the whole run")])
    assert lines[:4] == [
        f"Steps 4 to 13: {left_out}",
        "Step 14: diverged: the loss became nan",
        "Step 14: back to step 0 with lr × 0.5, rollback 1 of 3",
        f"Steps 4 to 9 (3 of them): {left_out}",
    ]
    assert lines[4:] == [*(f"Step {s}: note {s}" for s in range(20, 27)), "Step 44: diverged: the loss rose",
                         "a: 13 more; metrics.jsonl has all."]  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_leaves_a_gap(value):
    html = run_page([shown("gap", loss=value)]).to_html()
    assert "points cannot be drawn on these axes" in html
    only = run_page([Shown(name="lost", train=[TrainRow(step=1, loss=value)])]).to_html()
    assert headings(only, 3) == ["Training loss"]  # what an older run did not write has no chart
    assert tiles(only)["training loss"] in ("NaN", "∞")


def test_a_run_lost_before_its_first_row_has_a_page():
    html = run_page([Shown(name="early", events=[Event(step=3, event="diverged")])]).to_html()
    assert "Training of early" in html
    assert "No step has been logged." in html
    assert "Step 3: diverged" in html


def test_settings_that_differ_are_named():
    common = {"lr": 0.001, "opt": "adamw", "clip_grad": None, "data": "folder:/home/me/a/photos"}
    runs = [
        shown("a", config=common),
        shown("b", config={**common, "lr": 3.0, "clip_grad": 1.0, "data": "folder:/home/me/b/photos", "new": "<x>"}),
        shown("c"),
    ]
    html = run_page(runs).to_html()
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in re.findall("<tr>(.*?)</tr>", html)]
    assert [row for row in rows if row and row[0] in {*common, "new"}] == [
        ["lr", "0.001", "3.0", "–"],
        ["clip_grad", "null", "1.0", "–"],
        ["data", "folder:…/photos", "folder:…/photos", "–"],
        ["new", "–", "&lt;x&gt;", "–"],
    ]
    assert "Settings that differ" in html
    assert "/home/me" not in html
    assert "No setting differs" in run_page([runs[0], shown("b", config=common)]).to_html()
    assert "etting" not in run_page([runs[0], runs[2]]).to_html().partition("<main>")[2].partition("<script")[0]


def test_the_sentence_is_about_the_run_in_the_heading(probe_rows):
    rows = probe_rows(steps=(0, 10), blocks=6)
    text = unescape(conditioning_page({"well": probe_rows(steps=(0, 10)), "ill": broken(rows, 10, 2)}).to_html())
    assert headings(text, 1) == ["NaN in ill between steps 0 and 10, first in block 2's attention output"]
    assert "At step 0 of ill, the last without NaN, log κ" in re.search('<p class="lead">(.*?)</p>', text)[1]


def test_losses_of_runs_are_compared_with_and_without_probes(probe_rows):
    runs = [shown("plain", loss=4.0), shown("probed", model="deit", probe=probe_rows(blocks=2, steps=(0, 30)))]
    html = run_page(runs).to_html()
    assert "2 runs compared" in html
    assert headings(html, 2)[:4] == ["By block and site", "Worst blocks first", "The runs", "Over training"]
    assert [title for title in headings(html, 3) if title in TRAINING] == TRAINING
    for cells in (["plain", "", "30", "1.333", "6.000", "62.5%"], ["probed", "deit", "30", "0.6667", "3.000", "62.5%"]):
        assert re.search("".join(rf"<td[^>]*>{re.escape(cell)}</td>" for cell in cells), html)
    assert headings(run_page([shown("a"), shown("b")]).to_html(), 2) == [
        "The runs",
        "Over training",
        "Condition numbers",
    ]
