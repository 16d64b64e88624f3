"""asa-table4 and asa-fig5 (κ of five models, one seed), asa-table5 (masked autoencoding): smoke runs and judges."""

import json

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from wellcond.claims import asa_fig5, asa_table4, asa_table5, measurements
from wellcond.claims import runs as runs_module
from wellcond.claims.claim import Options
from wellcond.claims.five_models import ARMS, MODELS, lowered
from wellcond.claims.reproduce import reproduce
from wellcond.claims.sets import parse_data
from wellcond.data import open_data
from wellcond.records import read_json
from wellcond.train.config import Config
from wellcond.train.tasks import make_task
from wellcond.words import BLOCK_SITES, DEFAULT_SITES

CONSOLE = Console(quiet=True)
SIZE = "img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2"
QUICK = ["epochs=1", "batch_size=256", f"model_kwargs={SIZE}"]


def run(folder, *ids, settings=()):
    return reproduce(
        ids, scale="smoke", settings=settings, output=folder / "runs", evidence=folder / "evidence", console=CONSOLE
    )


# ---- five models, one seed


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    assert run(folder, "asa-table4", settings=["steps=2"]) == 0
    return folder


def test_every_model_is_trained_once_and_fig5_trains_nothing(models, monkeypatch, cells):
    record = read_json(models / "evidence" / "asa-table4" / "smoke-digits.json")
    assert {arm: len(one["runs"]) for arm, one in record["arms"].items()} == dict.fromkeys(ARMS, 1)
    for model in MODELS:
        plain, grayed = (record["arms"][f"{model}{side}"]["runs"][0]["log_kappa_groups"] for side in ("", "-dct"))
        assert len(plain) == len(grayed) == 10
        assert plain != grayed
    monkeypatch.setattr(runs_module, "train", lambda *args, **kwargs: pytest.fail("it was trained again"))
    assert run(models, "asa-fig5", settings=["steps=2"]) == 0
    found = read_json(models / "evidence" / "asa-fig5" / "smoke-digits.json")
    assert found["arms"]["vit_base"]["runs"] == record["arms"]["vit_base"]["runs"]
    assert found["verdict on this set"]["verdict"] == "undecided"
    assert all("at the random start" in row for row in cells(asa_table4.CLAIM.lines(record)).values())
    assert any("higher with graying in" in str(line) for line in asa_fig5.CLAIM.lines(found))


def test_groups_are_parts_of_the_images_that_both_ends_are_measured_on(models):
    record = read_json(models / "evidence" / "asa-table4" / "smoke-digits.json")
    one = record["arms"]["pvt_v2_b3-dct"]["runs"][0]
    sizes = torch.tensor([len(range(first, one["log_kappa"]["images"], 10)) for first in range(10)]).double()
    groups = torch.tensor(one["log_kappa_groups"], dtype=torch.float64)
    mean = (sizes[:, None] * groups).sum(0) / sizes.sum()
    assert mean.tolist() == pytest.approx(one["log_kappa"]["trained"]["+sa"], abs=1e-4)


def test_of_few_images_there_are_fewer_groups(models, monkeypatch):
    tenth = measurements._tenth
    monkeypatch.setattr(measurements, "_tenth", lambda part: tenth(part)[:4])
    (result,) = (models / "runs").rglob("vit_small/seed-*/result.json")
    config = Config.from_json(read_json(result)["config"])
    assert len(measurements.measure_groups(config, result.parent, "cpu")) == 4


def kappas(fall, blocks=12, noise=0.01):
    """Ten groups, plain and grayed: the same but for `fall` and, group by group, some noise."""
    plain = [[6.0 + 0.1 * group] * blocks for group in range(10)]
    falls = fall if isinstance(fall, list) else [fall] * blocks
    grayed = [[6.0 + 0.1 * g - falls[b] + noise * (-1) ** g for b in range(blocks)] for g in range(10)]
    return plain, grayed


def record(fall=0.2, *, weak=(), top1=80.0, speed=2000.0, **changes):
    """Evidence as a lab run would write it; graying raises κ in the models of `weak`."""
    arms = {}
    for model in MODELS:
        for side, groups in zip(("", "-dct"), kappas(-0.2 if model in weak else fall), strict=True):
            ends = {when: dict.fromkeys(DEFAULT_SITES, groups[0]) for when in ("trained", "untrained")}
            one = {"seed": 0, "status": "finished", "top1": top1, "top5": 98.0, "images per second": speed}
            capped = {"trained": 7, "untrained": 0}
            one |= {"log_kappa": {**ends, "images": 393, "capped": capped}, "log_kappa_groups": groups}
            arms[f"{model}{side}"] = {"lr": 3e-4, "runs": [one]}
    return {"data": "imagenette", "scale": "lab", "epochs": 50, "seeds": 1, "arms": arms} | changes


def test_kappa_decides_model_by_model_and_accuracy_is_out_of_reach():
    whole = asa_table4.CLAIM.verdict([record()])
    assert [part.outcome for part in whole.parts] == ["holds"] * 5 + ["out of reach here"]
    assert whole.verdict == "holds in part"
    assert whole.parts[0].found.mean == pytest.approx(0.2)
    # 10 trainings × 3 seeds of 300 epochs, 400 for CaiT, over 1,281,167 images at 2,000 a second
    hours = 3 * 2 * (4 * 300 + 400) * 1_281_167 / 2000 / 3600
    assert f"{hours:,.0f} GPU hours" in whole.parts[-1].why
    weak = asa_table4.CLAIM.verdict([record(weak=["swin_small"])])
    assert weak.verdict == "holds in part"
    assert [part.name[:18] for part in weak.parts if part.outcome == "does not hold"] == ["Imagenette: Swin-S"]
    assert asa_table4.CLAIM.verdict([record(weak=MODELS)]).verdict == "does not hold"
    noisy = asa_table4.CLAIM.verdict([record(fall=0.001)])
    assert noisy.verdict == "undecided"
    assert "these 10 groups of images could have seen" in noisy.parts[0].why


def test_the_finding_is_one_sentence(cells):
    some = record(weak=["swin_small"])
    some["arms"]["cait_s24-dct"]["runs"] = []
    assert asa_table4.CLAIM.finding([some]) == (
        "DCT graying changes mean log κ after attention by −0.20 in ViT-B, −0.20 in ViT-S, +0.20 in Swin-S and −0.20 "
        "in PVT v2 b3 (one seed each)."  # of CaiT one side has run
    )
    some["arms"]["cait_s24"]["runs"] = []
    assert "(one seed each; 1 of 5 models are missing)" in asa_table4.CLAIM.finding([some])
    rows = cells(asa_fig5.CLAIM.lines(fig5([0.2] * 10 + [-0.2] * 2)))
    assert {what: row.get("at the ceiling (lower bounds)") for what, row in rows.items()} == {
        f"Imagenette, ViT-B, {side}, {when}: log κ": "7 matrices" if when == "trained" else None
        for side in ("plain", "DCT graying") for when in ("trained", "untrained")
    }  # fmt: skip
    found = asa_fig5.CLAIM.finding([fig5([0.2] * 10 + [-0.2] * 2)])
    assert found == (
        "With DCT graying, log κ after attention is lower in 10 of 12 layers of one trained ViT-B, on "
        "average 5.81 instead of 6.00."
    )
    some["arms"]["vit_base"]["runs"] = []
    assert asa_fig5.CLAIM.finding([some]) == ""


def test_a_model_that_is_not_respectable_or_not_trained_decides_nothing():
    whole = asa_table4.CLAIM.verdict([record(top1=70.0)])
    assert whole.verdict == "undecided"
    assert "plain it reaches 70.0 %, not the 75 asked" in whole.parts[0].why
    some = record()
    some["arms"]["cait_s24-dct"]["runs"] = []
    assert asa_table4.CLAIM.verdict([some]).verdict == "undecided"
    assert "GPU hours" not in asa_table4.CLAIM.verdict([some]).parts[-1].why


def test_each_model_is_judged_by_itself():
    some = record()
    for arm in some["arms"]:
        if not arm.startswith("vit_small"):
            some["arms"][arm]["runs"] = []
    outcomes = [part.outcome for part in asa_table4.CLAIM.verdict([some]).parts]
    assert outcomes == ["not run", "holds", "not run", "not run", "not run", "out of reach here"]
    assert asa_table4.CLAIM.finding([some]).endswith("by −0.20 in ViT-S (one seed each; 4 of 5 models are missing).")
    assert asa_table4.CLAIM.draw([some])


def test_a_model_that_diverged_has_no_kappa_to_compare():
    lost = record()
    diverged(lost["arms"]["swin_small-dct"]["runs"][0])
    part = asa_table4.CLAIM.verdict([lost]).parts[2]
    assert (part.outcome, part.why) == ("undecided", "there is no κ to compare: Swin-S, DCT graying diverged")
    for arm in ("vit_base", "vit_base-dct"):
        diverged(lost["arms"][arm]["runs"][0])
        assert asa_fig5.CLAIM.verdict([lost]).verdict == "undecided"
        assert not any("higher with graying" in str(line) for line in asa_fig5.CLAIM.lines(lost))
        assert asa_fig5.CLAIM.draw([lost])


def diverged(run):
    run |= {"status": "diverged", "top1": 10.0, "top5": 50.0, "log_kappa": None, "log_kappa_groups": None}


def fig5(falls, **changes):
    made = record(**changes)
    for side, groups in zip(("", "-dct"), kappas(falls), strict=True):
        made["arms"][f"vit_base{side}"]["runs"][0]["log_kappa_groups"] = groups
    return made


@pytest.mark.parametrize(
    ("falls", "verdict"),
    [
        ([0.2] * 12, "holds"),
        ([0.2] * 10 + [-0.2] * 2, "holds"),
        ([0.2] * 9 + [-0.2] * 3, "does not hold"),
        ([0.2] * 9 + [0.001] * 3, "undecided"),
    ],
)
def test_ten_of_twelve_blocks_decide(falls, verdict):
    found = fig5(falls)
    assert asa_fig5.CLAIM.verdict([found]).verdict == verdict
    first = lowered(asa_fig5.CLAIM._comparison(found), "vit_base")[0]
    assert first == pytest.approx([fall - 0.01 for fall in falls])


def test_fig5_asks_for_a_respectable_plain_model_and_all_epochs():
    assert "below the 75 % asked" in asa_fig5.CLAIM.verdict([fig5([0.2] * 12, top1=70.0)]).parts[0].why
    assert "20 of 50 epochs" in asa_fig5.CLAIM.verdict([fig5([0.2] * 12, epochs=20)]).parts[0].why


def test_the_figures_have_the_papers_numbers_beside_ours():
    chart = asa_table4.CLAIM.draw([record()]).to_dict()
    rows = chart["data"]["values"]
    shown = {(row["model"], row["side"]): row for row in rows}
    assert shown["ViT-B", "DCT graying"]["paper log κ of +sa"] == 6.43
    assert shown["Swin-S", "plain"]["paper top-1, %"] == 81.3
    assert shown["Swin-S", "plain"]["top-1, %"] == 80.0
    drawn = asa_fig5.CLAIM.draw([fig5([0.2] * 12)]).to_dict()["data"]["values"]
    assert [row["paper"] for row in drawn if "paper" in row] == [6.74, 6.43]
    assert len([row for row in drawn if "block" in row]) == 2 * 2 * 12


def test_at_lab_scale_models_are_as_their_names_have_them_and_differ_in_graying_alone():
    data = parse_data(["imagenette=hf:x"])[0]
    options = Options(scale="lab", data=(data,))
    for model in MODELS:
        plain, grayed = (asa_table4.CLAIM.configure(options, data, f"{model}{side}") for side in ("", "-dct"))
        assert (plain.image_size, plain.model_kwargs, plain.epochs, plain.lr) == (224, {}, 50, 3e-4)
        assert set(plain.differences(grayed)) == {"gray"}


# ---- masked autoencoding


@pytest.fixture(scope="module")
def masked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("masked")
    assert run(folder, "asa-table5", settings=QUICK) == 0
    return folder


def test_both_trainings_of_a_seed_start_from_one_pretraining(masked):
    root = masked / "runs" / "smoke" / "digits"
    results = {path.parent.name: read_json(path) for path in root.glob("mae_base/*/start-*/result.json")}
    assert sorted(results) == ["start-0", "start-1"]
    for arm, start in (("finetune", "mae"), ("probe", "mae"), ("finetune-dct", "mae-dct"), ("probe-dct", "mae-dct")):
        for seed in (0, 1):
            folder = next(root.glob(f"*/{arm}/seed-{seed}-lr-*"))
            assert read_json(folder / "result.json")["start"] == f"digits/mae_base/{start}/start-{seed}"
            config = Config.from_json(json.loads((folder / "config.json").read_text())["config"])
            assert config.checkpoint.endswith(f"{start}/start-{seed}/weights.safetensors")
            assert config.gray == ("dct" if "dct" in arm else "")
    weights = load_file(config.checkpoint)
    assert {tensor.dtype for tensor in weights.values()} == {torch.float16}
    built = make_task(config, open_data("digits", image_size=8)).build().state_dict()
    for name in ("blocks.0.attn.qkv.weight", "pos_embed"):
        assert torch.equal(built[name], weights[f"encoder.{name}"].float())


def test_what_is_done_needs_no_weights_and_what_is_not_trains_them_again(masked, monkeypatch):
    root, trained = masked / "runs" / "smoke" / "digits", []
    for path in root.glob("mae_base/*/start-*/weights.safetensors"):
        path.unlink()
    train = runs_module.train

    def counting(config, folder, **options):
        trained.append(str(folder.relative_to(root)))
        return train(config, folder, **options)

    monkeypatch.setattr(runs_module, "train", counting)
    assert run(masked, "asa-table5", settings=QUICK) == 0
    assert trained == []
    missing = next(root.glob("mae_base_probe/probe-dct/seed-1-*"))
    (missing / "result.json").unlink()
    assert run(masked, "asa-table5", settings=QUICK) == 0
    assert trained == ["mae_base/mae-dct/start-1", str(missing.relative_to(root))]


def table5(gain=(1.0, 1.2, 1.1), probe=(2.0, 2.1, 2.2), plain=50.0, **changes):
    arms = {}
    for kind, gains in (("finetune", gain), ("probe", probe)):
        for side, values in (("", [plain] * 3), ("-dct", [plain + one for one in gains])):
            runs = [{"seed": seed, "status": "finished", "top1": v, "top5": 80.0} for seed, v in enumerate(values)]
            arms[f"{kind}{side}"] = {"lr": 1e-3, "lr at the edge of the grid": False, "runs": runs}
    made = {"data": "tiny-imagenet", "scale": "lab", "epochs": 50, "seeds": 3, "arms": arms}
    return made | {"paper": asa_table5.PAPER} | changes


def test_the_gain_has_to_be_above_zero_for_both():
    claim = asa_table5.CLAIM
    assert claim.verdict([table5()]).verdict == "holds"
    assert claim.verdict([table5()]).parts[0].found.mean == pytest.approx(1.1)
    assert claim.verdict([table5(probe=(-2.0, -2.1, -2.2))]).verdict == "holds in part"
    assert claim.verdict([table5((-1.0, -1.1, -1.2), (-2.0, -2.1, -2.2))]).verdict == "does not hold"
    assert claim.verdict([table5((-1.0, 1.1, 0.2))]).verdict == "undecided"
    assert "below the 43 % asked" in claim.verdict([table5(plain=40.0)]).parts[0].why


def test_table5_shows_the_papers_gain(cells):
    chart = asa_table5.CLAIM.draw([table5()]).to_dict()
    layers = [layer for layer in chart["layer"] if "values" in layer.get("data", {})]
    rows = layers[0]["data"]["values"] if layers else next(iter(chart["datasets"].values()))
    shown = {(row["kind"], row["metric"]): row for row in rows}
    assert shown["fine-tuned", "top-1"]["paper"] == pytest.approx(0.2)
    assert shown["fine-tuned", "top-1"]["mean"] == pytest.approx(1.1)
    assert shown["a linear head", "top-1"]["paper"] is None
    lines = cells(asa_table5.CLAIM.lines(table5()))
    grayed = lines["Tiny-ImageNet, fine-tuned, grayed"]
    assert grayed["the paper"] == "top-1 83.2 %, top-5 96.6 % (ViT-B, ImageNet-1K)"
    gains = {what: (row["top-1"], row["the paper"]) for what, row in lines.items() if "gain" in what}
    assert gains == {
        "Tiny-ImageNet, gain of graying, fine-tuned": ("1.10 [0.85, 1.35] points", "0.2"),
        "Tiny-ImageNet, gain of graying, a linear head": ("2.10 [1.85, 2.35] points", "not tried"),
    }
    assert asa_table5.CLAIM.finding([table5(probe=(-1.0, -1.2, -1.1))]) == (
        "DCT graying changes top-1 of a ViT-Tiny after masked autoencoding by +1.1 (fine-tuned) and −1.1 (a linear "
        "head), in points."
    )


def test_table5_tells_kappa_of_the_models_that_measured_it(cells):
    one = table5()
    for arm, value in (("finetune", 5.0), ("finetune-dct", 4.5)):
        ends = {"untrained": {site: [6.0] for site in BLOCK_SITES}, "trained": {site: [value] for site in BLOCK_SITES}}
        one["arms"][arm]["runs"][0]["kappa"] = ends
    rows = cells(asa_table5.CLAIM.lines(one), "log κ on 64 images, in float64")
    assert {what: row["+sa"] for what, row in rows.items()} == {
        "Tiny-ImageNet, fine-tuned, at the end": "5.00 (one seed)",
        "Tiny-ImageNet, fine-tuned, as pre-trained": "6.00 (one seed)",
        "Tiny-ImageNet, fine-tuned, grayed, at the end": "4.50 (one seed)",
        "Tiny-ImageNet, fine-tuned, grayed, as pre-trained": "6.00 (one seed)",
    }
    assert asa_table5.CLAIM.finding([one]).endswith(
        "in points; log κ after attention is, after fine-tuning, 4.50 instead of 5.00."
    )


def test_table5_trains_what_is_compared_one_after_the_other():
    assert list(asa_table5.CLAIM.arms) == ["finetune", "finetune-dct", "probe", "probe-dct"]


def test_table5_is_done_in_pieces(tmp_path):
    """A pre-training that is not asked for keeps its own arms waiting, and no others."""
    code = reproduce(
        "asa-table5", scale="smoke", seeds=1, arms=["mae", "finetune"], settings=QUICK, output=tmp_path / "runs",
        evidence=tmp_path / "evidence", console=CONSOLE,
    )  # fmt: skip
    assert code == 0
    found = read_json(tmp_path / "evidence" / "asa-table5" / "smoke-digits.json")
    assert {arm: len(one["runs"]) for arm, one in found["arms"].items()} == {
        "finetune": 1, "probe": 0, "finetune-dct": 0, "probe-dct": 0,
    }  # fmt: skip
    assert not list((tmp_path / "runs").rglob("mae-dct/*/result.json"))


def test_table5_says_what_there_is():
    some = table5()
    some["arms"]["probe-dct"]["runs"] = []
    whole = asa_table5.CLAIM.verdict([some])
    assert (whole.verdict, [part.outcome for part in whole.parts]) == ("undecided", ["holds", "not run"])
    assert asa_table5.CLAIM.finding([some]).endswith("by +1.1 (fine-tuned), in points.")
    assert not any("gain of graying, a linear head" in str(line) for line in asa_table5.CLAIM.lines(some))
    assert asa_table5.CLAIM.draw([some])
    some["arms"]["finetune-dct"]["runs"] = []
    said = asa_table5.CLAIM.finding([some])
    assert said == "Nothing can be said yet; there are runs of fine-tuned and a linear head."
    assert asa_table5.CLAIM.lines(some)


def test_a_linear_head_has_a_grid_of_its_own_on_both_sides():
    data = parse_data(["tiny-imagenet=hf:x"])[0]
    options = Options(scale="lab", data=(data,))
    grids = {arm: asa_table5.CLAIM._grid(options, arm) for arm in asa_table5.CLAIM.arms}
    assert grids["finetune"] == grids["finetune-dct"] == (1e-4, 3e-4, 1e-3)
    assert grids["probe"] == grids["probe-dct"] == (1e-3, 3e-3, 1e-2)
