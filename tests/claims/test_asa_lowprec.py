import numpy as np
import pytest
import scipy.fft
import torch
from rich.console import Console

from wellcond.claims.asa_lowprec import CLAIM, NAIVE, OURS, WHOLE, measure_errors
from wellcond.claims.claim import Options
from wellcond.claims.measurements import some_images
from wellcond.claims.reproduce import reproduce
from wellcond.claims.sets import parse_data
from wellcond.numerics.fused import tokens_of
from wellcond.records import read_json

SIZE = "img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2"


def record(ours=90.1, naive=88.0, whole=90.0, *, spread=0.05, **changes):
    tops = {WHOLE: whole, OURS: ours, NAIVE: naive, "dct-float16": ours, "dct-float16-naive": naive, "dct-tf32": whole}
    arms = {
        arm: {
            "lr": 1e-3,
            "runs": [
                {"seed": s, "status": "finished", "top1": top + (spread * s if arm == NAIVE else 0.0), "top5": 99.0,
                 "dct_errors": {"dct (fused)": 8e-4, "dct (all in bfloat16)": 0.1} if arm == OURS else None}
                for s in range(CLAIM.arms[arm].seeds or 3)
            ],
        }
        for arm, top in tops.items()
    }  # fmt: skip
    return {"data": "cifar10", "scale": "lab", "epochs": 100, "seeds": 3, "arms": arms} | changes


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, "holds"),
        ({"naive": 90.0}, "holds in part"),  # low precision does no harm; ours does none either
        ({"ours": 88.5, "naive": 86.0}, "holds in part"),  # bfloat16 itself costs more than half a point
        ({"ours": 88.5, "naive": 88.5}, "does not hold"),
        ({"naive": 89.5, "spread": 0.5}, "undecided"),
    ],
)
def test_the_dct_is_compared_in_the_same_training_and_ours_with_float32(changes, verdict):
    assert CLAIM.verdict([record(**changes)]).verdict == verdict


def test_lines_and_figure_have_every_precision(cells):
    lines = CLAIM.lines(record())
    gain = cells(lines)["CIFAR-10, gain of our DCT over bfloat16, the DCT too"]
    assert gain == {"top-1": "2.05 [1.93, 2.17] points", "top-5": "0.00 [0.00, 0.00] points"}
    assert any("dct (fused) 8.0e-04, dct (all in bfloat16) 1.0e-01" in str(line) for line in lines)
    rows = CLAIM.draw([record()]).to_dict()["data"]["values"]
    assert [row["arm"] for row in rows] == [arm.title for arm in CLAIM.arms.values()]


def test_the_finding_has_both_differences_with_their_signs():
    assert CLAIM.finding([record()]) == (
        "Trained in bfloat16 with our DCT, a grayed ViT-Tiny has +2.0 points of top-1 over one with a DCT computed in "
        "bfloat16 and +0.1 points of top-1 over one trained in float32."
    )
    assert "has −0.3 points of top-1 over one with a DCT" in CLAIM.finding([record(naive=90.35)])


def test_the_finding_says_where_there_is_one_seed():
    found = record()
    found["arms"][WHOLE]["runs"] = found["arms"][WHOLE]["runs"][:1]
    assert CLAIM.finding([found]).endswith("over one trained in float32 (some of one seed).")
    for arm in found["arms"].values():
        arm["runs"] = arm["runs"][:1]
    assert CLAIM.finding([found]).endswith("over one trained in float32 (one seed).")


@pytest.mark.parametrize(("missing", "open_part"), [(NAIVE, 0), (WHOLE, 1)])
def test_what_has_not_been_trained_yet_is_left_out(missing, open_part, cells):
    some = record()
    some["arms"][missing]["runs"] = []
    whole = CLAIM.verdict([some])
    assert whole.verdict == "undecided"
    assert whole.parts[open_part].outcome == "not run"
    assert whole.parts[1 - open_part].outcome == "holds"  # it does not wait for an arm that it is not about
    assert CLAIM.finding([some]).count("points of top-1 over") == 1
    shown = {row["arm"] for row in CLAIM.draw([some]).to_dict()["data"]["values"]}
    assert shown == {arm.title for name, arm in CLAIM.arms.items() if name != missing}
    rows = cells(CLAIM.lines(some))
    assert any("over float32" in row for row in rows.values()) == (missing != WHOLE)
    assert f"CIFAR-10, {CLAIM.arms[missing].title}" not in rows
    assert ("CIFAR-10, gain of our DCT over bfloat16, the DCT too" in rows) == (missing != NAIVE)


def test_the_arms_of_a_pair_differ_in_the_dct_alone():
    data = parse_data(["cifar10=hf:x"])[0]
    configs = {arm: CLAIM.configure(Options(scale="lab", data=(data,)), data, arm) for arm in CLAIM.arms}
    assert set(configs[OURS].differences(configs[NAIVE])) == {"gray_autocast"}
    assert set(configs[NAIVE].differences(configs[WHOLE])) == {"amp_dtype"}  # the DCT in the training's precision
    assert set(configs["dct-float16"].differences(configs["dct-float16-naive"])) == {"gray_autocast"}
    assert set(configs[WHOLE].differences(configs["dct-tf32"])) == {"amp_dtype"}
    assert {config.gray for config in configs.values()} == {"dct"}


@pytest.mark.filterwarnings("ignore:amp_dtype=tf32 makes no difference")  # on a CPU
def test_a_smoke_run_and_the_errors_it_measures(tmp_path):
    code = reproduce(
        "asa-lowprec", scale="smoke", seeds=1, output=tmp_path / "runs", evidence=tmp_path, device="cpu",
        settings=["epochs=1", "batch_size=256", f"model_kwargs={SIZE}"], console=Console(quiet=True),
    )  # fmt: skip
    assert code == 0
    found = read_json(tmp_path / "asa-lowprec" / "smoke-digits.json")
    assert CLAIM.verdict([found], sets=["digits"]).verdict == "undecided"
    losses = {arm: found["arms"][arm]["runs"][0]["losses"][-1] for arm in CLAIM.arms}
    assert len({tuple(loss) for loss in losses.values()}) > 1  # precision is felt
    errors = found["arms"][OURS]["runs"][0]["dct_errors"]
    assert errors["dct (basis)"] < 1e-5 < errors["dct (all in float16)"] < errors["dct (all in bfloat16)"] < 0.1
    # Against SciPy's basis in float64, and everything rounded to bfloat16 after each step.
    result = read_json(tmp_path / "runs" / "smoke" / found["arms"][OURS]["runs"][0]["run"] / "result.json")
    data = parse_data(["digits"])[0]
    config = CLAIM.configure(Options(scale="smoke", data=(data,)), data, OURS).changed(result["config"])
    assert measure_errors(config, tmp_path, "cpu") == errors
    tokens = tokens_of(some_images(config, tmp_path), 4, 4)
    worst = 0.0
    for one in tokens:
        exact, low = _grayed(one.double().numpy()), _grayed(one.double().numpy(), _bfloat16)
        worst = max(worst, np.linalg.norm(low - exact) / np.linalg.norm(exact))
    assert errors["dct (all in bfloat16)"] == pytest.approx(worst, rel=0.05)


def _grayed(x, rounded=lambda values: values):
    left, right = (rounded(scipy.fft.dct(np.eye(side), axis=0, norm="ortho")) for side in x.shape)
    c = rounded(rounded(left @ rounded(x)) @ right.T)
    peak = np.abs(c).max()
    grown = rounded(np.sign(c) * rounded(rounded(np.abs(c) / peak) ** 0.95) * peak)
    return rounded(rounded(left.T @ grown) @ right)


def _bfloat16(values):
    return torch.from_numpy(np.ascontiguousarray(values)).bfloat16().double().numpy()
