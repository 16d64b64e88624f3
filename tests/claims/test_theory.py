"""`wellcond theory`: what it prints, writes and exits with."""

import re
import shutil
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from wellcond import cli, records
from wellcond.claims.theory import write_page
from wellcond.theory import STATEMENTS, statement

ROOT = Path(__file__).parents[2]


@pytest.fixture
def theory(monkeypatch, capsys, tmp_path):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("COLUMNS", "200")
        monkeypatch.setattr(sys, "argv", ["wellcond", "theory", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        return exit_.value.code or 0, *capsys.readouterr()

    return run


def test_a_statement_that_does_not_hold_is_a_result(theory, tmp_path):
    code, out, _ = theory("sky-lemma3", "sky-lemmaC1", "--draws", "80", "--seed", "3", "--page", "page/theory.md")
    assert code == 0
    assert re.search(r"sky-lemma3 .* holds in part", out)
    assert "wrote 2 files to evidence/theory" in out
    record = records.read_json(tmp_path / "evidence" / "theory" / "sky-lemma3.json")
    assert (record["verdict"], record["seed"], record["draws"]) == ("holds in part", 3, 80)
    assert record["trained"] == "none was given"
    assert "theory sky-lemma3 sky-lemmaC1 --draws 80" in record["environment"]["command"]
    page = (tmp_path / "page" / "theory.md").read_text(encoding="utf-8")
    for name in ("sky-lemma3", "sky-lemmaC1"):
        assert f"(theory/{name}.md)" in page
        assert ET.parse(tmp_path / "page" / "images" / f"theory-{name}.svg").getroot().tag.endswith("svg")
    assert "(../evidence/theory)" in page
    own = (tmp_path / "page" / "theory" / "sky-lemma3.md").read_text(encoding="utf-8")
    assert "(../../evidence/theory/sky-lemma3.json)" in own
    assert "(../images/theory-sky-lemma3.svg)" in own
    assert f"| {record['cases'][0]['draws']} |" in own


def test_the_files_alone_make_the_same_page(theory, tmp_path):
    theory("sky-lemmaC1", "--draws", "40", "--page", "theory.md")
    first = (tmp_path / "theory.md").read_text(encoding="utf-8")
    write_page([tmp_path / "evidence" / "theory" / "sky-lemmaC1.json"], tmp_path / "theory.md")
    assert (tmp_path / "theory.md").read_text(encoding="utf-8") == first


def test_the_page_names_every_commit_that_wrote_a_file(tmp_path):
    files = [tmp_path / f"{name}.json" for name in ("sky-lemma1", "sky-lemma3", "sky-lemmaC1")]
    for path, commit in zip(files, ("a1", "a1", "b2"), strict=True):
        record = records.read_json(ROOT / "evidence" / "theory" / path.name)
        record["environment"] |= {"commit": commit, "versions": {"torch": "2.11"}}
        records.write_json(path, record)
    last = write_page(files, tmp_path / "theory.md").read_text(encoding="utf-8").splitlines()[-1]
    assert last == "Written with torch 2.11, commit a1; torch 2.11, commit b2."


@pytest.mark.parametrize("name", STATEMENTS)
def test_the_evidence_says_what_the_statement_says_and_checks_its_theorems(name):
    record = records.read_json(ROOT / "evidence" / "theory" / f"{name}.json")
    said = statement(name).as_dict()
    assert {key: record[key] for key in said} == said  # `wellcond theory` writes it anew
    for fact in record["instead"]:
        checks = [case for case in record["cases"] if case["settings"].get("fact") == fact["key"]]
        if fact["mark"] == "theorem":
            assert any(case["outcome"] == "holds" for case in checks), fact["key"]
            assert not any(case["outcome"] == "does not hold" for case in checks), fact["key"]
    keys = {fact["key"] for fact in record["instead"]}
    assert {case["settings"]["fact"] for case in record["cases"] if "fact" in case["settings"]} <= keys


def test_the_page_is_that_of_the_evidence(tmp_path):
    shutil.copytree(ROOT / "evidence" / "theory", tmp_path / "evidence" / "theory")
    files = [tmp_path / "evidence" / "theory" / f"{name}.json" for name in STATEMENTS]
    page = write_page(files, tmp_path / "docs" / "theory.md")
    written = [page, *sorted((tmp_path / "docs" / "theory").glob("*.md"))]
    assert len(written) == 1 + len(STATEMENTS)
    for path in written:
        there = ROOT / path.relative_to(tmp_path)
        assert path.read_text(encoding="utf-8") == there.read_text(encoding="utf-8"), there
    names = {path.name for path in written[1:]}
    assert {path.name for path in (ROOT / "docs" / "theory").glob("*.md")} == names
    text = "".join(path.read_text(encoding="utf-8") for path in written)
    assert text.count("*Theorem.*") == text.count("*Proof.*") > 10
    assert text.count("## What is true") == len(STATEMENTS)


def test_an_unknown_statement_exits_2_with_the_list(theory, tmp_path):
    code, _, err = theory("asa-prop43")
    assert code == 2
    assert "asa-prop41" in err
    assert "sky-lemma3" in err
    assert list(tmp_path.iterdir()) == []


def test_too_few_draws_exit_2(theory):
    assert theory("--draws", "5")[0] == 2


def test_a_page_of_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="run the statements first"):
        write_page([], tmp_path / "theory.md")
