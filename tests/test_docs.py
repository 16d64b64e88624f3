"""What the README and the guides show works as written, and their links lead somewhere."""

import re
from pathlib import Path

import pytest
import timm

from wellcond.attention import ATTENTIONS
from wellcond.claims.catalogue import CLAIMS
from wellcond.claims.measurements import MEASUREMENTS
from wellcond.data.sources import SOURCES
from wellcond.train.config import TASK_KINDS
from wellcond.train.tasks import TASKS

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.fixture(autouse=True)
def _what_pages_register_stays_there():
    registries = (ATTENTIONS, CLAIMS, SOURCES, MEASUREMENTS, TASKS, TASK_KINDS)
    before = [dict(registry) for registry in registries]
    yield
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    create = timm.create_model  # a smaller model does what the one shown does, and is built in a tenth of the time

    def smaller(name, pretrained=False, **kwargs):  # and there is no network here
        return create(name.replace("base", "tiny"), **kwargs)

    monkeypatch.setattr(timm, "create_model", smaller)
    scope = {"__name__": "docs"}
    for block in blocks:
        exec(compile(block, page.name, "exec"), scope)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    targets = re.findall(r"\]\(([^)#]+)\)", text) + re.findall(r'(?:src|srcset|href)="([^"#]+)"', text)
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert missing == []


def test_the_readme_starts_with_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```sh\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)[1]
    assert [line.split("#")[0].strip() for line in block.splitlines()] == ["make demo", "make test"]
