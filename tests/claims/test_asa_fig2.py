import math

import pytest

from wellcond.claims.asa_fig2 import CLAIM, smallest_distances

LN = math.log(200)


def record(sa=4.5, *, both=3.0, mlp=3.5, diverged_rate=False, fast=20.0, seeds=3, **changes):
    """Evidence as a lab run would write it: all begin at the loss of guessing, and go to these."""

    def arm(end):
        return {
            "lr": 1e-3,
            "grid": {"epochs": 10, "rates": [
                {"lr": 1e-3, "status": "finished", "top1": 20.0, "losses": [[0.0, LN], [10.0, end]]},
                {
                    "lr": 3e-3, "status": "diverged" if diverged_rate else "finished", "top1": fast,
                    "losses": [[0.0, LN], [10.0, end]],
                },
            ]},
            "runs": [
                {
                    "seed": s, "status": "finished", "top1": 45.0,
                    "losses": [[0.1, LN], [1.0, end + 0.5], [50.0, end + 0.01 * s]],
                }
                for s in range(seeds)
            ],
        }  # fmt: skip

    made = {"data": "tiny-imagenet", "scale": "lab", "epochs": 50, "seeds": seeds}
    return made | {"arms": {"both": arm(both), "no-sa": arm(sa), "no-mlp": arm(mlp)}} | changes


def test_the_smallest_distance_decides_and_the_first_epoch_does_not_count():
    found = CLAIM._comparison(record())
    assert smallest_distances(found) == pytest.approx({0: 1.0, 1: 1.0, 2: 1.0})
    whole = CLAIM.verdict([record()])
    assert (whole.verdict, [part.outcome for part in whole.parts]) == ("holds in part", ["holds", "does not hold"])
    assert "0 of 3 seeds diverged, and at no rate of its grid, in 50 epochs" in whole.parts[1].why
    assert CLAIM.verdict([record(sa=LN + 1)]).verdict == "holds"  # it stays above, and diverges
    one = record()
    one["arms"]["no-sa"]["runs"][0]["status"] = "diverged"
    assert CLAIM.verdict([one]).parts[1].outcome == "undecided"
    assert CLAIM.verdict([record(sa=3.2)]).verdict == "does not hold"  # below the one without MLP skips
    assert CLAIM.verdict([]).parts[0].outcome == "not run"


def test_a_loss_that_is_not_finite_is_left_out():
    lost = record()
    lost["arms"]["no-sa"]["runs"][0]["losses"][-1][1] = math.nan
    assert smallest_distances(CLAIM._comparison(lost))[0] == pytest.approx(1.0)
    for run in lost["arms"]["no-sa"]["runs"]:
        run["losses"] = [[0.1, LN]]
    part = CLAIM.verdict([lost]).parts[0]
    assert (part.outcome, part.why) == ("undecided", "no epoch was logged in every arm")
    assert CLAIM.lines(lost)


def test_divergence_is_said_with_its_rates(cells):
    def said(**changes):
        rows = cells(CLAIM.lines(record(**changes)))
        assert [row.get("the paper") for row in rows.values()] == [
            None, "slow; it diverges after about 30 epochs", None,
        ]  # fmt: skip
        return {what: row["divergence"] for what, row in rows.items()}

    arm, none = "Tiny-ImageNet, no attention skip", "0 of 3 seeds diverged, and at no rate of its grid"
    assert said(diverged_rate=True)[arm] == "0 of 3 seeds diverged, and at the rates 0.003 of its grid"
    assert set(said().values()) == {none}
    fell = said(fast=0.7)  # of 200 classes
    assert set(fell.values()) == {f"{none}; at 0.003 it collapsed to guessing"}
    higher = said(sa=LN + 1)  # it ends above its start
    assert higher.pop(arm) == "3 of 3 seeds diverged, and at the rates 0.001, 0.003 of its grid"
    assert set(higher.values()) == {none}


def test_the_finding_says_whether_the_loss_stays_above_and_what_diverged():
    assert CLAIM.finding([record()]) == (
        "Without its attention skips a ViT-Tiny's training loss on Tiny-ImageNet stays above the others' (by 1.00 "
        "where they are nearest), but none of 3 seeds diverged."
    )
    below = CLAIM.finding([record(sa=3.2, diverged_rate=True)])
    assert "does not stay above the others' (it is up to 0.30 below), but none of 3 seeds diverged" in below
    assert CLAIM.finding([record(sa=LN + 1)]).endswith(", and all 3 seeds diverged.")
    short = record()
    for run in short["arms"]["no-sa"]["runs"]:
        run["losses"] = [[0.1, LN]]
    assert "cannot be compared" in CLAIM.finding([short])


def test_the_figure_has_every_point_of_every_seed():
    rows = CLAIM.draw([record()]).to_dict()["data"]["values"]
    assert len(rows) == 3 * 3 * 3
    assert {row["arm"] for row in rows} == {"both skips", "no attention skip", "no MLP skip"}
