"""What runs look like early: rows of results, κ against accuracy, and warnings of divergence."""

import math
import shutil
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from wellcond.claims import CLAIMS, new_early_warning
from wellcond.claims.claim import Options
from wellcond.claims.early import Group, arms_of, diverges, measure, rows_of
from wellcond.claims.reproduce import reproduce
from wellcond.records import read_json

EVIDENCE = Path(__file__).parents[2] / "evidence"
IDS = ("new-kappa-predicts", "new-early-warning")


def result(arm="both", *, lr=1e-3, seed=0, kappa=(5.0, 4.0), losses=((0.01, 5.0), (0.5, 4.0), (10.0, 2.0)), **changes):
    blocks = [[value - 1, value + 1] for value in kappa]
    config = {"lr": lr, "seed": seed, "remove_skips": [], "epochs": 10, "mixup": 0.8, "cutmix": 1.0, "holdout": 0.1,
              "attention": arm}  # fmt: skip
    measured = {
        "steps": [0, 50, 100], "gradient_norm": [1.0, 2.0, None], "log_kappa": {"+sa": blocks, "sa": blocks},
        "largest_logit": {"sa": [[1.0, 7.0], [2.0, None]]}, "attention_entropy": {"sa": [[1.0, 3.0], [math.inf, 0.5]]},
    }  # fmt: skip
    return {
        "name": f"tiny-imagenet/vit_tiny/{arm}/seed-{seed}-lr-{lr:g}", "status": "finished", "steps": 1000,
        "config": config, "losses": [list(one) for one in losses], "metrics": {"top1": 0.4}, "measured": measured,
    } | changes  # fmt: skip


def test_a_row_has_one_number_for_each_quantity():
    (row,) = rows_of([result()])
    assert row["start"] == {
        "log_kappa": 5.0, "log_kappa_sa": 5.0, "gradient_norm": 1.0, "attention_entropy": 2.0, "largest_logit": 7.0,
        "near_unit_share": None, "loss": 5.0,
    }  # fmt: skip
    early = row["early"]
    assert (early["log_kappa"], early["gradient_norm"], early["loss"]) == (4.0, 2.0, 4.0)
    assert (early["largest_logit"], early["attention_entropy"]) == (2.0, 0.5)  # what is not finite is left out
    assert (row["arm"], row["top1"], row["skips"], row["budget"]) == ("both", 40.0, "none", "10 epochs")


def test_runs_that_measured_nothing_have_no_row():
    assert rows_of([result(measured={"steps": []}), result(losses=())]) == []


def test_a_run_that_diverged_without_measuring_kappa_is_named(tmp_path):
    unseen, seen = result("probe", status="diverged", measured={"steps": []}), result(status="diverged")
    found = measure(Options(scale="lab", output=tmp_path, results=lambda _: [unseen, seen, result(lr=1.0)]))
    assert [row["status"] for row in found["rows"]] == ["diverged", "finished"]
    (line,) = (line for line in CLAIMS["new-early-warning"].lines({"scale": "lab", **found}) if "not measure κ" in line)
    assert line.endswith("do not count: tiny-imagenet/vit_tiny/probe/seed-0-lr-0.001")


def test_pre_trainings_have_no_row_and_what_starts_from_one_no_random_start():
    pretraining, finetuned = result(), result()
    pretraining["config"]["task"] = "mae"
    finetuned |= {"start": "tiny-imagenet/mae_base/mae/start-0"}
    (row,) = rows_of([pretraining, finetuned])
    assert set(row["start"].values()) == {None}
    assert row["early"]["log_kappa"] == 4.0


@pytest.mark.parametrize(
    ("status", "last", "diverged"),
    [("finished", 2.0, False), ("finished", 5.01, False), ("finished", 5.2, True), ("finished", math.nan, True),
     ("diverged", 2.0, True)],
)  # fmt: skip
def test_a_run_diverged_if_it_was_given_up_or_its_loss_ended_above_its_start(status, last, diverged):
    (row,) = rows_of([result(status=status, losses=((0.01, 5.0), (10.0, last)))])
    assert diverges(row) is diverged


def test_arms_are_compared_with_those_of_equal_budget_and_seeds_are_averaged():
    skipless = result("no-sa")
    skipless["config"]["remove_skips"] = ["sa"]
    longer = result("long")
    longer["config"] |= {"steps": 50000}
    lost = result("lost", metrics=None, status="diverged")
    rows = rows_of([result(seed=0, kappa=(5.0, 4.0)), result(seed=1, kappa=(7.0, 4.0)), result(lr=3e-3), skipless,
                    longer, lost])  # fmt: skip
    groups = arms_of(rows, "start")
    assert {(group.skips, group.budget): len(arms) for group, arms in groups.items()} == {
        ("none", "10 epochs"): 2, ("sa", "10 epochs"): 1, ("none", "50,000 steps"): 1,
    }  # fmt: skip
    group = Group("tiny-imagenet", "vit_tiny", "none", "10 epochs", mixed=True, held_out=True)
    first = groups[group][0]
    assert (first.arm, first.lr, first.seeds, first.log_kappa) == ("both", 1e-3, 2, 6.0)


def early_record(top1):
    """Sixteen arms with noise in their losses; top1: of log κ and loss."""
    draw, results = np.random.default_rng(0), []
    for number in range(16):
        kappa, loss = (float(draw.uniform(3, 6)), float(draw.uniform(3, 4)))
        losses = ((0.01, 5.0), (0.5, loss), (10.0, 2.0))
        accuracy = {"top1": top1(kappa, loss) / 100}
        results.append(result(f"arm-{number}", kappa=(kappa, kappa), losses=losses, metrics=accuracy))
    return {"scale": "lab", "rows": rows_of(results)}


def test_kappa_predicts_what_the_loss_does_not(cells):
    claim = CLAIMS["new-kappa-predicts"]
    whole = claim.verdict([early_record(lambda kappa, loss: 60 - kappa - loss)])
    assert whole.verdict == "holds"
    assert claim.verdict([early_record(lambda kappa, loss: 40 + kappa)]).verdict == "does not hold"
    told = claim.verdict([early_record(lambda kappa, loss: 60 - 5 * loss)])  # by the loss alone
    assert {part.outcome for part in told.parts} != {"holds"}
    said = claim.finding([early_record(lambda kappa, loss: 60 - kappa)])
    assert said == (
        "At equal loss, lower κ early goes with higher final accuracy: rank correlation −1.00 at the random start and "
        "−1.00 after 5 % of training (16 arms on Tiny-ImageNet; at several learning rates, 16 points of 10 epochs, on "
        "held-out images)."
    )
    rows = cells(claim.lines(early_record(lambda kappa, loss: kappa)))
    group = "Tiny-ImageNet, vit_tiny, 10 epochs, mixed, a part held out"
    assert list(rows) == [f"{group}, at the random start", f"{group}, after 5 % of training"]
    for row in rows.values():
        assert (row["rank correlation of log κ"], row["points"]) == ("1.00 [1.00, 1.00]", "16")
    rises = claim.finding([early_record(lambda kappa, loss: 40 + kappa)])
    assert rises.startswith(
        "At equal loss, lower κ early does not go with higher final accuracy: rank correlation 1.00"
    )
    assert claim.draw([early_record(lambda kappa, loss: 60 - kappa)]).to_dict()["hconcat"]


def test_fewer_arms_decide_nothing():
    claim, record = CLAIMS["new-kappa-predicts"], early_record(lambda kappa, loss: 60 - kappa)
    few = {**record, "rows": record["rows"][:14]}
    whole = claim.verdict([few])
    assert whole.verdict == "undecided"
    assert "14 of the 15 arms asked for" in whole.parts[0].why
    assert claim.finding([few]).startswith("It is undecided whether, at equal loss, lower κ early goes with")
    assert "(14 arms on Tiny-ImageNet, not the 15 asked for; " in claim.finding([few])
    assert len(claim.draw([few]).to_dict()["hconcat"][0]["data"]["values"]) == 14


def test_rates_of_one_arm_are_not_more_arms():
    claim, record = CLAIMS["new-kappa-predicts"], early_record(lambda kappa, loss: 60 - kappa)
    for number, row in enumerate(record["rows"]):
        row |= {"arm": f"arm-{number // 2}", "lr": (1e-3, 3e-3)[number % 2]}
    whole = claim.verdict([record])
    assert whole.verdict == "undecided"
    assert all("8 of the 15 arms asked for" in part.why and part.found for part in whole.parts)
    assert "(8 arms on Tiny-ImageNet, not the 15 asked for; " in claim.finding([record])


def test_an_arm_with_a_rate_of_its_own_is_not_another_arm():
    fast, other = (result(f"both{suffix}", lr=3e-3) for suffix in ("-fast", "-other"))
    for run in (fast, other):
        run["config"]["attention"] = "both"
    other["config"]["restore_scale"] = False
    rows = rows_of([result(), fast, other])
    assert [(row["arm"], row["lr"]) for row in rows] == [("both", 1e-3), ("both", 3e-3), ("both-other", 3e-3)]


def test_groups_that_are_not_judged_are_counted():
    claim, record = CLAIMS["new-kappa-predicts"], early_record(lambda kappa, loss: 60 - kappa)
    others = [row | {"budget": "50 epochs", "arm": arm} for row, arm in zip(record["rows"], "aab", strict=False)]
    said = str(claim.lines({**record, "rows": record["rows"] + others}))
    assert "groups with fewer arms: Tiny-ImageNet, vit_tiny, 50 epochs, mixed, a part held out (2)" in said


def test_a_group_with_as_many_arms_is_shown_and_not_judged(cells):
    claim, record = CLAIMS["new-kappa-predicts"], early_record(lambda kappa, loss: 60 - kappa)
    few = record["rows"][:7]
    others = [*few, *(row | {"budget": "50 epochs"} for row in few)]
    rows = cells(claim.lines({**record, "rows": others}))
    assert sum("not judged" in what for what in rows) == 2
    assert len(rows) == 4


def test_a_run_that_was_given_up_has_a_row():
    given_up = {"status": "diverged", "metrics": None}
    (old,) = rows_of([result(**given_up, steps=None)])  # as results were kept at first
    assert (old["early"]["log_kappa"], old["early"]["loss"]) == (4.0, None)
    (new,) = rows_of([result(**given_up, steps=1000)])
    assert new["early"]["loss"] == 4.0
    for id_ in IDS:
        record = {"scale": "lab", "rows": rows_of([result(), result(seed=1, steps=None, **given_up)])}
        assert CLAIMS[id_].verdict([record]).verdict == "undecided"
        assert CLAIMS[id_].lines(record)


def test_runs_without_a_quantity_or_a_partner_do_not_count():
    record = warned(by=True, lost=15)
    for row in record["rows"][:3]:
        row["early"]["log_kappa"] = None  # given up before it was measured
    few = CLAIMS["new-early-warning"].verdict([record])
    assert "of 60 runs 12 diverged and can be compared with others" in few.parts[0].why
    for row in record["rows"][:15]:
        row["set"] = "cifar10"  # where all diverged
    assert CLAIMS["new-early-warning"].verdict([record]).parts[0].found is None


def test_without_comparable_arms_nothing_is_said():
    claim = CLAIMS["new-kappa-predicts"]
    assert claim.draw([{"scale": "lab", "rows": []}]) is None
    whole = claim.verdict([{"scale": "lab", "rows": []}])
    assert {part.why for part in whole.parts} == {"no arms can be compared yet"}
    assert claim.finding([{"scale": "lab", "rows": []}]) == ""


def warned(*, by, lost=15):
    results = []
    for number in range(60):
        diverges_ = number < lost
        kappa = 9.0 + number / 100 if diverges_ == by else 4.0 + number / 100
        end = 6.0 if diverges_ else 2.0
        results.append(result(f"arm-{number % 20}-{diverges_}", seed=number, kappa=(4.0, kappa), losses=(
            (0.01, 5.0), (0.5, 4.0 + number % 7 / 10), (10.0, end))))  # fmt: skip
    return {"scale": "lab", "rows": rows_of(results)}


def test_a_warning_is_judged_by_the_area_under_its_curve(cells):
    claim = CLAIMS["new-early-warning"]
    assert claim.verdict([warned(by=True)]).verdict == "holds"
    assert new_early_warning.area(warned(by=True), "log_kappa").mean == 1.0
    assert claim.verdict([warned(by=False)]).verdict == "does not hold"
    assert new_early_warning.area(warned(by=False), "log_kappa").mean == 0.0
    few = claim.verdict([warned(by=True, lost=14)])
    assert few.verdict == "undecided"
    assert "of 60 runs 14 diverged and can be compared with others, and 15 are asked for" in few.parts[0].why
    assert "Of 60 runs that measured κ 15 diverged" in claim.finding([warned(by=True)])
    rows = cells(claim.lines(warned(by=True)))
    assert rows["log κ(+sa) after 5 % of training"] == {"AUC": "1.00 [1.00, 1.00]"}
    assert rows["attention entropy after 5 % of training (a low value warns)"] == {"AUC": "0.50 [0.50, 0.50]"}
    assert claim.draw([warned(by=True)]).to_dict()["config"]


def test_where_none_diverged_that_is_the_finding():
    claim, record = CLAIMS["new-early-warning"], warned(by=True, lost=0)
    assert claim.finding([record]) == "None of 60 runs that measured κ diverged: nothing to warn of."
    record["rows"][0]["top1"] = 0.6  # of 200 classes
    assert claim.finding([record]) == (
        "None of 60 runs that measured κ diverged (1 end near guessing on what is new, which does not count): nothing "
        "to warn of."
    )
    assert "does not count as diverged: tiny-imagenet/arm-0-False/seed-0-lr-0.001" in str(claim.lines(record))
    assert {part.outcome for part in claim.verdict([record]).parts} == {"undecided"}
    assert {row["how"] for row in claim.draw([record]).to_dict()["layer"][1]["data"]["values"]} == {"did not diverge"}


def test_runs_are_compared_with_those_of_their_set_alone():
    record = warned(by=True)  # where κ warns
    easy = [
        row | {"set": "cifar10", "early": {**row["early"], "log_kappa": 99.0}}
        for row in warned(by=True, lost=0)["rows"]
    ]
    assert new_early_warning.area({"rows": record["rows"] + easy}, "log_kappa").mean == 1.0
    hard = [row for row in record["rows"] if diverges(row)]
    assert new_early_warning.area({"rows": hard + easy}, "log_kappa") is None


def test_equal_values_are_a_coin_and_low_entropy_warns():
    record = warned(by=True)
    assert new_early_warning.area(record, "gradient_norm").mean == 0.5
    for row in record["rows"]:
        row["early"]["attention_entropy"] = 0.1 if diverges(row) else 2.0
    assert new_early_warning.area(record, "attention_entropy").mean == 1.0


@pytest.mark.parametrize("id_", IDS)
def test_the_evidence_is_of_the_results_that_there_are(tmp_path, id_):
    shutil.copytree(EVIDENCE / "runs", tmp_path / "runs")
    quiet = Console(quiet=True)
    assert reproduce(id_, scale="lab", training=False, output=tmp_path, evidence=tmp_path, console=quiet) == 0
    now, committed = (read_json(folder / id_ / "lab.json")["rows"] for folder in (tmp_path, EVIDENCE))
    missing = [row for row in now if row not in committed]
    assert not missing, f"{len(missing)} rows are not in the evidence; reproduce {id_} --scale lab --no-training"
    assert len(now) == len(committed)


def test_a_smoke_run_reads_the_runs_of_other_claims(tmp_path):
    places = {"output": tmp_path / "runs", "evidence": tmp_path, "console": Console(quiet=True), "device": "cpu"}
    assert reproduce("asa-fig3", scale="smoke", seeds=1, arms=["both"], settings=["epochs=1"], **places) == 0
    for id_ in IDS:
        assert reproduce(id_, scale="smoke", **places) == 0
        record = read_json(tmp_path / id_ / "smoke.json")
        assert {row["arm"] for row in record["rows"]} == {"both"}
        assert CLAIMS[id_].verdict([record]).verdict == "undecided"
