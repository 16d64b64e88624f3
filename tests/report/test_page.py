import subprocess
import sys

import pytest

from wellcond.report import Page, bullets, code_block, note, section, slider, table, tag, tiles


def test_a_page_is_written_whole(tmp_path):
    page = Page("A <title>", "A lead & more.", footer=["the <end>"])
    page.add(section("One", "first", tag("b", "bold")), "loose text")
    path = page.write(tmp_path / "new" / "page.html")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>\n<html lang=")
    assert "<title>A &lt;title&gt;</title>" in text
    assert "<p>first</p><b>bold</b></section><p>loose text</p>" in text
    assert '<section id="one"><h2>One<a href="#one"' in text
    assert '<meta property="og:title" content="A &lt;title&gt;">' in text
    assert '<meta property="og:description" content="A lead &amp; more.">' in text
    assert "the &lt;end&gt;" in text
    assert 'name="viewport"' in text


def test_contents_link_to_the_parts():
    page = Page("Title")
    page.add(section("First κ", "x"), section("Second", "y"))
    assert (
        '<nav aria-label="Contents"><a href="#first-kappa">First κ</a><a href="#second">Second</a></nav>'
        in page.to_html()
    )


def test_a_slider_needs_something_to_slide_over():
    assert slider("step", [7], "step") is None
    html = slider("step", [0, 1000], "step")
    assert 'data-values="[0, 1000]"' in html
    assert "<output>1,000</output>" in html


def test_tables():
    html = table(
        ["name", "value"], [["<a>", 3566.88], ["<a>", "x"], ["b", None]], numeric={1}, groups=True, caption="C"
    )
    assert html.count("&lt;a&gt;") == 1
    assert '<td class="number">3,567</td>' in html
    assert html.count('class="group"') == 2
    assert '<p class="caption">C</p>' in html
    with pytest.raises(ValueError, match="a row of 1 cells does not fit the 2 columns name, value"):
        table(["name", "value"], [["a"]])


def test_small_things_escape_their_text():
    for html in (
        bullets("<x>"),
        code_block("<x>"),
        note("<x>", "y"),
        note("y", "<x>"),
        tiles(("<x>", "y", "z")),
        section("<x>"),
    ):
        assert "<x>" not in html
        assert "&lt;x&gt;" in html


def test_the_report_works_without_torch():
    code = """import sys; sys.modules["torch"] = None
from wellcond.report import page; page._charting = lambda: ""; print(len(page.Page("x").to_html()))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000
