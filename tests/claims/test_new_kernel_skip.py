import pytest
from rich.console import Console

from wellcond.claims.claim import Options
from wellcond.claims.new_kernel_skip import ARMS, CLAIM
from wellcond.claims.reproduce import reproduce
from wellcond.claims.sets import parse_data
from wellcond.records import read_json

NEAR = (0.0, 0.2, -0.1)


def record(data="cifar10", *, kernelized=70.0, left_out=()):
    middle = {"both": 88.0, "no-sa": 62.0, "kernelized": 87.0, "kernelized-no-sa": kernelized, "linear": 86.0,
              "linear-no-sa": 50.0, "skyformer": 86.0, "skyformer-no-sa": 70.0}  # fmt: skip
    arms = {}
    for arm, value in middle.items():
        runs = [{"seed": s, "status": "finished", "top1": value + one, "top5": 99.0} for s, one in enumerate(NEAR)]
        arms[arm] = {"lr": 1e-3, "runs": [] if arm in left_out or data in ARMS[arm].not_on else runs}
    epochs = 50 if data == "tiny-imagenet" else 100
    return {"data": data, "scale": "lab", "epochs": epochs, "seeds": 3, "arms": arms}


@pytest.mark.parametrize(("kernelized", "verdict"), [(70.0, "holds"), (55.0, "does not hold"), (61.1, "undecided")])
def test_it_is_decided_by_softmax_and_kernelized(kernelized, verdict):
    one = record(kernelized=kernelized, left_out=("linear", "linear-no-sa", "skyformer"))
    if verdict == "undecided":
        for run, more in zip(one["arms"]["no-sa"]["runs"], (1.0, -2.0, 0.5), strict=True):
            run["top1"] += more
    assert CLAIM.verdict([one], sets=["cifar10"]).verdict == verdict


def test_tiny_imagenet_needs_two_attentions_alone():
    whole = CLAIM.verdict([record(), record("tiny-imagenet")])
    assert whole.verdict == "holds"
    missing = CLAIM.verdict([record(), record("tiny-imagenet", left_out=("kernelized-no-sa",))])
    assert [part.outcome for part in missing.parts] == ["holds", "not run"]
    assert CLAIM.finding([record(), record("tiny-imagenet")]) == (
        "Without its attention skips a ViT-Tiny loses, in points of top-1, 26.0 with softmax, 17.0 with kernelized, "
        "36.0 with linear and 16.0 with Skyformer on CIFAR-10 (kernelized against softmax: −1.0 with the skips, +8.0 "
        "without); 26.0 with softmax and 17.0 with kernelized on Tiny-ImageNet (kernelized against softmax: −1.0 with "
        "the skips, +8.0 without)."
    )
    for left_out, said in ((("kernelized",), "not all run"), (("kernelized", "kernelized-no-sa"), "not run")):
        one = CLAIM.finding([record("tiny-imagenet", left_out=left_out)])
        assert one.endswith(f"26.0 with softmax on Tiny-ImageNet (kernelized has {said}).")


def test_more_seeds_may_be_asked_for_where_not_all_arms_are_trained():
    wide = record("tiny-imagenet", kernelized=61.1)
    for arm, more in (("no-sa", (1.0, -2.0, 0.5)), ("kernelized-no-sa", (-1.0, 2.0, -0.5))):
        for run, one in zip(wide["arms"][arm]["runs"], more, strict=True):
            run["top1"] += one
            run["images per second"] = 1e6
    assert CLAIM._asks_for_more(wide, 100_000 * 50)


def test_figure_and_lines_leave_out_what_was_not_trained(cells):
    rows = CLAIM.draw([record("tiny-imagenet")]).to_dict()["data"]["values"]
    skips = ("Tiny-ImageNet, both skips", "Tiny-ImageNet, no attention skip")
    assert [(row["set"], row["arm"]) for row in rows] == [
        (one, arm) for one in skips for arm in ("softmax", "kernelized")
    ]
    lines = cells(CLAIM.lines(record("tiny-imagenet")))
    drops = {what: row["top-1"] for what, row in lines.items() if "drop without its skip" in what}
    assert drops == {
        "Tiny-ImageNet, drop without its skip, softmax": "26.00 [26.00, 26.00] points",
        "Tiny-ImageNet, drop without its skip, kernelized": "17.00 [17.00, 17.00] points",
    }
    against = {what: row["top-1"] for what, row in lines.items() if "against" in what}
    assert against == {
        "Tiny-ImageNet, kernelized, against softmax": "−1.00 [−1.00, −1.00] points",
        "Tiny-ImageNet, kernelized, no attention skip, against softmax, no attention skip": "8.00 [8.00, 8.00] points",
    }


def test_kappa_around_the_attention_is_told_of_the_runs_that_measured_it(cells):
    one = record("tiny-imagenet")
    for seed, run in enumerate(one["arms"]["kernelized"]["runs"][:2]):
        blocks = {"in": [5.0, 7.0], "sa": [20.0 + seed, 22.0 + seed], "+sa": [6.0, 6.0]}
        run["kappa"] = {
            "untrained": blocks,
            "trained": {site: [one + 1.0 for one in at] for site, at in blocks.items()},
        }
    rows = cells(CLAIM.lines(one), "log κ around attention")
    assert list(rows) == [f"Tiny-ImageNet, kernelized, {when}" for when in ("trained", "untrained")]
    start = rows["Tiny-ImageNet, kernelized, untrained"]
    assert (start["in"], start["sa"][:5]) == ("6.00 [6.00, 6.00]", "21.50")


@pytest.mark.parametrize("name", CLAIM.sets)
def test_an_arm_differs_from_softmax_in_its_attention_and_skip_alone(name):
    data = parse_data([f"{name}=hf:x"])[0]
    configs = {arm: CLAIM.configure(Options(scale="lab", data=(data,)), data, arm) for arm in CLAIM.arms}
    for arm, config in configs.items():
        config.check()
        assert config.differences(configs["both"]).keys() <= {"attention", "attention_kwargs", "remove_skips"}
        assert (config.remove_skips == ("sa",)) == arm.endswith("no-sa")


def test_a_smoke_run(tmp_path):
    arms = ["both", "no-sa", "kernelized", "kernelized-no-sa"]
    code = reproduce(
        "new-kernel-skip", scale="smoke", seeds=1, arms=arms, settings=["epochs=1", "batch_size=256"],
        output=tmp_path / "runs", evidence=tmp_path, device="cpu", console=Console(quiet=True),
    )  # fmt: skip
    assert code == 0
    found = read_json(tmp_path / "new-kernel-skip" / "smoke-digits.json")
    assert CLAIM.verdict([found], sets=["digits"]).verdict == "undecided"
    assert [arm for arm, one in found["arms"].items() if one["runs"]] == arms
