"""What all comparisons share: the second look, the limit of time, the queue, and results that were kept elsewhere."""

import contextlib
import io
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from scipy import stats

from wellcond.claims import asa_fig1c
from wellcond.claims import runs as runs_module
from wellcond.claims.arms import HELD_OUT, LADDER, TrainedArms, tune
from wellcond.claims.catalogue import CLAIMS, QUEUE, Step
from wellcond.claims.claim import Claim, Measured, Options
from wellcond.claims.comparison import SKIPS, Arm, Comparison
from wellcond.claims.reproduce import _by_arm, _given, reproduce
from wellcond.claims.runs import Planned, Runs, config_difference
from wellcond.claims.sets import SETS, parse_data
from wellcond.records import read_json, write_json
from wellcond.train.recipes import recipe
from wellcond.train.stopping import OutOfTime
from wellcond.verdicts import not_run

ROOT = Path(__file__).parents[2]
CLAIM = asa_fig1c.CLAIM
QUICK = ["epochs=1", "batch_size=256", "model_kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2"]


STATED = Claim(id="my-stated", claim="a", test="b", holds_if="c")


def told():
    return Console(record=True, width=400, file=io.StringIO())


class Trainer:
    """In the place of `Runs`: every training is done at once, with an accuracy that the test chooses."""

    def __init__(self, top1, speed=50_000.0):
        self.top1, self.speed, self.names, self.left = top1, speed, [], []

    def expect(self, number):
        pass

    def together(self, calls):
        return [call() for call in calls]

    def results(self, pattern):
        return []

    def run(self, plan):
        plan.config.check()
        self.names.append(plan.name)
        config = plan.config.as_json()
        arm = plan.name.split("/")[2]
        top1 = 0.3 - abs(config["lr"] - 3e-4) if config["holdout"] else self.top1[arm][config["seed"]] / 100
        return {
            "name": plan.name, "config": config, "status": "finished", "why": "", "losses": [[1.0, 2.0]],
            "metrics": {"top1": top1, "top5": 0.99}, "images_per_second": self.speed, "log_kappa": None,
            "environment": {"device": "a", "commit": "b"},
        }  # fmt: skip


OPEN = {"both": (90, 91, 90, 90, 91), "no-sa": (68, 69, 67, 68, 68), "no-mlp": (80, 89, 88, 88, 89)}
CLEAR = {"both": (90, 91, 90), "no-sa": (68, 69, 67), "no-mlp": (88, 89, 88)}


@pytest.mark.parametrize(
    ("top1", "speed", "asked", "seeds"),
    [(OPEN, 50_000, True, 5), (OPEN, 1_000, True, 3), (OPEN, 50_000, False, 3), (CLEAR, 50_000, True, 3)],
)
def test_two_more_seeds_where_three_leave_it_open_and_runs_are_quick(tmp_path, top1, speed, asked, seeds):
    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), second_look=asked, evidence=tmp_path, console=Console(quiet=True))
    CLAIM.reproduce(options, Trainer(top1, speed))  # pyright: ignore[reportArgumentType]
    found = read_json(tmp_path / "asa-fig1c" / "lab-cifar10.json")
    assert (found["seeds"], found["confidence"]) == (seeds, 0.975 if seeds == 5 else 0.95)
    assert {len(arm["runs"]) for arm in found["arms"].values()} == {seeds}
    shown = Comparison(found, SKIPS, "both").interval([1.0, 2.0, 3.0])
    truth = stats.t.interval(found["confidence"], 2, loc=2.0, scale=1 / math.sqrt(3))
    assert (shown.low, shown.high) == pytest.approx(truth)


@pytest.mark.parametrize(("first", "confidence"), [({"second_look": True}, 0.975), ({"seeds": 5}, 0.95)])
@pytest.mark.parametrize("then", [{"seeds": 1}, {"second_look": True}, {"seeds": 5}])
def test_what_has_been_looked_at_stays(tmp_path, first, confidence, then):
    """Neither seeds nor the wider intervals of a second look go when fewer seeds are asked for."""
    data = parse_data(["cifar10=hf:x"])[0]
    for asked in (first, then):
        options = Options(scale="lab", data=(data,), evidence=tmp_path, console=Console(quiet=True), **asked)
        CLAIM.reproduce(options, Trainer(OPEN))  # pyright: ignore[reportArgumentType]
        found = read_json(tmp_path / "asa-fig1c" / "lab-cifar10.json")
        assert (found["seeds"], found["confidence"]) == (5, confidence)
        assert {len(arm["runs"]) for arm in found["arms"].values()} == {5}


@pytest.mark.parametrize(("late", "last"), [(False, "seed-2"), (True, "seed-0")])
def test_a_round_waits_for_what_there_is_no_time_for_but_not_for_what_is_not_asked_for(tmp_path, late, last):
    class Some(Trainer):
        def run(self, plan):
            if "/no-sa/" in plan.name:
                self.left += [plan.name] * late
                raise OutOfTime("not trained")
            return super().run(plan)

        def finished(self, plan):
            return None

    claim = replace(CLAIM, in_rounds=True, judge=lambda found: (), summary=lambda found: (), between=None)
    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), evidence=tmp_path, console=Console(quiet=True))
    trainer = Some(CLEAR)
    with pytest.raises(OutOfTime):
        claim.reproduce(options, trainer)  # pyright: ignore[reportArgumentType]
    assert trainer.names[-1] == f"cifar10/vit_tiny/no-mlp/{last}-lr-0.0003"


def test_what_was_asked_for_is_done(tmp_path):
    console, settings = told(), {"scale": "smoke", "seeds": 1, "settings": QUICK, "device": "cpu"}
    places = {"output": tmp_path / "runs", "evidence": tmp_path, "console": console}
    assert reproduce("asa-fig1c", arms=["both"], **settings, **places) == 0
    said = console.export_text()
    assert "What --arm and --seeds asked for is done. Not complete: asa-fig1c on Digits." in said
    assert "The time is over" not in said


@pytest.mark.parametrize("given", [("steps=40", "eval_steps=20"), ("warmup_steps=5",)])
def test_lengths_that_a_user_gives_in_steps_are_kept(tmp_path, given):
    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), settings=given, evidence=tmp_path, console=Console(quiet=True))
    trainer = Trainer(CLEAR)
    CLAIM.reproduce(options, trainer)  # pyright: ignore[reportArgumentType]
    assert any("grid" in name for name in trainer.names)
    assert any("seed" in name for name in trainer.names)


def test_runs_are_named_by_set_recipe_arm_rate_and_seed(tmp_path):
    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), evidence=tmp_path, console=Console(quiet=True))
    names = Trainer(CLEAR)
    CLAIM.reproduce(options, names)  # pyright: ignore[reportArgumentType]
    assert "cifar10/vit_tiny/no-sa/grid-0.0001" in names.names
    assert "cifar10/vit_tiny/no-sa/seed-2-lr-0.0003" in names.names


def test_sets_with_other_seeds_are_paired_by_those_they_share():
    def on(data, seeds, lost):
        arms = {
            arm: {"runs": [{"seed": s, "status": "finished", "top1": 90.0 - down + 0.1 * s} for s in range(seeds)]}
            for arm, down in (("both", 0.0), ("no-sa", lost), ("no-mlp", 1.0))
        }  # fmt: skip
        return {"data": data, "scale": "lab", "epochs": 100, "seeds": seeds, "arms": arms}

    parts = CLAIM.verdict([on("cifar10", 5, 20.0), on("cifar100", 3, 40.0)], sets=["cifar10", "cifar100"]).parts
    assert (parts[-1].outcome, parts[-1].found.count) == ("holds", 3)


def test_our_kept_results_are_those_of_todays_plans():
    """Whoever has a GPU next goes on from them: a setting that has changed would train everything again."""
    paths = sorted((ROOT / "evidence" / "runs" / "lab").rglob("result.json"))
    assert len(paths) >= 17
    for path in paths:
        result = read_json(path)
        name, model, arm, run = result["name"].split("/")
        assert path.parent == ROOT / "evidence" / "runs" / "lab" / result["name"]
        data = parse_data([f"{name}=hf:x"])[0]
        trained = [one for one in CLAIMS.values() if isinstance(one, TrainedArms) and arm in {**one.arms, **one.starts}]
        claim = next(one for one in trained if name in one.sets and one.recipe_of(data, arm) == model)
        config = claim.configure(Options(scale="lab", data=(data,)), data, arm)
        changes = {"lr": result["config"]["lr"], "seed": result["config"]["seed"], **data.set.final(config)}
        if run.startswith("grid"):
            changes |= {"epochs": 10, "eval_every": 10, "holdout": HELD_OUT}
        assert config_difference(config.changed(changes), result["config"]) == "", path


def test_our_evidence_is_what_the_kept_results_say(tmp_path, monkeypatch):
    """By the command for whoever wants to check it, in an empty folder, without data and without training."""
    shutil.copytree(ROOT / "evidence", tmp_path / "evidence")
    before = {path: read_json(path) for path in sorted((tmp_path / "evidence").glob("*/lab-*.json"))}
    for path, record in before.items():
        arms = {arm for arm, one in record.get("arms", {}).items() if one["runs"]}
        kept = {run.parent.name for run in (tmp_path / "evidence/runs/lab" / record["data"]).glob("*/*/seed-*")}
        if arms and arms <= kept:
            write_json(path, {**record, "arms": {}})  # so that nothing can be left as it is
    monkeypatch.chdir(tmp_path)
    console = told()
    assert reproduce(whole_queue=True, scale="lab", training=False, console=console) == 0
    said = console.export_text()
    assert "Nothing was trained." in said
    assert not list(tmp_path.rglob("checkpoints"))
    written = [path for path in before if f"wrote {path.relative_to(tmp_path)}\n" in said]
    assert len(written) >= 16
    assert "asa-fig2: holds in part\n" in said
    for path in written:
        found = read_json(path)
        assert found.pop("environment") != before[path].pop("environment")
        assert found == before[path], path


def test_runs_that_are_left_are_counted_by_arm():
    runs = ["a/vit/both/grid-0.1", "a/vit/both/seed-0", "b/vit/both/seed-0", "a/vit/no-sa/seed-0", "a/vit/both/seed-0"]
    assert _by_arm([*runs, "sky-time on Text"]) == "a/vit: both 2, no-sa 1; b/vit: both 1; sky-time on Text"


def test_what_is_run_of_a_claim_is_what_was_named(tmp_path):
    def names(data_dirs, *ids):
        chosen = [CLAIMS[one] for one in ids] or CLAIMS.values()
        return [one.set.name for one in _given(data_dirs, chosen, whole_queue=not ids, training=True)]

    assert names([], "sky-lra") == ["lra_listops", "lra_pathfinder"]  # which need no folder
    assert names(["lra_text=hf:x"], "sky-lra") == ["lra_text"]
    assert names(["lra_text=hf:x"], "sky-lra", "asa-table1") == ["photographs", "lra_text"]
    assert names(["cifar10=hf:x"]) == ["cifar10", "photographs", "lra_listops", "lra_pathfinder"]  # the whole queue
    with pytest.raises(ValueError, match=r"no such arm; did you mean softmax\? \(they are softmax, kernelized"):
        reproduce("sky-lra", arms=["softmx"], output=tmp_path)
    with pytest.raises(ValueError, match=r"--arm softmax: there is no such arm \(nothing is trained"):
        reproduce("asa-dct", arms=["softmax"], output=tmp_path)


def test_without_training_there_must_be_something_to_read(tmp_path):
    with pytest.raises(ValueError, match="at smoke scale there are none"):
        reproduce("asa-table2", scale="smoke", training=False, output=tmp_path)
    with pytest.raises(ValueError, match="asa-dct compares no trainings"):
        reproduce(["asa-table2", "asa-dct"], scale="lab", training=False, output=tmp_path)
    with pytest.raises(ValueError, match=r"there is no result in .*nowhere.*, or name it with --evidence"):
        reproduce("asa-table2", scale="lab", training=False, output=tmp_path, evidence=tmp_path / "nowhere")


def test_a_second_look_counts_once_it_is_complete(tmp_path):
    class Late(Trainer):
        def run(self, plan):
            if plan.config.seed > 3:
                raise OutOfTime("over")
            return super().run(plan)

    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), second_look=True, evidence=tmp_path, console=Console(quiet=True))
    with pytest.raises(OutOfTime):
        CLAIM.reproduce(options, Late(OPEN))  # pyright: ignore[reportArgumentType]
    found = read_json(tmp_path / "asa-fig1c" / "lab-cifar10.json")
    assert (found["seeds"], found["confidence"]) == (3, 0.95)


def test_the_scores_of_rates_are_evidence_before_any_seed_is_trained(tmp_path, cells):
    class Late(Trainer):
        def run(self, plan):
            if not plan.config.holdout or plan.name.endswith("no-skip/grid-0.01"):
                raise OutOfTime("over")
            return super().run(plan)

    claim, data = CLAIMS["asa-fig6"], parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), evidence=tmp_path, console=Console(quiet=True))
    with pytest.raises(OutOfTime):
        claim.reproduce(options, Late({}))  # pyright: ignore[reportArgumentType]
    found = read_json(tmp_path / "asa-fig6" / "lab-cifar10.json")
    assert found["arms"]["skip"]["lr"] == 3e-4
    assert [rate["lr"] for rate in found["arms"]["no-skip"]["grid"]["rates"]] == [3e-3]
    verdict = claim.verdict([found], sets=["cifar10"])
    assert [part.outcome for part in verdict.parts] == ["not run"]
    assert claim.finding([found]) == (
        "So far only the trainings that choose the learning rates: on held-out images of CIFAR-10, after 10 epochs, "
        "top-1 is at best 30.0 % with its skip, 29.7 % without its skip."
    )
    tuned = cells(claim.lines(found), "Top-1 in % on held-out images by learning rate, after 10 epochs")
    assert list(tuned) == [
        "CIFAR-10, with its skip (no seeds yet)",
        "CIFAR-10, without its skip (no seeds yet, and the best is the last that was tried)",
    ]
    skip, without = tuned.values()
    assert (skip["0.0001"], skip["0.0003"], without) == ("30.0", "**30.0**", {"0.003": "29.7"})  # in bold the chosen
    rows = claim.draw([found]).to_dict()["data"]["values"]
    assert {(row["arm"], row["lr"], row["top1"]) for row in rows} > {("without its skip", 3e-3, 29.73)}


def test_rates_that_all_diverged_are_shown(cells):
    rates = [{"lr": lr, "status": "diverged", "top1": 10.0} for lr in (3e-4, 1e-3)]
    arms = {"both": {"runs": [], "grid": {"epochs": 10, "rates": rates}}}
    lines = CLAIM.lines({"data": "cifar10", "scale": "lab", "epochs": 100, "seeds": 3, "arms": arms})
    assert cells(lines, "Top-1 in % on held-out images by learning rate, after 10 epochs") == {
        "CIFAR-10, both skips (no seeds yet)": {"0.0003": "diverged", "0.001": "diverged"}
    }


@pytest.mark.parametrize("in_time", [True, False])
def test_exploration_comes_after_the_second_look_and_does_not_keep_it_from_counting(tmp_path, in_time):
    class Late(Trainer):
        def run(self, plan):
            if "/odd/" in plan.name and not in_time:
                raise OutOfTime("over")
            return super().run(plan)

    odd = Arm(title="odd", settings={"drop_path": 0.1}, seeds=1)
    claim = replace(CLAIM, arms={"odd": odd, **SKIPS})  # it would come first, by the order of the arms
    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), second_look=True, evidence=tmp_path, console=Console(quiet=True))
    trainer = Late({**OPEN, "odd": (50,)})
    with contextlib.nullcontext() if in_time else pytest.raises(OutOfTime):
        claim.reproduce(options, trainer)  # pyright: ignore[reportArgumentType]
    found = read_json(tmp_path / "asa-fig1c" / "lab-cifar10.json")
    assert (found["seeds"], found["confidence"]) == (5, 0.975)
    runs = {arm: len(one["runs"]) for arm, one in found["arms"].items()}
    assert runs == {"odd": int(in_time), **dict.fromkeys(SKIPS, 5)}
    explored = ["/odd/" in name for name in trainer.names]
    assert explored == sorted(explored)


def test_a_record_is_not_replaced_by_one_without_its_arms(tmp_path):
    """Of the first runs only the records are left: a claim that shows arms of others would lose them."""
    data, console = parse_data(["cifar10=hf:x"])[0], told()
    options = Options(scale="lab", data=(data,), evidence=tmp_path, console=console)
    CLAIM.reproduce(options, Trainer(CLEAR))  # pyright: ignore[reportArgumentType]
    path = tmp_path / "asa-fig1c" / "lab-cifar10.json"
    before = path.read_bytes()
    claim = replace(CLAIM, trains=("both",), judge=lambda found: (), summary=lambda found: (), between=None)
    claim.reproduce(options, Trainer({"both": (80, 81, 80)}))  # pyright: ignore[reportArgumentType]
    assert path.read_bytes() == before
    assert "stays as it is: it has runs of no-sa, no-mlp, whose results" in console.export_text()
    path.write_text("damaged")
    claim.reproduce(options, Trainer({"both": (80, 81, 80)}))  # pyright: ignore[reportArgumentType]
    assert [one["top1"] for one in read_json(path)["arms"]["both"]["runs"]] == [80.0, 81.0, 80.0]


# ---- the queue and its time


def test_the_queue_says_what_it_skips_and_shares_runs(tmp_path, monkeypatch):
    console, trained = told(), []
    train = runs_module.train

    def counted(config, folder, **options):
        trained.append(folder)
        return train(config, folder, **options)

    monkeypatch.setattr(runs_module, "train", counted)
    skips = Step(("asa-fig1c", "asa-fig1b", "asa-fig2"))
    monkeypatch.setitem(CLAIMS, STATED.id, STATED)
    monkeypatch.setattr(sys.modules["wellcond.claims.reproduce"], "QUEUE", (skips, Step((STATED.id,)), skips))
    code = reproduce(
        whole_queue=True, scale="smoke", seeds=1, settings=QUICK, output=tmp_path / "runs", evidence=tmp_path,
        console=console, device="cpu",
    )  # fmt: skip
    said = console.export_text()
    assert code == 0
    assert "not built yet: my-stated." in said
    assert len(trained) == len(set(trained)) == 9  # three arms, two rates and one seed each, for three claims
    for id_ in ("asa-fig1b", "asa-fig1c", "asa-fig2"):
        assert (tmp_path / id_ / "smoke-digits.json").exists()


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_claim_that_cannot_be_run_does_not_end_the_queue(tmp_path, monkeypatch, error):
    def refuse(options):
        raise error("it needs a GPU, and there is none here")

    def claim(id_, measure):
        return Measured(id=id_, claim="a", test="b", holds_if="c", measure=measure,
                        judge=lambda record: [not_run("c")])  # fmt: skip

    for one in (claim("my-first", refuse), claim("my-second", lambda options: {"value": 1})):
        monkeypatch.setitem(CLAIMS, one.id, one)
    console = told()
    places = {"scale": "lab", "output": tmp_path / "runs", "evidence": tmp_path, "console": console}
    assert reproduce(["my-first", "my-second"], **places) == 1
    assert read_json(tmp_path / "my-second" / "lab.json")["value"] == 1
    said = console.export_text()
    assert "Not run: my-first (it needs a GPU, and there is none here)" in said
    assert said.endswith("my-first   no evidence yet\nmy-second  undecided\n")
    assert ("Traceback" in said) == (error is RuntimeError)
    with pytest.raises(error, match="it needs a GPU"):
        reproduce("my-first", **places)


def test_the_queue_has_the_claims_in_the_order_of_worth():
    built = [one for step in QUEUE for one in step.claims if CLAIMS[one].built]
    assert list(dict.fromkeys(built)) == [
        "asa-fig1c", "asa-fig1b", "asa-fig2", "asa-table2", "sky-table1", "sky-lra", "sky-time", "sky-fig1", "sky-fig2",
        "sky-approx", "asa-table3", "asa-fig4", "new-kernel-skip", "asa-fig3", "asa-fig7", "asa-fig8", "asa-assume1",
        "asa-assume2", "asa-dct", "asa-lowprec", "asa-table1", "asa-table5", "asa-fig6", "asa-table4", "asa-fig5",
        "new-graying-details", "new-kappa-predicts", "new-early-warning",
    ]  # fmt: skip


def test_a_set_without_a_place_is_named(tmp_path, monkeypatch):
    console = told()
    monkeypatch.setitem(CLAIMS, STATED.id, STATED)
    for name in ("cifar10", "cifar100"):
        (tmp_path / name).mkdir()
    with pytest.raises(ValueError, match="the queue at lab scale is run on real data"):
        reproduce(whole_queue=True, scale="lab", output=tmp_path, console=console)
    with pytest.raises(ValueError, match="name claims, or take all"):
        reproduce(scale="smoke", console=console)
    with pytest.raises(ValueError, match="cannot be run yet; those that can are asa-fig1b, asa-fig1c, asa-fig2"):
        reproduce("my-stated", console=console)
    with pytest.raises(ValueError, match="--time-limit is a time such as"):
        reproduce("asa-fig1c", time_limit="soon", console=console)


def test_the_time_over_ends_with_0_and_says_what_is_left(tmp_path, monkeypatch):
    console = told()
    monkeypatch.setattr(runs_module, "process_age", lambda: 539.0)
    code = reproduce(
        ["asa-fig1c", "asa-fig1b"], scale="smoke", seeds=1, settings=QUICK, output=tmp_path / "runs",
        evidence=tmp_path / "evidence", console=console, time_limit="9m",
    )  # fmt: skip
    said = console.export_text()
    assert code == 0
    assert "not started: 1 s are left" in said
    assert "Not finished: asa-fig1c on Digits; asa-fig1b on Digits." in said
    assert "digits/vit_tiny/no-mlp/grid-0.003" in said
    assert not (tmp_path / "evidence").exists()


def test_evidence_in_part_is_written_where_the_claim_allows_it(tmp_path, monkeypatch):
    arguments = {
        "scale": "smoke", "seeds": 1, "settings": QUICK, "output": tmp_path / "runs", "evidence": tmp_path,
        "device": "cpu", "console": told(),
    }  # fmt: skip
    assert reproduce("asa-fig1c", **arguments) == 0  # trains the plain arm of asa-table2, too
    monkeypatch.setattr(runs_module, "process_age", lambda: 539.0)
    monkeypatch.setitem(CLAIMS, "my-table2", replace(CLAIMS["asa-table2"], id="my-table2", in_part=False))
    for id_ in ("asa-table2", "my-table2"):
        assert reproduce(id_, time_limit="9m", **arguments) == 0
    found = read_json(tmp_path / "asa-table2" / "smoke-digits.json")
    assert {arm for arm, one in found["arms"].items() if one["runs"]} == {"both"}
    assert not (tmp_path / "my-table2").exists()


def kept_run(root, name, speed):
    config = recipe("vit_tiny", scale="lab").as_json()
    write_json(root / name / "result.json", {
        "name": name, "config": config, "status": "finished", "metrics": {"top1": 0.5}, "images_per_second": speed,
        "environment": {"device": runs_module.environment()["device"]},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("age", "images", "starts"),
    [
        (100, 40_000, True),  # 42 s and some around it, and 440 are left
        (500, 40_000, False),  # and 40 are left
        (500, 0, True),  # nobody knows how long it takes: it is saved when the time is over
        (520, 0, False),  # 20 s are no time for anything
        (500, 10_000_000, True),  # it never fits: begun and taken up again, it ends some day
    ],
)
def test_what_will_not_be_done_is_not_started(tmp_path, monkeypatch, age, images, starts):
    monkeypatch.setattr(runs_module, "process_age", lambda: float(age))
    monkeypatch.setattr(runs_module, "train", lambda *a, **k: (_ for _ in ()).throw(OutOfTime("saved")))
    runs = Runs(tmp_path, console=Console(quiet=True), device="cpu", time_limit="9m")
    kept_run(tmp_path, "digits/vit_tiny/both/seed-0", 1000.0)
    config = recipe("vit_tiny", scale="lab")
    runs.run(Planned(name="digits/vit_tiny/both/seed-0", config=config))
    plan = Planned(name="digits/vit_tiny/both/seed-1", config=config.changed({"compile": False}), images=images)
    with pytest.raises(OutOfTime, match="saved" if starts else "not started"):
        runs.run(plan)
    assert runs.left == [plan.name]


def test_another_arms_speed_tells_too_and_another_devices_does_not(tmp_path):
    runs = Runs(tmp_path, console=Console(quiet=True), device="cpu", time_limit="9m")
    config = recipe("vit_tiny", scale="lab").changed({"compile": False})
    plan = Planned(name="digits/vit_tiny/no-sa/seed-0", config=config, images=21_000)
    result = {"images_per_second": 1000.0, "environment": {"device": "another"}}
    runs._note_speed("digits/vit_tiny/both/seed-0", result)
    assert runs._needed(plan, compiled=True) is None
    result["environment"] = {"device": runs_module.environment()["device"]}
    runs._note_speed("digits/vit_tiny/both/seed-0", result)
    needed = 21 * 1.05 + runs_module.AROUND
    assert runs._needed(plan, compiled=False) == pytest.approx(needed)  # it is not compiled at all
    compiles = replace(plan, config=config.changed({"compile": True}))
    assert runs._needed(compiles, compiled=True) == pytest.approx(needed)
    assert runs._needed(compiles, compiled=False) == pytest.approx(needed + runs_module.COMPILING)


def test_a_run_out_of_time_is_saved_and_the_others_are_tried(tmp_path):
    runs = Runs(tmp_path, console=Console(quiet=True), device="cpu")
    called = []

    def late():
        called.append("late")
        raise OutOfTime("over")

    with pytest.raises(OutOfTime):
        runs.together([late, lambda: called.append("short")])
    assert called == ["late", "short"]


def test_a_statement_is_reproduced_like_any_claim(tmp_path):
    code = reproduce(
        "sky-lemmaC1", scale="smoke", output=tmp_path / "runs", evidence=tmp_path / "evidence", console=told()
    )
    assert code == 0
    assert read_json(tmp_path / "runs" / "smoke" / "theory" / "sky-lemmaC1.json")["verdict"]
    assert not (tmp_path / "evidence").exists()  # which a smoke run must not replace


def test_sets_are_those_of_the_catalogue():
    for one in CLAIMS.values():
        assert set(one.sets) <= set(SETS)


# ---- the learning rate of one arm

RATES = (1e-4, 3e-4, 1e-3)


@pytest.mark.parametrize("peak", LADDER)
def test_the_grid_follows_the_best_wherever_it_is(peak):
    asked = []

    def score(lr: float) -> float:
        asked.append(lr)
        return -abs(math.log(lr / peak))

    found = tune(score, grid=RATES)
    assert found.lr == peak
    assert list(found.scores) == sorted(asked)
    assert len(asked) == len(set(asked))
    assert set(RATES) <= set(asked)
    assert found.at_edge is (peak in (LADDER[0], LADDER[-1]))


def test_a_grid_may_be_fixed():
    found = tune(lambda lr: lr, grid=(3e-4, 1e-3), extend=False)
    assert (found.lr, found.at_edge, list(found.scores)) == (1e-3, True, [3e-4, 1e-3])


def test_where_all_diverge_smaller_rates_are_tried():
    found = tune(lambda lr: -math.inf, grid=RATES)
    assert min(found.scores) == LADDER[0]
    assert max(found.scores) == max(RATES)
    assert found.at_edge


def test_a_diverged_run_is_never_chosen():
    assert tune(lambda lr: -math.inf if lr > 2e-4 else 0.1, grid=RATES).lr < 2e-4
    with pytest.raises(ValueError, match="at least one"):
        tune(lambda lr: 0.0, grid=())


def test_a_claim_may_have_no_arms_but_explorations():
    record = read_json(ROOT / "evidence" / "asa-fig1c" / "lab-cifar10.json")
    explored = replace(CLAIM, arms={name: replace(arm, seeds=1) for name, arm in CLAIM.arms.items()})
    assert explored.verdict([record], sets=["cifar10"]).parts == CLAIM.verdict([record], sets=["cifar10"]).parts


def test_arms_that_were_not_trained_on_the_same_data_are_named():
    def one(arm, seed, data):
        return {"seed": seed, "status": "finished", "top1": 90.0, "data": data}

    arms = {
        "both": {"lr": 1e-3, "runs": [one("both", 0, "a"), one("both", 1, "b")]},
        "no-sa": {"lr": 1e-3, "runs": [one("no-sa", 0, "a"), one("no-sa", 1, "c")]},
        "no-mlp": {"lr": 1e-3, "runs": [one("no-mlp", 0, "a"), one("no-mlp", 1, None)]},
    }
    found = {"data": "cifar10", "scale": "lab", "epochs": 100, "seeds": 2, "arms": arms}
    said = [str(line) for line in CLAIM.lines(found) if "trained on data that differ" in str(line)]
    assert said == [
        "CIFAR-10, seed 1: these were trained on data that differ in content or in order: both skips; no attention skip"
    ]


def test_a_claim_with_a_slow_arm_takes_no_second_look(tmp_path):
    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), second_look=True, evidence=tmp_path, console=Console(quiet=True))
    replace(CLAIM, second_look=False).reproduce(options, Trainer(OPEN))  # pyright: ignore[reportArgumentType]
    assert read_json(tmp_path / "asa-fig1c" / "lab-cifar10.json")["seeds"] == 3


def test_the_ladder_of_rates_goes_on_where_a_convmixer_trains_best():
    found = tune(lambda lr: -abs(math.log(lr / 3e-2)), grid=(3e-3, 1e-2, 3e-2))
    assert (found.lr, found.at_edge, list(found.scores)) == (3e-2, False, [3e-3, 1e-2, 3e-2, 1e-1])


def test_a_damaged_record_ends_no_queue(tmp_path, monkeypatch):
    shutil.copytree(ROOT / "evidence", tmp_path / "evidence")
    (tmp_path / "evidence" / "asa-fig2" / "lab-broken.json").write_text('{"claim": ')
    monkeypatch.chdir(tmp_path)
    console = told()
    assert reproduce(["asa-fig2", "asa-fig3"], scale="lab", training=False, console=console) == 0
    said = console.export_text()
    assert "asa-fig2: no verdict, " in said
    assert "lab-broken.json is not JSON" in said
    assert "asa-fig3: holds\n" in said


def test_a_folder_that_is_not_the_set_is_refused(tmp_path):
    run = {"status": "finished", "steps": 1750, "config": {"epochs": 10, "batch_size": 256, "holdout": 0.1}}
    SETS["cifar10"].check_trained(run, "folder:photos")
    SETS["lra_text"].check_trained(run, "anything")
    with pytest.raises(ValueError, match=r"folder:photos is not CIFAR-10: .* about 284 images to train on, not 50,000"):
        SETS["cifar10"].check_trained({**run, "steps": 10}, "folder:photos")
    with pytest.raises(ValueError, match="is not Tiny-ImageNet"):
        SETS["tiny-imagenet"].check_trained(run, "folder:photos")
    for path in (ROOT / "evidence/runs/lab").rglob("result.json"):
        result = read_json(path)
        SETS[result["name"].split("/")[0]].check_trained(result, "ours")


def test_where_nothing_can_be_written_nothing_is_started(tmp_path):
    (tmp_path / "file").write_text("")
    for wrong in ("evidence", "output"):
        places = {"evidence": tmp_path, "output": tmp_path} | {wrong: tmp_path / "file" / "x"}
        with pytest.raises(ValueError, match="nothing can be written to"):
            reproduce("asa-fig1c", scale="smoke", **places)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(("scores", "seeds", "confidence"), [(CLEAR, 3, 0.95), (OPEN, 5, 0.975)])
def test_asking_for_fewer_seeds_than_there_are_takes_none_from_the_record(tmp_path, scores, seeds, confidence):
    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), second_look=True, evidence=tmp_path, console=Console(quiet=True))
    for asked in (options, replace(options, seeds=1, second_look=False)):
        CLAIM.reproduce(asked, Trainer(scores))  # pyright: ignore[reportArgumentType]
        found = read_json(tmp_path / "asa-fig1c" / "lab-cifar10.json")
        assert (found["seeds"], found["confidence"]) == (seeds, confidence)
        assert {len(arm["runs"]) for arm in found["arms"].values()} == {seeds}
