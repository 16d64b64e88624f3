"""Claims as somebody else's package adds them: with what `wellcond` and `wellcond.claims` offer, and nothing else."""

from pathlib import Path

import pytest
from rich.console import Console

import wellcond
from wellcond.claims import CLAIMS, SKIPS, Arm, Claim, Measured, TrainedArms, ledger, reproduce
from wellcond.records import read_json
from wellcond.verdicts import at_least, within

QUICK = ["epochs=1", "batch_size=256", "model_kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2"]
ARMS = {"both": SKIPS["both"], "svd": Arm(title="SVD graying", settings={"gray": "svd", "epsilon": 0.7})}


def bars(sets):
    import altair as alt

    rows = [{"arm": arm, "top1": value} for found in sets for arm in ARMS for value in found.values(arm).values()]
    return alt.Chart(alt.Data(values=rows)).mark_bar().encode(x="arm:N", y="mean(top1):Q")


GRAYING = TrainedArms(
    id="their-graying", claim="SVD graying costs no accuracy", test="CIFAR-10, two arms", holds_if="within a point",
    arms=ARMS, sets=("cifar10",), asks="drop within ± 1 point", figure=bars,
    judge=lambda found: [within("drop within ± 1 point", list(found.drops("svd").values()), 1.0)],
    summary=lambda found: [f", {arm}: {found.interval(found.values(arm).values())}" for arm in found.trained],
)  # fmt: skip
NORMS = Measured(
    id="their-norms", claim="κ of a product is at most the product of κ", test="three matrices", holds_if="never above",
    measure=lambda options: {"room": [0.5, 0.6, 0.4]},
    judge=lambda record: [at_least("room ≥ 0", record["room"], 0.0)],
    summary=lambda record: [f"the least room is {min(record['room'])}"],
)  # fmt: skip


@pytest.fixture(autouse=True)
def _registered():
    for one in (GRAYING, NORMS):
        wellcond.register_claim(one)
    yield
    for one in (GRAYING, NORMS):
        del CLAIMS[one.id]


def run(id_, folder: Path, **options):
    places = {"output": folder / "runs", "evidence": folder / "evidence", "console": Console(quiet=True)}
    return reproduce(id_, **places, **options)


def test_trained_arms_get_tuning_seeds_rules_and_the_runs_of_others(tmp_path):
    assert run("their-graying", tmp_path, scale="smoke", settings=QUICK) == 0
    record = read_json(tmp_path / "evidence" / "their-graying" / "smoke-digits.json")
    assert [run["seed"] for run in record["arms"]["svd"]["runs"]] == [0, 1]
    assert "gray" not in record["settings"]
    svd = tmp_path / "runs" / "smoke" / record["arms"]["svd"]["runs"][0]["run"]
    assert read_json(svd / "result.json")["config"]["gray"] == "svd"
    whole = CLAIMS["their-graying"].verdict([record], sets=["digits"])
    assert (whole.verdict, whole.parts[0].name) == ("undecided", "Digits: drop within ± 1 point")
    assert "a smoke run" in whole.parts[0].why
    # asa-fig1c's plain arm is the same training: it is there already.
    assert (tmp_path / "runs" / "smoke" / "digits" / "vit_tiny" / "both" / "grid-0.001" / "result.json").exists()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("both/*/result.json")}
    assert run("asa-fig1b", tmp_path, scale="smoke", settings=QUICK) == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("both/*/result.json")} == before


def test_a_measurement_is_a_claim_of_its_own_kind(tmp_path):
    assert run("their-norms", tmp_path, scale="lab") == 0
    record = read_json(tmp_path / "evidence" / "their-norms" / "lab.json")
    assert record["verdict"]["verdict"] == "holds"
    assert record["environment"]["versions"]["torch"]


def test_the_ledger_shows_them_where_they_have_evidence(tmp_path):
    evidence, page = tmp_path / "evidence", tmp_path / "claims.md"
    evidence.mkdir()
    ledger.run(evidence, page)
    assert "their-" not in page.read_text(encoding="utf-8")
    run("their-norms", tmp_path, scale="lab")
    ledger.run(evidence, page)
    text = page.read_text(encoding="utf-8")
    assert "**holds**" in text
    assert "the least room is 0.4" in text
    assert ledger.check(evidence, page) == ""


def test_the_papers_scale_is_planned_for_them(tmp_path, capsys):
    assert reproduce("their-graying", scale="paper", output=tmp_path, console=Console(width=200)) == 0
    assert "1 sets × 2 arms" in capsys.readouterr().out


def test_a_stated_claim_says_that_it_is_not_built():
    wellcond.register_claim(Claim(id="their-idea", claim="a", test="b", holds_if="c"))
    try:
        with pytest.raises(ValueError, match="their-idea cannot be run yet"):
            reproduce("their-idea", scale="smoke")
    finally:
        del CLAIMS["their-idea"]
