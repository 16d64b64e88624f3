import copy
import signal
import sys

import pytest
from rich.console import Console

from wellcond.claims import asa_fig1b, asa_fig1c, asa_fig2
from wellcond.claims import runs as runs_module
from wellcond.claims.arms import GRID, HELD_OUT, LADDER, scores
from wellcond.claims.claim import Options
from wellcond.claims.comparison import SKIPS
from wellcond.claims.reproduce import reproduce
from wellcond.claims.runs import Runs
from wellcond.claims.sets import IMAGE_SETS, parse_data
from wellcond.records import read_json
from wellcond.verdicts import SECOND_LOOK

CLAIM = asa_fig1c.CLAIM
SIZE = "img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2"
QUICK = ["epochs=1", "batch_size=256", f"model_kwargs={SIZE}"]
CONSOLE = Console(quiet=True)


def run(folder, id_="asa-fig1c", **options):
    return reproduce(
        id_, scale="smoke", settings=QUICK, output=folder / "runs", evidence=folder / "evidence", console=CONSOLE,
        **options,
    )  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reproduced")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "altair", None)
        assert run(folder) == 0
        assert run(folder, ["asa-fig1b", "asa-fig2"]) == 0
    return folder


@pytest.fixture(scope="module")
def smoke(folder):
    return read_json(folder / "evidence" / "asa-fig1c" / "smoke-digits.json")


def record(data="cifar10", *, both=(90, 91, 90), sa=(68, 69, 67), mlp=(88, 89, 88), **changes):
    """Evidence as a lab run would write it, with these accuracies."""
    arms = {
        name: {
            "lr": 1e-3,
            "lr at the edge of the grid": False,
            "grid": {"epochs": 10, "rates": [{"lr": 1e-3, "status": "finished", "top1": 80.0}]},
            "runs": [{"seed": s, "status": "finished", "top1": float(v), "top5": 99.0} for s, v in enumerate(values)],
        }
        for name, values in (("both", both), ("no-sa", sa), ("no-mlp", mlp))
    }
    made = {"data": data, "scale": "lab", "epochs": 100, "seeds": len(both), "arms": arms}
    return made | {"paper": CLAIM.paper.get(data, {})} | changes


def test_the_evidence_holds_the_whole_grid_and_every_seed(smoke):
    assert list(smoke["arms"]) == ["both", "no-sa", "no-mlp"]
    for arm in smoke["arms"].values():
        rates = {rate["lr"]: rate["top1"] for rate in arm["grid"]["rates"]}
        assert set(rates) == set(GRID["smoke"])
        assert rates[arm["lr"]] == max(rates.values())
        assert [run["seed"] for run in arm["runs"]] == [0, 1]
        assert all({"top1", "top5"} <= run.keys() for run in arm["runs"])
    assert smoke["environment"]["commit"] is None or len(smoke["environment"]["commit"]) >= 7


def test_a_smoke_run_decides_nothing(smoke):
    verdict = smoke["verdict on this set"]
    assert verdict["verdict"] == "undecided"
    assert "a smoke run" in verdict["parts"][0]["why"]


def test_the_grid_sees_held_out_images_and_the_seeds_the_test_set_once(folder):
    arm = folder / "runs" / "smoke" / "digits" / "vit_tiny" / "no-sa"
    grids, seeds = ([read_json(p) for p in sorted(arm.glob(f"{kind}-*/result.json"))] for kind in ("grid", "seed"))
    assert [len(grids), len(seeds)] == [2, 2]
    assert all(one["config"]["holdout"] == HELD_OUT for one in grids)
    for one in seeds:
        assert one["config"]["holdout"] == 0
        assert one["config"]["eval_every"] == one["config"]["epochs"]
        assert one["config"]["remove_skips"] == ["sa"]
        assert one["log_kappa"]["blocks"] == 1


def test_what_trains_neither_draws_nor_needs_altair(folder):
    assert not list(folder.rglob("*.svg"))  # and the fixture ran where there is none


def test_fig1b_trains_nothing_of_its_own_and_shows_both_ends(folder, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("it was trained again")

    monkeypatch.setattr(runs_module, "train", fail)
    assert run(folder, ["asa-fig1b", "asa-fig2"]) == 0
    found = read_json(folder / "evidence" / "asa-fig1b" / "smoke-digits.json")
    ends = {arm: [one["log_kappa"] for one in found["arms"][arm]["runs"]] for arm in SKIPS}
    assert {len(ones) for ones in ends.values()} == {2}
    gap = asa_fig1b.gaps(asa_fig1b.CLAIM._comparison(found), "trained")[0].mean
    by_hand = [
        one["trained"]["sa"][0] - max(one["trained"][s][0] for s in ("+sa", "mlp", "+mlp")) for one in ends["both"]
    ]
    assert gap == pytest.approx(sum(by_hand) / 2)
    assert any("at the random start" in str(line) for line in asa_fig1b.CLAIM.lines(found))
    losses = read_json(folder / "evidence" / "asa-fig2" / "smoke-digits.json")
    assert len(asa_fig2.smallest_distances(asa_fig2.CLAIM._comparison(losses))) == 2


@pytest.mark.parametrize("number", [1, 6, 12])
def test_interrupted_anywhere_it_goes_on(tmp_path, folder, monkeypatch, request, number):
    """A real Ctrl-C before the given training: the same call trains the rest, and comes to the same numbers."""
    train, calls = runs_module.train, []
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            signal.raise_signal(signal.SIGINT)
        return train(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runs_module, "train", interrupted)
        assert run(tmp_path) == 130
        assert len(list(tmp_path.rglob("result.json"))) == number - 1
        assert not (tmp_path / "evidence").exists()
        calls.clear()
        number = 0
        assert run(tmp_path) == 0
    mine, whole = (read_json(p / "evidence" / "asa-fig1c" / "smoke-digits.json")["arms"] for p in (tmp_path, folder))
    for arms in (mine, whole):
        for arm in arms.values():
            for one in arm["runs"]:
                del one["images per second"]
    assert mine == whole


def test_the_rule_decides():
    one = CLAIM.verdict([record()], sets=["cifar10"])
    assert one.verdict == "holds"
    assert one.parts[0].found.mean == pytest.approx((16 + 16 + 17) / 3)  # 22 − 3·2, 22 − 3·2, 23 − 3·2
    assert CLAIM.verdict([record(mlp=(70, 71, 70))], sets=["cifar10"]).verdict == "does not hold"
    assert CLAIM.verdict([record(mlp=(80, 89, 88))], sets=["cifar10"]).verdict == "undecided"
    assert CLAIM.verdict([record()]).verdict == "undecided"  # the other sets are missing
    assert {part.outcome for part in CLAIM.verdict([record()]).parts} == {"holds", "not run"}


def test_the_drop_has_to_grow_with_the_set():
    sets = [record(), record("cifar100", both=(60, 61, 60), sa=(30, 31, 30), mlp=(58, 59, 58))]
    tiny = record("tiny-imagenet", both=(45, 46, 45), sa=(5, 6, 5), mlp=(43, 44, 43))
    assert CLAIM.verdict([*sets, tiny]).verdict == "holds"
    small = record("tiny-imagenet", both=(45, 46, 45), sa=(25, 26, 25), mlp=(43, 44, 43))
    assert CLAIM.verdict([*sets, small]).verdict == "holds in part"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"epochs": 30}, "30 of 100 epochs"),
        ({"seeds": 2}, "2 of 3 seeds"),
        ({"both": (80, 81, 80), "sa": (40, 41, 40), "mlp": (79, 80, 79)}, "below the 85 % asked"),
    ],
)
def test_a_broken_rule_leaves_it_undecided(change, why):
    found = CLAIM.verdict([record(**change)], sets=["cifar10"])
    assert found.verdict == "undecided"
    assert why in found.parts[0].why


def test_a_rate_at_the_edge_leaves_it_undecided():
    edge = copy.deepcopy(record())
    edge["arms"]["no-sa"]["lr at the edge of the grid"] = True
    assert "the best rate of no-sa is the last" in CLAIM.verdict([edge], sets=["cifar10"]).parts[0].why


def test_figure_and_summary_have_the_papers_numbers_beside_ours(cells):
    rows = CLAIM.draw([record()]).to_dict()["data"]["values"]
    shown = {row["arm"]: row for row in rows}
    assert shown["both skips"]["mean"] == pytest.approx(90.333333)
    assert shown["no attention skip"]["paper"] == pytest.approx(68.333333)  # our both skips, less the paper's 22 points
    assert shown["both skips"]["paper"] is None
    rows = cells(CLAIM.lines(record()))
    assert rows["CIFAR-10, drop with no attention skip"] == {
        "top-1": "22.33 [20.90, 23.77] points", "top-5": "0.00 [0.00, 0.00] points", "share of top-1": "25 %",
        "the paper": "22 points",
    }  # fmt: skip
    assert rows["CIFAR-10, drop(sa) − drop(mlp)"]["top-1"] == "20.33 [18.90, 21.77] points"
    assert rows["CIFAR-10, drop(sa) − 3 × drop(mlp)"]["top-1"] == "16.33 [14.90, 17.77] points"


def test_the_summary_says_what_one_rate_for_all_would_have_had(cells):
    found = record()
    for arm, top1 in (("both", 65.0), ("no-sa", 10.0)):
        found["arms"][arm] |= {
            "lr": 1e-3,
            "grid": {"epochs": 10, "rates": [{"lr": 1e-3, "status": "finished", "top1": top1}]},
        }
    lines = CLAIM.lines(found)
    shared = "had both skips 65.0 %, no attention skip 10.0 %, no MLP skip 80.0 %;"
    assert any("at one rate for all, 0.001, " in str(line) and shared in str(line) for line in lines)
    tiny = cells(CLAIM.lines({**found, "data": "tiny-imagenet", "paper": {}}))
    assert tiny["Tiny-ImageNet, drop with no attention skip"]["the paper"] == "fails to train"


def test_a_second_look_that_is_allowed_and_was_not_taken_is_said():
    def with_speed(found, speed):
        for run in found["arms"]["both"]["runs"]:
            run["images per second"] = speed
        return any("2 more are allowed" in str(line) for line in CLAIM.lines(found))

    open_one = record(mlp=(80, 89, 88))
    assert with_speed(open_one, 50_000.0)
    assert not with_speed(open_one, 5_000.0)  # a run takes longer than two minutes
    assert not with_speed({**open_one, "confidence": SECOND_LOOK}, 50_000.0)
    assert not with_speed(record(), 50_000.0)  # it is decided


def test_diverged_runs_count_as_guessing():
    set_ = IMAGE_SETS["cifar100"]
    found = scores({"metrics": None, "status": "diverged", "why": "the loss became nan"}, set_)
    assert found == {"status": "diverged", "top1": 1.0, "top5": 5.0, "why": "the loss became nan"}


def test_wrong_usage_is_said_before_anything_is_trained(tmp_path):
    with pytest.raises(ValueError, match="--data-dir cifar10=FOLDER"):
        reproduce("asa-fig1c", scale="lab", output=tmp_path, console=CONSOLE)
    with pytest.raises(ValueError, match="the scales are smoke, lab, paper"):
        reproduce("asa-fig1c", scale="huge", output=tmp_path, console=CONSOLE)
    with pytest.raises(ValueError, match=r"--data-dir digits: nothing .* is decided on it \(but on cifar10"):
        reproduce("asa-fig1c", scale="lab", data_dirs=["digits"], output=tmp_path, console=CONSOLE)
    with pytest.raises(ValueError, match="there is no setting 'epoch'; did you mean epochs"):
        reproduce("asa-fig1c", scale="smoke", settings=["epoch=1"], output=tmp_path, console=CONSOLE)
    assert list(tmp_path.iterdir()) == []


def test_the_papers_scale_says_what_it_takes(tmp_path, capsys):
    assert reproduce("asa-fig1c", scale="paper", output=tmp_path, console=Console(width=200)) == 0
    assert "54 trainings of 300 epochs" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_the_lab_scale_extends_its_grid_and_keeps_its_rules(tmp_path):
    """Its own code path, with less of everything: mixed images, bfloat16, a probe while training, a longer grid."""
    data = parse_data(["digits"])[0]
    settings = (
        "epochs=2",
        "warmup_epochs=0",
        "batch_size=256",
        "compile=false",
        "probe_every=5",
        f"model_kwargs={SIZE}",
    )
    options = Options(
        scale="lab", data=(data,), seeds=1, settings=settings, grid_epochs=1, device="cpu", console=CONSOLE,
        output=tmp_path / "runs", evidence=tmp_path,
    )  # fmt: skip
    CLAIM.reproduce(options, Runs(tmp_path / "runs", console=CONSOLE, device="cpu", kept=tmp_path / "kept"))
    found = read_json(tmp_path / "asa-fig1c" / "lab-digits.json")
    run_here = found["arms"]["no-sa"]["runs"][0]
    assert read_json(tmp_path / "kept" / run_here["run"] / "result.json")["measured"]["steps"]
    assert found["settings"]["mixup"] == 0.8
    for arm in found["arms"].values():
        rates = [rate["lr"] for rate in arm["grid"]["rates"]]
        assert set(GRID["lab"]) <= set(rates)
        assert arm["lr at the edge of the grid"] is (arm["lr"] in (LADDER[0], LADDER[-1]))
    assert list(tmp_path.rglob("seed-0-*/probe.jsonl"))
    why = found["verdict on this set"]["parts"][0]["why"]
    assert "1 of 3 seeds" in why
    assert "2 of 100 epochs" in why


def test_a_short_training_warms_up_no_longer_and_what_cannot_be_is_said_at_once():
    data = parse_data(["cifar10=hf:x"])[0]
    short = CLAIM.configure(Options(scale="lab", data=(data,), settings=("epochs=1",)), data, "both")
    assert (short.epochs, short.warmup_epochs) == (1, 1)
    wrong = Options(scale="lab", data=(data,), settings=("epochs=1", "lr=-1"))
    with pytest.raises(ValueError, match="lr must not be negative"):
        CLAIM.configure(wrong, data, "both")


def test_the_lab_scale_is_what_the_claim_asks_for():
    for name in CLAIM.sets:
        data = parse_data([f"{name}=hf:x"])[0]
        options = Options(scale="lab", data=(data,))
        configs = {arm: CLAIM.configure(options, data, arm) for arm in SKIPS}
        for config in configs.values():
            config.check()
            assert (config.epochs, config.batch_size) == ((50, 512) if name == "tiny-imagenet" else (100, 256))
            assert config.probe_marks
            assert config.probe_exact == "float64"
        # The same budget: the arms differ in their skips and in nothing else.
        assert set(configs["both"].differences(configs["no-sa"])) == {"remove_skips"}
        assert set(configs["both"].differences(configs["no-mlp"])) == {"remove_skips"}
