import re
import subprocess
import sys

import pytest

from wellcond.report import Page, Series, bullets, code_block, line_chart, note, section, table, tag, tiles


def test_a_page_is_written_whole(tmp_path):
    page = Page("A <title>", "A lead & more.", footer=["the <end>"])
    page.add(section("One", "first", tag("b", "bold")), "loose text")
    path = page.write(tmp_path / "new" / "page.html")
    text = path.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>\n<html lang=")
    assert "<title>A &lt;title&gt;</title>" in text
    assert '<section id="one"><h2>One</h2><p>first</p><b>bold</b></section><p>loose text</p>' in text
    assert "the &lt;end&gt;" in text
    assert 'name="viewport"' in text


def test_a_page_asks_for_nothing_from_outside():
    page = Page("Title")
    page.add(line_chart([Series("a", [1, 2], [3.0, 4.0])], title="C", x="x", y="y"))
    text = page.to_html()
    assert "default-src &#x27;none&#x27;" in text
    outside = set(re.findall(r"""(?:src|href)=["']?(\w+:)""", text)) | set(re.findall(r"url\((\w+)", text))
    assert outside <= {"data:"}
    assert "@import" not in text


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
    code = "import sys; sys.modules['torch'] = None; from wellcond.report import Page; print(len(Page('x').to_html()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 1000
