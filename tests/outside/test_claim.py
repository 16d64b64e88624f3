"""Claims as somebody else's package adds them: with what `wellcond` and `wellcond.claims` offer, and nothing else."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

import wellcond
from wellcond.claims import CLAIMS, SKIPS, Arm, Claim, Measured, TrainedArms, ledger, register_measurement, reproduce
from wellcond.claims.measurements import MEASUREMENTS
from wellcond.records import read_json, write_json
from wellcond.verdicts import at_least, within

QUICK = ["epochs=1", "batch_size=256", "model_kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2"]
TINY = {"patch_size": 4, "depth": 1, "embed_dim": 16, "num_heads": 2}
ARMS = {"both": SKIPS["both"], "svd": Arm(title="SVD graying", settings={"gray": "svd", "epsilon": 0.7})}


def bars(sets):
    import altair as alt

    rows = [{"arm": arm, "top1": value} for found in sets for arm in ARMS for value in found.values(arm).values()]
    return alt.Chart(alt.Data(values=rows)).mark_bar().encode(x="arm:N", y="mean(top1):Q")


def histogram(values):
    import altair as alt

    return alt.Chart(alt.Data(values=[{"room": value} for value in values])).mark_bar().encode(
        x=alt.X("room:Q", bin=True), y="count()"
    )  # fmt: skip


GRAYING = TrainedArms(
    id="their-graying", claim="SVD graying costs no accuracy", test="CIFAR-10, two arms", holds_if="within a point",
    arms=ARMS, sets=("cifar10",), asks="drop within ± 1 point", figure=bars,
    judge=lambda found: [within("drop within ± 1 point", list(found.drops("svd").values()), 1.0)],
    summary=lambda found: [f", {arm}: {found.interval(found.values(arm).values())}" for arm in found.trained],
)  # fmt: skip


def room(options):
    """ln of κ(A)κ(B)/κ(AB) for square matrices: with them the product rule holds, so that it is never below 0."""
    draws = {"smoke": 8, "lab": 64}[options.scale]
    a, b = torch.randn(2, draws, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    kappa = wellcond.condition_number
    return {"room": (kappa(a) * kappa(b) / kappa(a @ b)).log().tolist()}


NORMS = Measured(
    id="their-norms", claim="κ of a product is at most the product of κ", test="pairs of square Gaussian matrices",
    holds_if="the interval of the room, ln κ(A)κ(B)/κ(AB), above 0", measure=room,
    judge=lambda record: [at_least("room ≥ 0", record["room"], 0.0)],
    summary=lambda record: [f"the least room of {len(record['room'])} pairs is {min(record['room']):.3f}"],
    figure=lambda record: histogram(record["room"]),
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
    assert len(record["room"]) == 64
    assert min(record["room"]) >= 0
    assert record["verdict"]["verdict"] == "holds"
    assert record["environment"]["versions"]["torch"]
    assert run("their-norms", tmp_path, scale="smoke") == 0
    smoke = read_json(tmp_path / "evidence" / "their-norms" / "smoke.json")
    assert smoke["verdict"]["verdict"] == "undecided"  # a smoke run decides nothing


def test_a_measurement_is_told_where_its_data_lie_and_what_others_have_trained(tmp_path):
    told = []

    def measure(options):
        told.append((options.data, options.results("digits/*/*/seed-*")))
        return {"room": [1.0, 1.0]}

    wellcond.register_claim(replace(NORMS, id="their-look", measure=measure, sets=("cifar10",)))
    try:
        result = tmp_path / "runs" / "lab" / "digits" / "vit_tiny" / "both" / "seed-0" / "result.json"
        write_json(result, {"status": "finished"})
        data = tmp_path / "images"
        data.mkdir()
        assert run("their-look", tmp_path, scale="lab", data_dirs=[f"cifar10={data}"]) == 0
    finally:
        del CLAIMS["their-look"]
    ((data, results),) = told
    assert [one.set.title for one in data] == ["CIFAR-10"]
    assert results == [{"status": "finished"}]


def test_arms_may_differ_in_model_in_seeds_and_in_what_is_measured_of_them(tmp_path):
    """No grid, an arm of another recipe, one for exploration alone, κ in the course, and a measurement of their own."""
    if "their-norm" not in MEASUREMENTS:
        register_measurement("their-norm")(lambda config, folder, device: {"epochs": config.epochs})
    arms = {
        "both": SKIPS["both"],
        "linear": Arm(title="linear attention", settings={"attention": "linear"}, seeds=1),
        "digits": Arm(title="another model", recipe="digits", settings={"model_kwargs": {"img_size": 8, **TINY}}),
    }
    claim = replace(
        GRAYING, id="their-models", arms=arms, grid={}, keeps=("log_kappa",), measures=("log_kappa", "their-norm"),
        settings={"smoke": {"probe_marks": True}}, figure=None,
        judge=lambda found: [within("no drop", list(found.drops("both", of="digits").values()), 1.0)],
    )  # fmt: skip
    wellcond.register_claim(claim)
    try:
        assert run("their-models", tmp_path, scale="smoke", settings=["epochs=1", "batch_size=256"]) == 0
    finally:
        del CLAIMS["their-models"]
    record = read_json(tmp_path / "evidence" / "their-models" / "smoke-digits.json")
    runs = {arm: found["runs"] for arm, found in record["arms"].items()}
    assert {arm: len(of_arm) for arm, of_arm in runs.items()} == {"both": 2, "linear": 1, "digits": 2}
    assert runs["digits"][0]["run"].startswith("digits/digits/digits/seed-0-lr-")
    assert runs["both"][0]["their-norm"] == {"epochs": 1}
    assert len(runs["both"][0]["measured"]["log_kappa"]["sa"]) == len(runs["both"][0]["measured"]["steps"]) > 2
    assert not list((tmp_path / "runs").rglob("grid-*"))
    assert "linear" not in claim.needed


def test_the_ledger_shows_them_where_they_have_evidence(tmp_path):
    evidence, page = tmp_path / "evidence", tmp_path / "claims.md"
    evidence.mkdir()
    ledger.run(evidence, page)
    assert "their-" not in page.read_text(encoding="utf-8")
    run("their-norms", tmp_path, scale="lab")
    ledger.run(evidence, page)
    text = page.read_text(encoding="utf-8")
    assert "**holds**" in text
    assert "the least room of 64 pairs is" in text
    assert (evidence / "their-norms" / "lab.svg").exists()
    assert ledger.check(evidence, page) == ""


def test_the_papers_scale_is_planned_for_them(tmp_path, capsys):
    assert reproduce("their-graying", scale="paper", output=tmp_path, console=Console(width=200)) == 0
    assert "on CIFAR-10: grids and seeds together 12 trainings" in capsys.readouterr().out


def test_a_stated_claim_says_that_it_is_not_built():
    wellcond.register_claim(Claim(id="their-idea", claim="a", test="b", holds_if="c"))
    try:
        with pytest.raises(ValueError, match="their-idea cannot be run yet"):
            reproduce("their-idea", scale="smoke")
    finally:
        del CLAIMS["their-idea"]
