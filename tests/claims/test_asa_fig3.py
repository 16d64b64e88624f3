import pytest
from rich.console import Console

from wellcond.claims.asa_fig1c import CLAIM as FIG1C
from wellcond.claims.asa_fig3 import ARMS, CLAIM, SITES
from wellcond.claims.asa_table2 import CLAIM as TABLE2
from wellcond.claims.claim import Options
from wellcond.claims.comparison import ends_of
from wellcond.claims.reproduce import reproduce
from wellcond.claims.sets import parse_data
from wellcond.records import read_json

BLOCKS = 12


def record(*, linear=(3.0, 9.0, 3.4), softmax=(4.0, 12.0, 4.5), spread=0.1, top1=45.0, **changes):
    """Evidence as a lab run would write it: log κ at `in`, `sa` and `+sa` of each attention, alike in all blocks."""

    def run(seed, values):
        sites = {
            site: [value + spread * seed] * BLOCKS for site, value in zip(("in", "sa", "+sa"), values, strict=True)
        }
        ends = {"trained": sites, "untrained": sites}
        return {"seed": seed, "status": "finished", "top1": top1, "top5": 99.0, "kappa": ends}

    arms = {
        arm: {"lr": 1e-3, "lr at the edge of the grid": False, "runs": [run(seed, values) for seed in range(3)]}
        for arm, values in (("both", softmax), ("linear", linear))
    }
    made = {"claim": "asa-fig3", "scale": "lab", "data": "tiny-imagenet", "epochs": 50, "seeds": 3, "arms": arms}
    return made | {"paper": CLAIM.paper["tiny-imagenet"]} | changes


def outcomes(**values):
    return [part.outcome for part in CLAIM.verdict([record(**values)]).parts]


def test_the_rule_decides():
    whole = CLAIM.verdict([record()])
    assert whole.verdict == "holds"
    assert whole.parts[0].found.mean == pytest.approx(3.0 - 0.1)  # (9 + s) − 2 (3 + s) with s = 0, .1, .2
    assert outcomes(linear=(3.0, 5.0, 3.4)) == ["does not hold", "holds", "holds"]
    assert outcomes(linear=(3.0, 6.1, 3.4)) == ["undecided", "holds", "holds"]
    assert outcomes(linear=(3.0, 9.0, 4.4)) == ["holds", "holds", "does not hold"]  # the skip leaves it far away
    assert outcomes(softmax=(4.0, 12.0, 2.0)) == ["holds", "does not hold", "holds"]  # and below counts as far, too
    assert CLAIM.verdict([record(linear=(3.0, 5.0, 3.4))]).verdict == "holds in part"
    assert CLAIM.verdict([record(top1=40.0)]).verdict == "undecided"


def test_what_a_run_says_of_its_ends():
    marks = {site: [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]] for site in (*SITES, "mlp")}
    capped = {"sa": [[1.0, 2.0], [0.0, 0.0], [4.0, 0.0]], "mlp": [[9.0, 9.0]] * 3}
    run = {"status": "finished", "measured": {"steps": [0, 5, 10], "log_kappa": marks, "capped": capped}}
    ends = {"untrained": [1.0, 2.0], "trained": [5.0, 6.0]}
    assert ends_of(run, SITES) == {
        **{when: dict.fromkeys(SITES, values) for when, values in ends.items()},
        "capped": {"untrained": {"sa": 3}, "trained": {"sa": 4}},
    }
    assert ends_of({**run, "status": "diverged"}, SITES) is None
    assert ends_of({**run, "measured": {"steps": [0], "log_kappa": {"sa": marks["sa"]}}}, SITES) is None


def test_runs_that_were_not_measured_decide_nothing():
    old = record()
    for run in old["arms"]["both"]["runs"]:
        run["kappa"] = None
    assert CLAIM.verdict([old]).verdict == "undecided"
    assert CLAIM.lines(old)
    for run in old["arms"]["linear"]["runs"]:
        run["kappa"] = None
    said = "Nothing can be said yet; there are runs of softmax and linear attention."
    assert CLAIM.finding([old]) == said


def test_figure_and_lines_have_the_papers_numbers_beside_ours(cells):
    rows = CLAIM.draw([record()]).to_dict()["data"]["values"]
    shown = {(row["set"], row["site"], row["when"]): row["value"] for row in rows if "site" in row}
    assert shown["linear attention", "sa", "trained"] == pytest.approx(9.1)
    assert len(shown) == 2 * 3 * 2
    assert [(row["set"], row["paper"]) for row in rows if "paper" in row] == [("linear attention", v) for v in (3, 6)]
    lines = cells(CLAIM.lines(record()))
    assert [what for what, row in lines.items() if "the paper" in row] == [
        "Tiny-ImageNet, linear attention, trained: log κ"
    ]
    assert lines["Tiny-ImageNet, linear attention, trained: log κ"] == {
        "in": "3.10 [2.85, 3.35]", "sa": "9.10 [8.85, 9.35]", "+sa": "3.50 [3.25, 3.75]", "sa ÷ in": "2.94",
        "the paper": "in 3, sa 6; 2 × in",
    }  # fmt: skip


def test_the_finding_has_each_attention_before_and_after():
    assert CLAIM.finding([record()]) == (
        "In a ViT-Tiny trained on Tiny-ImageNet, linear attention raises log κ from 3.1 to 9.1 (2.9 times; a cube "
        "would be 3 times), and its skip lowers it to 3.5; softmax raises log κ from 4.1 to 12.1, and "
        "its skip lowers it to 4.6."
    )
    low = CLAIM.finding([record(linear=(3.0, 2.0, 3.4))])
    assert "linear attention lowers log κ from 3.1 to 2.1 (0.7 times; " in low
    assert "and its skip raises it to 3.5;" in low


def test_its_runs_are_those_of_other_claims():
    data = parse_data(["tiny-imagenet=hf:x"])[0]
    options = Options(scale="lab", data=(data,))
    for arm, others in (("both", (FIG1C, TABLE2)), ("linear", (TABLE2,))):
        mine = CLAIM.configure(options, data, arm)
        assert all(mine == other.configure(options, data, arm) for other in others)
        assert {CLAIM._folder(data, arm)} == {other._folder(data, arm) for other in others}


def test_a_smoke_run(tmp_path):
    settings = ["epochs=1", "batch_size=256", "model_kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2"]
    places = {"output": tmp_path / "runs", "evidence": tmp_path / "evidence"}
    assert reproduce("asa-fig3", scale="smoke", seeds=1, settings=settings, console=Console(quiet=True), **places) == 0
    found = read_json(tmp_path / "evidence" / "asa-fig3" / "smoke-digits.json")
    for arm in ARMS:
        ends = found["arms"][arm]["runs"][0]["kappa"]
        assert ends["trained"].keys() == ends["untrained"].keys() == set(SITES)
        assert ends["trained"] != ends["untrained"]
    assert found["verdict on this set"]["verdict"] == "undecided"
    assert "trainings of 300 epochs" in " ".join(CLAIM.plan_paper(Options(scale="paper")))
