import pytest
from rich.console import Console

from wellcond.claims.asa_fig6 import CLAIM
from wellcond.claims.claim import Options
from wellcond.claims.reproduce import reproduce
from wellcond.claims.sets import parse_data
from wellcond.probe.places import choose
from wellcond.records import read_json
from wellcond.train.tasks import create, operate


def record(data="cifar10", *, without=(94.0, 94.2, 93.9), skip=(94.1, 94.2, 94.0), **changes):
    arms = {
        name: {
            "lr": 1e-3,
            "runs": [{"seed": s, "status": "finished", "top1": v, "top5": 99.0} for s, v in enumerate(values)],
        }
        for name, values in (("skip", skip), ("no-skip", without))
    }
    epochs = 50 if data == "tiny-imagenet" else 100
    return {"data": data, "scale": "lab", "epochs": epochs, "seeds": len(skip), "arms": arms} | changes


@pytest.mark.parametrize(
    ("without", "verdict"),
    [
        ((94.0, 94.2, 93.9), "holds"),
        ((91.0, 91.2, 90.9), "does not hold"),
        ((97.0, 97.2, 96.9), "does not hold"),  # a gain is a difference, too
        ((93.0, 94.2, 95.9), "undecided"),  # a wide interval around 0 shows nothing
    ],
)
def test_no_difference_is_shown_by_equivalence(without, verdict):
    assert CLAIM.verdict([record(without=without)], sets=["cifar10"]).verdict == verdict


def test_every_set_is_asked_for():
    sets = [record(), record("cifar100")]
    assert CLAIM.verdict(sets).verdict == "undecided"
    tiny = record("tiny-imagenet", skip=(55.0, 55.1, 55.2), without=(50.0, 50.1, 50.2))
    assert CLAIM.verdict([*sets, tiny]).verdict == "holds in part"
    poor = record(skip=(80.0, 80.1, 80.0), without=(80.0, 80.1, 80.0))
    assert "below the 85 % asked" in CLAIM.verdict([poor], sets=["cifar10"]).parts[0].why


def test_the_finding_has_the_drop_on_each_set():
    gain = record("tiny-imagenet", skip=(55.0, 55.1, 55.2), without=(55.5, 55.6, 55.7))
    assert CLAIM.finding([record(without=(91.1, 91.2, 91.0)), gain]) == (
        "Without its skip a ConvMixer loses, in points of top-1, 3.0 on CIFAR-10 and −0.5 on Tiny-ImageNet."
    )
    assert "0.0 on CIFAR-10" in CLAIM.finding([record(without=(94.11, 94.21, 94.01))])


def test_figure_and_lines_have_the_papers_word_for_it(cells):
    rows = CLAIM.draw([record()]).to_dict()["data"]["values"]
    assert {row["arm"]: row["paper"] for row in rows} == {
        "with its skip": None,
        "without its skip": pytest.approx(94.1),
    }
    assert cells(CLAIM.lines(record()))["CIFAR-10, drop without its skip"] == {
        "top-1": "0.07 [−0.08, 0.21] points", "top-5": "0.00 [0.00, 0.00] points", "the paper": "within ± 0.2",
    }  # fmt: skip


@pytest.mark.parametrize("name", CLAIM.sets)
def test_the_model_has_256_tokens_on_every_set_and_every_site_that_is_recorded(name):
    data = parse_data([f"{name}=hf:x"])[0]
    configs = {arm: CLAIM.configure(Options(scale="lab", data=(data,)), data, arm) for arm in CLAIM.arms}
    for config in configs.values():
        config.check()
        size = config.model_kwargs
        assert (size["dim"], size["depth"], size["kernel_size"]) == (256, 8, 5)
        assert (config.image_size // size["patch_size"]) ** 2 == 256
        model = create(config, num_classes=10, channels=3)
        operate(model, config)
        assert len(choose(model, config.probe_sites)) == 1 + 4 * 8
    assert set(configs["skip"].differences(configs["no-skip"])) == {"remove_skips"}


def test_a_smoke_run(tmp_path):
    code = reproduce(
        "asa-fig6", scale="smoke", seeds=1, settings=["epochs=1", "batch_size=256"], output=tmp_path / "runs",
        evidence=tmp_path, device="cpu", console=Console(quiet=True),
    )  # fmt: skip
    assert code == 0
    found = read_json(tmp_path / "asa-fig6" / "smoke-digits.json")
    assert CLAIM.verdict([found], sets=["digits"]).verdict == "undecided"
    without = found["arms"]["no-skip"]["runs"][0]["log_kappa"]["trained"]
    assert list(without) == ["in", "sa", "+sa", "mlp"]
    assert without["sa"] == without["+sa"]
    assert found["arms"]["skip"]["runs"][0]["log_kappa"]["trained"]["sa"] != without["sa"]
    assert "of 300 epochs at 224 pixels" in " ".join(CLAIM.plan_paper(Options(scale="paper")))
