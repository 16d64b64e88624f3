"""asa-table2, asa-table3 and asa-fig4: judged on made-up evidence, run small on one set of runs, in which order."""

import io
import math
import sys
from statistics import fmean

import pytest
import torch
from rich.console import Console

from wellcond.claims import asa_fig4, asa_table2, asa_table3
from wellcond.claims.asa_fig1c import CLAIM as FIG1C
from wellcond.claims.claim import Options
from wellcond.claims.grayed import EPSILONS, GRAYED, PLAIN, kappa_of, least_falls
from wellcond.claims.reproduce import reproduce
from wellcond.claims.runs import Planned, Runs, config_difference
from wellcond.claims.sets import parse_data
from wellcond.records import Run, read_json
from wellcond.train.recipes import recipe

TABLE2, TABLE3, FIG4 = asa_table2.CLAIM, asa_table3.CLAIM, asa_fig4.CLAIM
QUICK = ["epochs=1", "batch_size=256", "model_kwargs=img_size=8,patch_size=4,depth=2,embed_dim=16,num_heads=2"]
SIZE = {"img_size": 8, "patch_size": 4, "depth": 2, "embed_dim": 16, "num_heads": 2}
MARKS = 12


def record(claim, top1=(), fall=0.2, seeds=3, **changes):
    """Evidence as a lab run would write it: `top1` by arm, and log κ that falls by so much from one ε to the next."""
    rank = {arm: number for method in EPSILONS for number, arm in enumerate([PLAIN, *_sweep(method)])}
    arms = {}
    for arm, one in claim.arms.items():
        runs = [
            {
                "seed": seed, "lr": 1e-3, "status": "finished", "top1": dict(top1).get(arm, 45.0) + 0.1 * seed,
                "top5": 70.0,
                "kappa": {
                    "epochs": [50 * mark / 11 for mark in range(MARKS)],
                    **{where: [6.0 + 0.01 * seed + 0.1 * mark - fall * rank.get(arm, 0) for mark in range(MARKS)]
                       for where in ("in", "out")},
                },
            }
            for seed in range(min(seeds, one.seeds or seeds))
        ]  # fmt: skip
        arms[arm] = {"lr": 1e-3, "runs": runs}
    made = {"data": "tiny-imagenet", "scale": "lab", "epochs": 50, "seeds": seeds, "arms": arms}
    return made | {"paper": claim.paper.get("tiny-imagenet", {})} | changes


def _sweep(method):
    return [f"{method}-{epsilon:g}" for epsilon in EPSILONS[method]]


GAIN = {"svd-0.7": 46.5, "dct-0.95": 46.4, "linear-svd-0.7": 46.3, "linear-dct-0.95": 46.2}
BEST = {"svd-0.7": 46.5, "dct-0.95": 46.4}


# ---- judging


def test_table2_asks_for_every_gain():
    assert TABLE2.verdict([record(TABLE2, GAIN)]).verdict == "holds"
    part = TABLE2.verdict([record(TABLE2, GAIN)]).parts[0]
    assert (part.name, part.found.mean) == (
        "Tiny-ImageNet: softmax + SVD: gain over softmax above 0", pytest.approx(1.5),
    )  # fmt: skip
    assert TABLE2.verdict([record(TABLE2, GAIN | {"linear-dct-0.95": 44.0})]).verdict == "holds in part"
    assert TABLE2.verdict([record(TABLE2, dict.fromkeys(GAIN, 44.0))]).verdict == "does not hold"
    wide = record(TABLE2, GAIN)
    wide["arms"]["svd-0.7"]["runs"][0]["top1"] = 40.0
    assert TABLE2.verdict([wide]).verdict == "undecided"


def test_table2_compares_linear_with_linear_and_never_asks_for_exploration():
    weak = record(TABLE2, {"linear": 30.0, "linear-svd-0.7": 31.0, "linear-dct-0.95": 32.0} | BEST)
    weak["arms"]["svd-0.7-unmixed"]["runs"] = weak["arms"]["both-unmixed"]["runs"] = []
    assert TABLE2.verdict([weak]).verdict == "holds"
    assert "below the 43 % asked" in TABLE2.verdict([record(TABLE2, GAIN | {"both": 40.0})]).parts[0].why


def test_table2_shows_what_there_is():
    found = record(TABLE2, GAIN)
    for arm in TABLE2.arms:
        if arm not in (PLAIN, "svd-0.7"):
            found["arms"][arm] = {"runs": []}
    verdict = TABLE2.verdict([found])  # what there is does not wait for the other arms
    assert (verdict.verdict, [part.outcome for part in verdict.parts]) == ("undecided", ["holds", *["not run"] * 3])
    found["arms"]["svd-0.7"]["runs"].pop()
    assert "2 of 3 seeds" in TABLE2.verdict([found]).parts[0].why
    assert TABLE2.finding([found]) == (
        "On Tiny-ImageNet, graying a ViT-Tiny raises top-1 with softmax + SVD (+1.5 points); the paper's "
        "gain lies above our interval in 1 of 1 cases."
    )
    assert len(TABLE2.lines(found)) == 3
    found["arms"]["linear"]["runs"] = found["arms"][PLAIN]["runs"]  # by itself, it is compared with nothing
    drawn = TABLE2.draw([found]).to_dict()
    assert "Means over 2 to 3 paired seeds" in str(drawn)
    panels = {row["set"] for chart in drawn["hconcat"] for row in chart["data"]["values"]}
    assert panels == {"softmax: top-1", "softmax: top-5"}
    found["arms"]["svd-0.7"]["runs"] = []
    assert TABLE2.finding([found]) == "Nothing can be said yet; there are runs of softmax and linear."


def test_table2_has_the_papers_numbers_beside_ours(cells):
    found = record(TABLE2, GAIN)
    lines = cells(TABLE2.lines(found))
    assert lines["Tiny-ImageNet, gain of softmax + SVD over softmax"] == {
        "top-1": "1.50 [1.50, 1.50] points", "top-5": "0.00 [0.00, 0.00] points", "the paper": "1.7 and 2.4",
    }  # fmt: skip
    explored = [row for what, row in lines.items() if what.endswith("(exploration)")]
    assert len(explored) == 2 * 2 + 1
    assert not any("the paper" in row for row in explored)
    rows = [row for chart in TABLE2.draw([found]).to_dict()["hconcat"] for row in chart["data"]["values"]]
    shown = {(row["set"], row["arm"]): row for row in rows}
    assert shown["linear: top-5", "plain"]["paper"] == 62.7
    assert shown["softmax: top-1", "DCT graying"]["mean"] == pytest.approx(46.5)
    assert shown["softmax, not mixed: top-1", "plain"]["paper"] is None


def test_table3_asks_for_falling_kappa_and_a_best_in_the_middle():
    assert TABLE3.verdict([record(TABLE3, BEST)]).verdict == "holds"
    assert TABLE3.verdict([record(TABLE3, BEST, fall=-0.1)]).verdict == "holds in part"  # accuracy alone
    ends = dict.fromkeys(("svd-0.9", "svd-0.5", "dct-0.97", "dct-0.85"), 47.0)
    assert TABLE3.verdict([record(TABLE3, ends, fall=-0.1)]).verdict == "does not hold"
    one = record(TABLE3, BEST)
    for run in one["arms"]["svd-0.5"]["runs"]:  # one ε is out of order, and only its κ_in
        run["kappa"]["in"][-1] += 1.0
    parts = {part.name: part.outcome for part in TABLE3.verdict([one]).parts}
    assert [name for name, outcome in parts.items() if outcome != "holds"] == [
        "Tiny-ImageNet: SVD: κ_in falls from plain to the lowest ε, by the smallest step ≥ 0"
    ]


def test_table3_takes_the_best_of_those_inside_the_range(cells):
    names = [part.name for part in TABLE3.verdict([record(TABLE3, {"dct-0.9": 46.0})]).parts]
    assert any("the best in the middle, DCT ε 0.9, over DCT ε 0.85" in name for name in names)
    assert not any("SVD ε 0.6" in name for name in names)  # one seed, exploration
    unseen = record(TABLE3, BEST)
    for run in unseen["arms"]["both"]["runs"]:
        run["kappa"] = None
    assert {part.outcome for part in TABLE3.verdict([unseen]).parts} == {"holds", "not run"}
    seen = {what: row["κ_in"] for what, row in cells(TABLE3.lines(unseen)).items()}
    assert [what for what, kappa in seen.items() if kappa == "not seen"] == ["Tiny-ImageNet, plain"]


def only(claim, *arms):
    """Evidence of runs that are not all there: these arms alone, the last of them without its last seed."""
    found = record(claim, {"svd-0.7": 45.2})
    for arm in claim.arms:
        if arm not in arms:
            found["arms"][arm] = {"runs": []}
    found["arms"][arms[-1]]["runs"].pop()
    return found


def test_table3_shows_what_there_is():
    found = only(TABLE3, PLAIN, "svd-0.7", "dct-0.95")
    verdict = TABLE3.verdict([found])
    assert (verdict.verdict, {part.outcome for part in verdict.parts}) == ("undecided", {"not run"})
    said = TABLE3.finding([found])
    assert said.startswith("Of 7 strengths of graying 2 have run; the best of each method adds +")
    assert len(TABLE3.lines(found)) == 3 + 1
    assert TABLE3.draw([found])
    plain = only(TABLE3, PLAIN)
    assert TABLE3.finding([plain]) == "Nothing can be said yet; there are runs of plain."
    assert len(TABLE3.lines(plain)) == 1 + 1
    assert {part.outcome for part in TABLE3.verdict([plain]).parts} == {"not run"}


def test_fig4_shows_what_there_is():
    found = only(FIG4, PLAIN, "svd-0.7", "dct-0.95")
    assert {part.outcome for part in FIG4.verdict([found]).parts} == {"not run"}
    assert FIG4.finding([found]) == (
        "At the end of training, graying changes log κ after attention by −0.60 [−0.60, −0.60] with SVD ε 0.7 and "
        "−0.40 [−0.40, −0.40] with DCT ε 0.95 (7.11 without graying)."
    )
    assert FIG4.finding([only(FIG4, PLAIN)]) == "Nothing can be said yet; there are runs of plain."
    assert "Means over 2 to 3 seeds" in str(FIG4.draw([found]).to_dict())


def test_table3_shows_the_papers_vit_base(cells):
    row = cells(TABLE3.lines(record(TABLE3, BEST)))["Tiny-ImageNet, SVD ε 0.5"]
    assert (row["κ_in"], row["κ_out"], row["gain"]) == (*["6.11 [6.09, 6.13]"] * 2, "0.00 [0.00, 0.00] points")
    assert row["the paper"] == "ViT-Base: top-1 81 %, κ_in 5.29, κ_out 5.25"
    rows = TABLE3.draw([record(TABLE3, BEST)]).to_dict()["data"]["values"]
    gains = {(row["arm"], row["epsilon"]): row for row in rows if row["set"].startswith("gain")}
    assert gains["DCT graying", 0.95]["paper"] == 0.3
    assert gains["SVD graying", 0.7]["mean"] == pytest.approx(1.5)
    kappas = {(row["arm"], row["epsilon"]): row for row in rows if row["set"].startswith("log κ_out")}
    assert kappas["SVD graying", 0.5]["mean"] == pytest.approx(6.01 + 1.1 - 1.0)


@pytest.mark.parametrize(("broken", "verdict"), [(0, "holds"), (1, "holds"), (2, "holds in part")])
def test_fig4_asks_for_nine_tenths_of_the_marks(broken, verdict):
    found = record(FIG4)
    for run in found["arms"]["svd-0.7"]["runs"]:
        run["kappa"]["out"][0] = 99.0  # the random start is not judged
        for mark in range(1, 1 + broken):
            run["kappa"]["out"][mark] = 0.0
    whole = FIG4.verdict([found])
    assert whole.verdict == verdict
    assert f"in {11 - broken} of 11 marks" in whole.parts[0].why
    assert FIG4.verdict([record(FIG4, fall=-0.1)]).verdict == "does not hold"


def test_fig4_shows_every_mark_of_every_seed(cells):
    found = record(FIG4)
    rows = FIG4.draw([found]).to_dict()["data"]["values"]
    assert len(rows) == (4 + 4) * 3 * MARKS
    assert {row["arm"] for row in rows if row["set"] == "DCT graying"} == {"plain", "ε 0.97", "ε 0.95", "ε 0.9"}
    assert cells(FIG4.lines(found))["Tiny-ImageNet, plain: log κ of +sa"] == {
        "at the random start": "6.01", "over training": "6.61", "at its end": "7.11",
    }  # fmt: skip
    for run in found["arms"][PLAIN]["runs"]:
        run["kappa"] = None
    assert {part.outcome for part in FIG4.verdict([found]).parts} == {"not run"}


def test_the_least_fall_is_that_of_one_step_and_leaves_broken_seeds_out():
    found = record(FIG4)
    for seed, value in enumerate((6.05, 6.12, 6.11)):  # plain: 6.3, 6.31, 6.32; ε 0.7: 5.7, 5.71, 5.72
        found["arms"]["svd-0.9"]["runs"][seed]["kappa"]["out"][3] = value
    arms = [PLAIN, "svd-0.9", "svd-0.7"]
    falls = least_falls(FIG4._comparison(found), arms, "out")
    assert len(falls) == MARKS
    assert falls[3] == pytest.approx([0.25, 0.19, 0.21])
    found["arms"]["svd-0.9"]["runs"][1]["kappa"]["out"][3] = math.nan
    assert len(least_falls(FIG4._comparison(found), arms, "out")[3]) == 2


def test_small_falls_with_noise_do_not_count_as_rises():
    """In each seed another step goes up a little; on average every step is a fall."""
    found = record(TABLE3, fall=0.03, seeds=5)
    for number, arm in enumerate(("dct-0.97", "dct-0.95", "dct-0.9")):
        for seed, run in enumerate(found["arms"][arm]["runs"]):
            run["kappa"]["in"][-1] += (0.0, 0.05, -0.05)[(number + seed) % 3]
    name = "Tiny-ImageNet: DCT: κ_in falls from plain to the lowest ε, by the smallest step ≥ 0"
    (part,) = (part for part in TABLE3.verdict([found]).parts if part.name == name)
    assert part.outcome == "undecided"
    assert part.found.mean > 0


def test_findings_have_the_numbers_with_their_signs():
    found = record(TABLE2, GAIN | {"linear-dct-0.95": 44.0})
    assert TABLE2.finding([found]) == (
        "On Tiny-ImageNet, graying a ViT-Tiny raises top-1 with softmax + SVD (+1.5 points), softmax + DCT (+1.4) and "
        "linear + SVD (+1.3) and lowers top-1 with linear + DCT (−1.0); the paper's gain lies above our interval in 3 "
        "of 4 cases."  # 1.3 is the paper's, too
    )
    assert "the paper" not in TABLE2.finding([found | {"paper": {}}])  # as of the digits
    found["arms"]["linear"]["runs"] = []
    assert "linear" not in TABLE2.finding([found])
    found = record(TABLE3, BEST)
    best = "The best strength of graying by each method adds +1.5 (SVD ε 0.7) and +1.4 (DCT ε 0.95) points of top-1"
    assert TABLE3.finding([found]) == (
        f"{best}; it changes log κ after attention by −1.00 [−1.00, −1.00] with SVD ε 0.5 and −1.00 [−1.00, −1.00] "
        "with DCT ε 0.85."
    )
    for arm in found["arms"].values():
        for run in arm["runs"]:
            run["kappa"] = None
    assert TABLE3.finding([found]) == f"{best}."
    found = record(FIG4)
    for run in found["arms"]["svd-0.7"]["runs"]:
        run["kappa"]["out"][1] = 0.0
    assert FIG4.finding([found]) == (
        "Log κ after attention is lower for lower ε at 10 of 11 (SVD) and 11 of 11 (DCT) marks of training; at its end "
        "graying changes log κ after attention by −1.00 [−1.00, −1.00] with SVD ε 0.5 and −0.80 [−0.80, −0.80] with "
        "DCT ε 0.9 (7.11 without graying)."
    )


# ---- running


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder, console = tmp_path_factory.mktemp("grayed"), Console(record=True, width=300, file=io.StringIO())
    ids = ["asa-table2", "asa-table3", "asa-fig4"]
    code = reproduce(
        ids, scale="smoke", seeds=1, settings=QUICK, output=folder / "runs", evidence=folder / "evidence",
        device="cpu", console=console,
    )  # fmt: skip
    assert code == 0
    (folder / "said.txt").write_text(console.export_text(), encoding="utf-8")
    return folder


def test_a_smoke_run_of_all_three_trains_each_arm_once(folder, cells):
    results = sorted((folder / "runs" / "smoke").rglob("result.json"))
    arms = {path.parent.parent.name for path in results}
    assert arms == {*TABLE2.arms, *TABLE3.arms, *FIG4.arms}
    fixed = {arm for arm in arms if arm.endswith(("-fast", "-printed"))}  # they have their rate
    assert len(results) == 2 * len(arms) - len(fixed)  # one rate, one seed
    assert len(fixed) == 4
    assert (folder / "said.txt").read_text(encoding="utf-8").count(": training\n") == len(results)
    for claim in (TABLE2, TABLE3, FIG4):
        found = read_json(folder / "evidence" / claim.id / "smoke-digits.json")
        assert {arm: len(one["runs"]) for arm, one in found["arms"].items()} == dict.fromkeys(claim.arms, 1)
        assert claim.lines(found)
        whole = claim.verdict([found], sets=["digits"])
        assert {part.outcome for part in whole.parts} == {"undecided"}
    found = read_json(folder / "evidence" / TABLE2.id / "smoke-digits.json")
    assert {arm for arm, one in found["arms"].items() if "other_graying" in one["runs"][0]} == fixed
    tested = cells(TABLE2.lines(found), "Top-1 in % by the graying at test time (exploration)")
    assert len(tested) == 4
    at_home = found["arms"]["svd-0.7-fast"]["runs"][0]["top1"]
    top1 = tested["Digits, softmax + SVD at 0.003"]
    assert list(top1) == ["plain", "svd-0.7", "dct-0.95"]
    assert top1["svd-0.7"] == f"{at_home:.1f}"


def test_kappa_is_that_of_the_blocks_inputs_and_of_attention_after_the_add(folder):
    name = "digits/vit_tiny/svd-0.7/seed-0-lr-0.003"
    result = read_json(folder / "runs" / "smoke" / name / "result.json")
    rows = [row for row in Run.open(folder / "runs" / "smoke" / name).probe if row["name"] == "log_kappa"]
    last = max(row["step"] for row in rows)

    def value(site, index):
        return next(r["value"] for r in rows if (r["step"], r["site"], r["index"]) == (last, site, index))

    found = kappa_of(result)
    assert found["in"][-1] == pytest.approx(fmean([value("embed", -1), value("+mlp", 0)]), abs=1e-4)
    assert found["out"][-1] == pytest.approx(fmean([value("+sa", 0), value("+sa", 1)]), abs=1e-4)
    assert (found["epochs"][0], found["epochs"][-1]) == (0.0, 1.0)
    evidence = read_json(folder / "evidence" / "asa-table3" / "smoke-digits.json")
    assert evidence["arms"]["svd-0.7"]["runs"][0]["kappa"] == found
    assert kappa_of(result | {"status": "diverged"}) is None
    assert kappa_of(result | {"measured": {"steps": [], "gradient_norm": []}}) is None


def test_every_arm_is_configured_as_it_is_called():
    data = parse_data(["tiny-imagenet=hf:x"])[0]
    options = Options(scale="lab", data=(data,))
    plain = FIG1C.configure(options, data, "both")
    for claim in (TABLE2, TABLE3, FIG4):
        assert config_difference(claim.configure(options, data, PLAIN), plain.as_json()) == ""
        for arm in claim.arms:
            config = claim.configure(options, data, arm)
            asked = {"attention": "", "gray": "", "epsilon": 0.95, "mixup": 0.8, "cutmix": 1.0}
            if arm.startswith("linear"):
                asked["attention"] = "linear"
            if arm.endswith("unmixed"):
                asked |= {"mixup": 0.0, "cutmix": 0.0}
            if arm.endswith("fast"):
                asked |= {"lr": 3e-3}
            asked["restore_scale"] = not arm.endswith("printed")
            for method in EPSILONS:
                if method in arm:
                    asked |= {"gray": method, "epsilon": float(arm.partition(f"{method}-")[2].split("-")[0])}
            assert {name: getattr(config, name) for name in asked} == asked, arm
            shared = [other for other in (TABLE2, TABLE3, FIG4) if arm in other.arms]
            assert all(
                config_difference(other.configure(options, data, arm), config.as_json()) == "" for other in shared
            )
    assert set(GRAYED) == set(TABLE3.arms)


def test_runs_of_one_form_are_compiled_once_over_all_three(tmp_path, monkeypatch):
    """One call for all of them: as many compilations as there are arms, however many rates and seeds."""
    resets, trained = [], []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(trained)))

    def made_up(self, plan, *, quiet):
        with self._compiled_once(self._config(plan)):
            trained.append(plan.name)
        return {
            "name": plan.name, "config": plan.config.as_json(), "status": "finished", "why": "", "losses": [],
            "metrics": {"top1": 0.45, "top5": 0.7}, "steps": 0, "images_per_second": 1.0, "log_kappa": None,
            "measured": {"steps": []},
        }  # fmt: skip

    monkeypatch.setattr(Runs, "_train", made_up)
    data = parse_data(["tiny-imagenet=hf:x"])
    runs = Runs(tmp_path / "runs", console=Console(quiet=True), device="cpu")
    for claim in (TABLE2, TABLE3, FIG4):
        options = Options(scale="lab", data=tuple(data), seeds=1, evidence=tmp_path, console=Console(quiet=True))
        claim.reproduce(options, runs)
    arms = {name.split("/")[2] for name in trained}
    assert len(trained) == len(set(trained))
    assert len(arms) == 13 + 8
    assert len(resets) == len(arms)


def test_measuring_a_trained_model_keeps_the_code_that_the_next_seed_takes(tmp_path, monkeypatch):
    """Measurements build grayed models, and graying a model makes torch forget what it has compiled."""
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(1))
    monkeypatch.setattr(torch, "compile", lambda model, **_how: model)
    runs = Runs(tmp_path, console=Console(quiet=True), device="cpu")
    config = recipe("digits", epochs=1, batch_size=256, model_kwargs=SIZE, gray="svd", epsilon=0.7, compile=True)
    assert (torch._dynamo, config.compile) == (sys.modules["torch._dynamo"], True)  # else nothing is ever forgotten
    after = []
    for seed in (0, 1):
        plan = Planned(
            name=f"digits/vit/svd/seed-{seed}", config=config.changed({"seed": seed}),
            measure=("log_kappa", "other_graying"),
        )  # fmt: skip
        found = runs.run(plan)
        after.append(len(resets))
        own = found["other_graying"]["svd-0.7"]
        assert own == pytest.approx({name: round(value, 5) for name, value in found["metrics"].items()}, abs=1e-4)
        assert len({one["loss"] for one in found["other_graying"].values()}) == 3
    assert after[0] == after[1] > 0


@pytest.mark.parametrize("claim", [TABLE3, FIG4])
def test_one_methods_sweep_is_judged_without_the_others(claim):
    found = record(claim, {"svd-0.7": 45.2})
    for arm in claim.arms:
        if arm.startswith("dct"):
            found["arms"][arm] = {"runs": []}
    parts = claim.verdict([found]).parts
    assert not any(part.outcome == "not run" or "seeds" in part.why for part in parts if "SVD" in part.name)
    assert {part.outcome for part in parts if "SVD" not in part.name} == {"not run"}
