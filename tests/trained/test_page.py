"""The numbers in docs/trained.md are those of the evidence, and its page and picture are there, small and its own."""

import math
import re
import sys
from pathlib import Path

import pytest

from wellcond import records

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "trained.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("title", "name", "key"),
    [
        ("CIFAR-10 ViT", "cifar10-vit", "mean log_kappa"),
        ("Galileo-Nano, float64", "galileo-nano", "mean log_kappa in float64"),
    ],
)
def test_the_tables_say_what_was_measured(title, name, key):
    measured = records.read_json(ROOT / "evidence" / "trained" / f"{name}.json")[key]
    table = re.search(
        rf"^\| {title} \|(.*)\n\|[-|]+\n\| untrained \|(.*)\n\| trained \|(.*)\n", TEXT, flags=re.MULTILINE
    )
    assert table, f"docs/trained.md has no table {title}"
    sites, untrained, trained = ([cell.strip(" `≥") for cell in row.split("|")[:-1]] for row in table.groups())
    for which, cells in (("untrained", untrained), ("trained", trained)):
        assert cells == [f"{measured[which][site]:.2f}" for site in sites]


def test_the_sentences_say_what_was_measured():
    cifar = records.read_json(ROOT / "evidence" / "trained" / "cifar10-vit.json")
    entropy = cifar["mean attention_entropy"]
    float64 = cifar["mean log_kappa in float64"]["untrained"]["sa"]
    assert f"{100 * cifar['accuracy']:.2f} %" in TEXT
    assert f"fell from {entropy['untrained']:.2f}," in TEXT
    assert f"to {entropy['trained']:.2f}." in TEXT
    assert f"in float64 the mean of `sa` there is {float64:.2f}" in TEXT
    assert cifar["largest distance of log_kappa from float64"] < 0.001
    rows = {which: kappas(cifar[f"rows{of}"]) for which, of in (("trained", ""), ("start", " of the untrained model"))}
    assert sum(row["status"] == "ceiling" for row in rows["start"].values()) == 3
    assert all(rows["trained"][place]["value"] < row["value"] for place, row in rows["start"].items())
    for site in ("sa", "+sa", "mlp", "+mlp"):  # κ grows with depth, from the second block on
        values = [rows["trained"][index, site]["value"] for index in range(1, 6)]
        assert values == sorted(values)
    assert all(row["status"] == "ok" for row in cifar["rows of a float64 copy of the untrained model"])


def test_the_sentences_on_galileo_say_what_was_measured():
    record = records.read_json(ROOT / "evidence" / "trained" / "galileo-nano.json")
    single, double = kappas(record["rows"]), kappas(record["rows of a float64 copy"])
    assert all(single[index, "sa"]["status"] == "ceiling" for index in range(4))
    assert double[0, "sa"]["status"] == "ceiling"
    assert double[0, "sa"]["value"] == pytest.approx(
        -math.log(sys.float_info.epsilon)
    )  # every sample is at the ceiling
    assert f"`+sa` of that block, {double[0, '+sa']['value']:.2f}," in TEXT
    sums = {place: row["value"] for place, row in double.items() if place[1].startswith("+")}
    assert max(sums, key=sums.get) == (0, "+sa")
    singular = record["condition of the attention's weights"]
    assert len(singular) == 4 * 4
    assert f"has a κ above {max(singular.values()):.0e};" in TEXT


def kappas(rows):
    return {(row["index"], row["site"]): row for row in rows if row["name"] == "log_kappa"}


def test_page_and_picture_are_small_and_need_no_network():
    page, picture = (ROOT / "docs" / "trained" / f"cifar10-vit.{kind}" for kind in ("html", "png"))
    assert page.stat().st_size < 1.5e6
    assert picture.stat().st_size < 300e3
    html = page.read_text(encoding="utf-8")
    assert "Content-Security-Policy" in html
    assert not re.search(r"""(?:src|href)=["']?https?:""", html)
    cifar = records.read_json(ROOT / "evidence" / "trained" / "cifar10-vit.json")
    assert all(note in html for note in cifar["notes"])  # the page and the record are of the same measurement
