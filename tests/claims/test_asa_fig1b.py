import pytest

from wellcond.claims.asa_fig1b import CLAIM
from wellcond.words import DEFAULT_SITES as SITES


def record(sa=9.0, *, others=4.0, blocks=12, seeds=3, weak=0, top1=90.0, distance=1e-4, **changes):
    """Evidence as a lab run would write it; in `weak` blocks `sa` is no worse than the rest."""
    runs = [
        {
            "seed": seed,
            "lr": 1e-3,
            "top1": top1,
            "log_kappa": {
                "images": 1000,
                "capped": {"trained": 0, "untrained": 3},
                "largest distance from float64": dict.fromkeys(SITES, distance),
                **{
                    when: {
                        site: [others if site != "sa" or block < weak else sa + 0.01 * seed for block in range(blocks)]
                        for site in SITES
                    }
                    for when in ("trained", "untrained")
                },
            },
        }
        for seed in range(seeds)
    ]
    made = {"data": "cifar10", "scale": "lab", "epochs": 100, "seeds": seeds}
    return made | {"arms": {"both": {"runs": runs}, "no-sa": {"runs": []}, "no-mlp": {"runs": []}}} | changes


@pytest.mark.parametrize(
    ("weak", "sa", "verdict"),
    [(0, 9.0, "holds"), (2, 9.0, "holds"), (3, 9.0, "does not hold"), (0, 5.0, "does not hold")],
)
def test_ten_of_twelve_blocks_decide(weak, sa, verdict):
    found = CLAIM.verdict([record(sa, weak=weak)], sets=["cifar10"])
    assert found.verdict == verdict
    assert f"in {12 - weak if sa == 9.0 else 0} of 12 blocks" in found.parts[0].why


def test_the_finding_counts_the_blocks_and_names_the_smallest_gap():
    tiny = record(weak=3) | {"data": "tiny-imagenet"}
    assert CLAIM.finding([record(), tiny]) == (
        "In all 12 blocks on CIFAR-10 and 9 of 12 blocks on Tiny-ImageNet of a trained ViT-Tiny, log κ of "
        "attention's output is far (1.5 or more) above that of the other sites; the gap is 5.0 to 5.0 on CIFAR-10 and "
        "0.0 to 5.0 on Tiny-ImageNet."
    )
    assert CLAIM.finding([record()]).startswith(
        "In every block of a trained ViT-Tiny, log κ of attention's output is far"
    )
    below = CLAIM.finding([record(2.99)])
    assert below.startswith("In none of 12 blocks on CIFAR-10")
    assert below.endswith("the gap is −1.0 to −1.0 on CIFAR-10.")
    assert CLAIM.finding([record() | {"arms": {"both": {"runs": []}}}]) == ""


def test_an_interval_around_the_bound_is_undecided():
    found = CLAIM.verdict([record(5.49)], sets=["cifar10"])  # 1.49, 1.50, 1.51 above the others
    assert found.verdict == "undecided"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seeds": 2}, "2 of 3 seeds"),
        ({"epochs": 50}, "50 of 100 epochs"),
        ({"top1": 50.0}, "below the 85 % asked"),
        ({"distance": 0.5}, "float32 and float64 differ"),
        ({"scale": "smoke"}, "smoke"),
    ],
)
def test_a_broken_rule_leaves_it_undecided(change, why):
    found = CLAIM.verdict([record(**change)], sets=["cifar10"])
    assert found.verdict == "undecided"
    assert why in found.parts[0].why


def test_a_set_that_was_not_run_is_said():
    assert CLAIM.verdict([record()]).parts[1].outcome == "not run"
    assert CLAIM.verdict([]).verdict == "undecided"


def test_figure_and_lines_have_both_ends_and_the_papers_numbers(cells):
    rows = CLAIM.draw([record()]).to_dict()["data"]["values"]
    assert {(row["site"], row["when"]) for row in rows if "site" in row} == {
        (site, when) for site in SITES for when in ("trained", "random start")
    }
    assert [row["paper"] for row in rows if "paper" in row] == [6.0, 3.0]
    lines = CLAIM.lines(record())
    log_kappa = {"sa": "9.01", "+sa": "4.00", "mlp": "4.00", "+mlp": "4.00"}
    assert cells(lines) == {
        "CIFAR-10, both skips, trained: log κ": {**log_kappa, "the paper": "near 6 (sa) and 3 (the others)"},
        "CIFAR-10, both skips, untrained: log κ": {**log_kappa, "at the ceiling (lower bounds)": "9 matrices"},
    }
    assert any("they would be 13.8 and 6.9 here" in str(line) for line in lines)
    assert not any("decimal" in str(line) or "does not name" in str(line) for line in lines)


def test_the_other_arms_are_folded_and_tell_where_float64_has_lower_bounds(cells):
    found = record()
    ends = {when: {site: [30.0] * 12 for site in SITES} for when in ("trained", "untrained")}
    capped = {"trained": {}, "untrained": {"sa": 1500, "+sa": 3}}
    found["arms"]["no-sa"]["runs"] = [{**found["arms"]["both"]["runs"][0], "kappa": {**ends, "capped": capped}}]
    lines = CLAIM.lines(found)
    assert all("both skips" in what for what in cells(lines))
    rows = cells(lines, "The other arms")
    assert rows["CIFAR-10, no attention skip, untrained: log κ, in float64 on 64 images"] == {
        "sa": "≥ 30.00", "+sa": "≥ 30.00", "mlp": "30.00 (one seed)", "+mlp": "30.00 (one seed)",
        "at the ceiling (lower bounds)": "1,500 (sa), 3 (+sa) matrices",
    }  # fmt: skip
