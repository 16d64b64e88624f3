"""Pages in a real browser: they open from a file, ask for nothing, and their downloads, colours and layout work."""

import csv
import math
import re
import xml.etree.ElementTree as ElementTree

import pytest

from wellcond.demo import demo
from wellcond.demo import graying as demo_graying
from wellcond.report import Axis, Page, Series, line_chart, section

PHONE, DESKTOP = {"width": 360, "height": 640}, {"width": 1200, "height": 900}

COMPUTED_COLORS = """() => {
  const body = getComputedStyle(document.body);
  const drawn = [...document.querySelectorAll("figure.chart text, figure.chart path.line")].map(getComputedStyle);
  return [body.backgroundColor, body.color, ...drawn.map((style) => style.fill + style.stroke)];
}"""


@pytest.fixture(scope="module")
def demo_page(tmp_path_factory):
    quick = ["epochs=1", "model_kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2", "batch_size=256"]
    return demo.run(tmp_path_factory.mktemp("demo"), settings=quick)


@pytest.fixture(scope="module")
def hostile_page(tmp_path_factory):
    """Names and values chosen to break markup, script and CSV."""
    names = ['a, "b"', "</script><script>alert(1)</script>", "line\nbreak", "<b>κ</b>", "=1+1", "plain"]
    values = [
        [1.0, math.nan, 3.0],
        [0.0, -1.0, 5.0],
        [math.inf, 2.0, 1.0],
        [1e-300, 1.0, 1e300],
        [2.0] * 3,
        [math.nan] * 3,
    ]
    lines = [Series(name, [0, 1, 2], ys) for name, ys in zip(names, values, strict=True)]
    page = Page("A <hostile> page & more")
    page.add(section("Charts", line_chart(lines, title="</title>", x='x "y"', y=Axis("<y>", log=True))))
    return page.write(tmp_path_factory.mktemp("hostile") / "page.html")


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP], ids=["phone", "desktop"])
@pytest.mark.parametrize("which", ["demo_page", "hostile_page"])
def test_nothing_is_wider_than_the_screen(visit, request, which, viewport):
    page = visit(request.getfixturevalue(which), viewport=viewport)
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport["width"]
    assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth > 0)")


def test_dark_and_light_differ(visit, demo_page):
    seen = []
    for scheme in ("light", "dark"):
        page = visit(demo_page, scheme=scheme)
        seen.append(page.evaluate(COMPUTED_COLORS))
    assert all(light != dark for light, dark in zip(*seen, strict=True))


def test_charts_download_as_svg_and_csv(visit, demo_page, tmp_path):
    page = visit(demo_page)
    figure = page.locator("#china-svd-graying-spectrum")
    for ending in ("svg", "csv"):
        with page.expect_download() as download:
            figure.locator(f'a[download$=".{ending}"]').click()
        assert download.value.suggested_filename == f"china-svd-graying-spectrum.{ending}"
        download.value.save_as(tmp_path / f"chart.{ending}")
    root = ElementTree.parse(tmp_path / "chart.svg").getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    with open(tmp_path / "chart.csv", encoding="utf-8", newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["index", "as it is", "ε = 0.95", "ε = 0.9", "ε = 0.7", "ε = 0.5"]
    assert len(rows) == 196
    assert 1 / float(rows[-1][1]) == pytest.approx(
        demo_graying.measure(demo_graying.load_photographs()[0], "none", 1.0).kappa, rel=1e-5
    )
    visit(tmp_path / "chart.svg")


def test_pictures_download(visit, demo_page, tmp_path):
    page = visit(demo_page)
    with page.expect_download() as download:
        page.locator(".picture a").first.click()
    assert download.value.suggested_filename == "china-patches.jpg"
    download.value.save_as(tmp_path / "picture.jpg")
    assert (tmp_path / "picture.jpg").read_bytes()[:3] == b"\xff\xd8\xff"


def test_values_are_read_off_by_pointer_and_by_keys(visit, demo_page):
    page = visit(demo_page)
    figure = page.locator("#log-kappa-against-epsilon")
    reading = figure.locator(".reading")
    assert not reading.is_visible()
    figure.locator("svg").hover(position={"x": 5, "y": 100})
    assert reading.inner_text().startswith("ε 1\n")
    page.mouse.move(1, 1)
    assert not reading.is_visible()
    figure.locator("svg").focus()
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    text = reading.inner_text()
    assert text.startswith("ε 0.6\n")
    assert re.search(r"china SVD: \d\.\d+", text)
    page.keyboard.press("Escape")
    assert not reading.is_visible()


def test_a_readout_stays_inside_its_figure_on_a_phone(visit, demo_page):
    page = visit(demo_page, viewport=PHONE)
    figure = page.locator("#china-svd-graying-spectrum")
    for x in (60, 150, 220):
        figure.locator("svg").hover(position={"x": x, "y": 100})
        inner, outer = figure.locator(".reading").bounding_box(), figure.bounding_box()
        assert inner["x"] >= outer["x"]
        assert inner["x"] + inner["width"] <= outer["x"] + outer["width"]
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_hostile_names_stay_text(visit, hostile_page, tmp_path):
    page = visit(hostile_page)
    assert page.title() == "A <hostile> page & more"
    figure = page.locator("figure.chart")
    figure.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    text = figure.locator(".reading").inner_text()
    assert 'x "y" 0' in text
    assert 'a, "b": 1' in text
    assert "<b>κ</b>: 1.00e−300" in text
    assert "break: ∞" in text
    assert "plain: NaN" in text
    with page.expect_download() as download:
        figure.locator('a[download$=".svg"]').click()
    download.value.save_as(tmp_path / "chart.svg")
    visit(tmp_path / "chart.svg")
