"""The documentation site: it builds, every link leads somewhere, it needs no network, and no public name is missing."""

import importlib
import os
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

import wellcond

ROOT = Path(__file__).parent.parent
INTERNAL = {"cli", "bench", "demo", "measure", "progress"}  # what commands do; the commands have a page


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class Found(HTMLParser):
    """What a page points to, what it loads, and the places in it that others may point to."""

    def __init__(self, text: str):
        super().__init__()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        self.loads += [given[name] for name in ("src", "srcset", "data-src") if name in given]
        if "href" in given:
            (self.loads if tag == "link" else self.links).append(given["href"])


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Found]:
    here = [path for path in site.rglob("*.html") if path.name != "404.html"]
    return {path: Found(path.read_text(encoding="utf-8")) for path in here}


def test_links_lead_somewhere_and_nothing_is_loaded_from_elsewhere(site, pages):
    assert len(pages) > 50
    broken, foreign = [], []
    for path, found in pages.items():
        foreign += [(path, load) for load in found.loads if urlsplit(load).scheme in ("http", "https")]
        for link in [*found.links, *found.loads]:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            there = target.is_relative_to(site) and target.exists()
            place = not parts.fragment or target not in pages or unquote(parts.fragment) in pages[target].ids
            broken += [] if there and place else [(path, link)]
    assert (broken, foreign) == ([], [])


def test_every_public_name_has_its_place_in_the_reference(site, pages):
    """Names of every package and top-level module, by each path that they are imported from."""
    inventory = zlib.decompress((site / "objects.inv").read_bytes().split(b"\n", 4)[4]).decode()
    known = {line.split(" ")[0] for line in inventory.splitlines()}
    known |= set().union(*(found.ids for path, found in pages.items() if path.parent.name == "reference"))
    wanted = {f"wellcond.{name}" for name in wellcond.__all__ if name != "__version__"}
    for path in (ROOT / "src" / "wellcond").iterdir():
        file = path / "__init__.py" if path.is_dir() else path
        if path.stem in INTERNAL or path.name.startswith("_") or file.suffix != ".py" or not file.exists():
            continue
        module = importlib.import_module(f"wellcond.{path.stem}")
        wanted |= {f"wellcond.{path.stem}.{name}" for name in getattr(module, "__all__", ())}
    assert len(wanted) > 200
    assert wanted - known == set()


def test_markdown_is_rendered_inside_details_and_lists(pages):
    for path in pages:
        text = re.sub(r"<(pre|code)\b.*?</\1>", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r"<script\b.*?</script>", "", text, flags=re.DOTALL)
        raw = re.findall(r"\|--.*|<p>\|.*|\]\([^)\s]+\).*|^- \*\*.*|\*\*\w+\*\*", text, flags=re.MULTILINE)
        assert raw == [], path
    claims = next(path for path in pages if path.name == "claims.html").read_text(encoding="utf-8")
    assert re.search(r"<details.*?<li>.*?</details>", claims, flags=re.DOTALL)


def test_notebooks_are_shown_with_what_they_draw(site):
    for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"):
        page = (site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
        assert page.count("data:image/svg+xml;base64,") >= 2
        assert (site / "notebooks" / path.name).exists()


def test_search_works_on_pages_that_are_opened_as_files(site, browser):
    tab = browser.new_page()
    asked = []
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto((site / "theory" / "asa-prop41.html").as_uri())
    tab.keyboard.press("s")
    tab.locator("input.md-search__input").press_sequentially("remove_skip")
    first = tab.locator(".md-search-result__item a").first
    first.wait_for()
    assert "reference/" in first.get_attribute("href")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    tab.close()
