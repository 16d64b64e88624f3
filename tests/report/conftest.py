"""What the tests of pages share: rows as a probe would write them, and a browser that holds a page to its promises."""

import contextlib
import math

import pytest

from wellcond.records import row
from wellcond.report import charts, page

DESKTOP = {"width": 1200, "height": 900}
LEVELS = {"in": 5.5, "sa": 12.0, "+sa": 6.0, "mlp": 7.0, "+mlp": 6.0}
CEILING = math.log(2**23)


@pytest.fixture(scope="session")
def probe_rows():
    """A maker of rows: a trained ViT's levels, deeper blocks and later steps a little worse, all of it computed."""

    def make(
        *,
        steps=(0,),
        blocks=12,
        sites=("sa", "+sa", "mlp", "+mlp"),
        shift=0.0,
        sigma=(),
        attention=False,
        outside=(),
        brief=False,
    ):
        rows = []

        def add(name, value, step, index, site, status="ok"):
            block = f"blocks.{index}" if index >= 0 else ""
            fields = {"run": "r", "step": step, "block": block, "index": index, "site": site, "name": name}
            rows.append(row(**fields, value=value, count=64, dtype="float32", status=status))

        def add_site(step, index, site, level):
            capped = max(0, round(8 * (level - 14)))
            status = "ceiling" if capped else "ok"
            add("log_kappa", min(level, CEILING), step, index, site, status)
            add("capped", min(64, capped), step, index, site)
            if brief:
                return
            add("log_kappa_max", min(level + 1, CEILING), step, index, site, status)
            add("sigma_max", 30.0, step, index, site)
            add("sigma_min", 30.0 * math.exp(-level), step, index, site)
            add("stable_rank", 40.0 - index, step, index, site)
            add("effective_rank", 90.0 - index, step, index, site)
            add("excluded", 0, step, index, site)

        for k, step in enumerate(steps):
            drift = 2.0 * k / max(1, len(steps) - 1)
            for site in outside:
                add_site(step, -1, site, 8.6 if site == "tokens" else 4.4)
            for index in range(blocks):
                wave = math.sin(1.7 * index) * 0.6 + 0.1 * index
                for site in sites:
                    level = LEVELS[site] + shift + wave + drift * (1.0 if site == "sa" else 0.4)
                    add_site(step, index, site, level)
                    for i in sigma:
                        add(f"sigma.{i}", math.exp(-level * (i / max(sigma)) ** 0.5), step, index, site)
                if attention:
                    add("attention_entropy", 4.5 - 0.3 * index, step, index, "sa")
                    add("largest_logit", 4.0 * math.exp(0.28 * index), step, index, "sa")
        return rows

    return make


@pytest.fixture(scope="module")
def without_vega():
    """Pages without the script that draws, a megabyte that takes two seconds to make, for tests of their words."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "_charting", lambda: "")
        yield


@pytest.fixture(scope="module")
def without_drawing(without_vega):
    """Pages whose charts have rows and no drawings: Altair takes 25 ms for one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(charts.Chart, "spec", {})
        yield


@pytest.fixture
def visit(browser):
    """Open a page and hold it to its promises: no error, no message, no request beyond its own file."""
    with visits(browser) as open_page:
        yield open_page


@pytest.fixture(scope="module")
def visit_once(browser):
    """The same for a page that several tests use, one after the other."""
    with visits(browser) as open_page:
        yield open_page


@contextlib.contextmanager
def visits(browser):
    opened = []

    def open_page(path, *, viewport=DESKTOP, scheme="light", script=True):
        context = browser.new_context(
            viewport=viewport, color_scheme=scheme, accept_downloads=True, java_script_enabled=script
        )
        tab = context.new_page()
        complaints, requests = [], []
        tab.on("console", lambda message: complaints.append(message.text))
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("request", lambda request: requests.append(request.url))
        tab.goto(path.as_uri())
        tab.wait_for_selector("html[data-drawn]" if script and path.suffix == ".html" else ":root")
        opened.append((context, path, complaints, requests))
        return tab

    yield open_page
    for context, path, complaints, requests in opened:
        context.close()
        assert complaints == []
        assert [url for url in requests if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
