"""The two assumptions, on small ViTs: what is measured of a state, the rules, and trainings that both claims share."""

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.claims import CLAIMS, asa_assume1, asa_assume2, small_vits
from wellcond.claims.claim import MeasuredOn, Options
from wellcond.claims.jacobians import small_vit
from wellcond.claims.reproduce import reproduce
from wellcond.claims.runs import Runs
from wellcond.claims.sets import parse_data
from wellcond.models.build import create_model
from wellcond.models.surgery import remove_skip
from wellcond.records import read_json
from wellcond.train.stopping import OutOfTime
from wellcond.verdicts import SECOND_LOOK, at_least

IDS = ("asa-assume1", "asa-assume2")


def run(folder, ids, **options):
    places = {"output": folder / "runs", "evidence": folder / "evidence"}
    return reproduce(ids, scale="smoke", device="cpu", console=Console(quiet=True), **places, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("assume")
    assert run(folder, "asa-assume1") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small_vits, "train", lambda *_, **__: pytest.fail("it was trained again"))
        assert run(folder, "asa-assume2") == 0
    return folder


def test_both_claims_look_at_the_same_trainings(folder):
    first, second = (read_json(folder / "evidence" / id_ / "smoke-digits.json") for id_ in IDS)
    assert [(row["model"], row["seed"]) for row in first["rows"]] == [
        (model, seed) for model in ("plain", "svd-0.7", "no-sa") for seed in (0, 1)
    ]
    assert [row["model"] for row in second["rows"]] == ["plain", "plain", "svd-0.7", "svd-0.7"]
    for mine, theirs in zip(first["rows"], second["rows"], strict=False):
        for state, whole in zip(mine["states"], theirs["states"], strict=True):
            assert state["step"] == whole["step"]
            assert state["params"]["worst"] == max(half["params"] for half in whole["halves"])
    assert [state["step"] for state in first["rows"][0]["states"]] == [0, 1, 4]
    skipless = first["rows"][-1]["states"][0]
    assert "params" in skipless
    assert "skip" not in skipless  # a norm would make it singular


@pytest.mark.parametrize("id_", IDS)
def test_smoke_is_shown_and_decides_nothing(folder, id_, cells):
    record, claim = read_json(folder / "evidence" / id_ / "smoke-digits.json"), CLAIMS[id_]
    assert claim.verdict([record]).verdict == "undecided"
    lines = claim.lines(record)
    assert all("beyond float64" in line for line in lines if isinstance(line, str))
    rows = cells(lines).values()
    assert len(rows) >= 2
    assert all("rank correlation" in row for row in rows)
    assert claim.draw([record]).to_dict()["config"]
    assert "Nothing was run" in claim.plan_paper(Options(scale="paper"))[0]


def test_the_network_s_jacobian_is_torch_s():
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", small_vit(8, 2, img_size=8, patch_size=4, depth=2)).double().eval()
    image = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    found = small_vits.measure_state(model, image)
    seen = []
    hook = model.blocks.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    model(image)
    hook.remove()
    size = seen[0].numel()
    with sdpa_kernel(SDPBackend.MATH):
        whole = torch.func.jacrev(model.blocks)(seen[0]).reshape(size, size).detach()
    assert found["network"]["skip"] == pytest.approx(float(torch.linalg.cond(whole).log()), rel=1e-4)
    assert [half["site"] for half in found["halves"]] == ["sa", "mlp", "sa", "mlp"]
    remove_skip(model, "sa")
    without = small_vits.measure_state(model, image, skips=False)
    assert without["network"].keys() == {"params"}
    assert "skip" not in without["halves"][0]


def assume1(*, follows):
    """Twelve trainings: the network's log κ is the worst block's and one more, or has nothing to do with it."""
    rows = []
    for number in range(12):
        states = []
        for step in range(3):
            worst = 1.0 + number + 0.1 * step
            network = worst + 1 if follows else (7 * number + 5 * step) % 13
            one = {"network": network, "worst": worst, "site": "sa" if number % 2 else "mlp", "block": 0}
            states.append({"step": step, "params": one} | ({"skip": one} if number < 9 else {}))
        rows.append({"model": "plain", "seed": number, "status": "finished", "states": states})
    return {"data": "cifar10", "scale": "lab", "rows": rows}


def test_assume1_is_decided_by_the_interval_of_the_correlation(cells):
    claim = CLAIMS["asa-assume1"]
    whole = claim.verdict([assume1(follows=True)])
    assert whole.verdict == "holds"
    assert [part.found.mean for part in whole.parts] == pytest.approx([1.0, 1.0])
    assert [part.found.count for part in whole.parts] == [9, 12]
    assert claim.verdict([assume1(follows=False)]).verdict == "does not hold"
    said = (
        "Across small ViTs, log κ of the network's Jacobian follows that of its worst block in rank (correlation 1.00 "
        "by input and 1.00 by parameters); the median difference in size is +1.0 and +1.0."
    )
    assert claim.finding([assume1(follows=True)]) == said
    assert "does not always follow that of its worst block" in claim.finding([assume1(follows=False)])
    assert len(asa_assume1.pairs(assume1(follows=True), "params")) == 12
    rows = cells(claim.lines(assume1(follows=True)))
    assert rows["CIFAR-10, by parameters"] == {
        "rank correlation": "1.00 [1.00, 1.00]", "states": "36 of 12 trainings",
        "the worst block is an attention": "in 18", "the network's κ is above it": "in 36",
    }  # fmt: skip
    assert rows["CIFAR-10, by parameters, models with all their skips"] == {"rank correlation": "1.00 [1.00, 1.00]"}


def test_a_diverged_training_is_named_and_left_out():
    record = assume1(follows=True)
    record["rows"][3] |= {"status": "diverged", "states": []}
    assert CLAIMS["asa-assume1"].verdict([record]).verdict == "holds"
    assert CLAIMS["asa-assume1"].lines(record)[-1] == "CIFAR-10: diverged, and not measured: plain (seed 3)"


def test_assume2_compares_each_jacobian_with_its_own_output():
    half = {"out": 5.0, "plus": 2.0, "skip": 0.5, "bare": 9.0, "params": 7.0}
    rows = []
    for number in range(12):
        halves = [
            {"site": site} | {name: value + number + 0.1 * block for name, value in half.items()}
            for block in range(3)
            for site in ("sa", "mlp")
        ]
        for one in halves:
            if one["site"] == "mlp":
                one["bare"] = -one["bare"]  # there the output says the opposite
        rows.append(
            {"model": "svd-0.7", "seed": number, "status": "finished", "states": [{"step": 0, "halves": halves}]}
        )
    record = {"data": "cifar10", "scale": "lab", "rows": rows}
    assert asa_assume2.pairs(record, "sa", "skip")[0][0] == (2.0, 0.5)
    assert asa_assume2.pairs(record, "sa", "params")[0][0] == (5.0, 7.0)
    whole = CLAIMS["asa-assume2"].verdict([record])
    assert whole.verdict == "holds in part"
    assert {part.name.split(" (")[0]: part.found.mean for part in whole.parts if part.outcome != "holds"} == {
        "MLP without its skip, by its normed input": pytest.approx(-1.0)
    }
    assert len(whole.parts) == 6
    assert CLAIMS["asa-assume2"].finding([record]) == (
        "κ of a block's output predicts κ of its Jacobian with its skip (1.00 and 1.00) and by its parameters (1.00 "
        "and 1.00), but not reliably without its skip (1.00 and −1.00): rank correlations of attention and MLP."
    )


def test_models_differ_from_the_plain_one_in_what_they_are_named_for(tmp_path):
    data = parse_data(["cifar10=hf:x"])[0]
    options = Options(scale="lab", data=(data,), output=tmp_path)
    plain = small_vits._configure(options, data, "plain", 0)
    plain.check()
    assert plain.model_kwargs["img_size"] // plain.model_kwargs["patch_size"] == 4  # 16 tokens
    for name, settings in small_vits.MODELS.items():
        config = small_vits._configure(options, data, name, 0)
        config.check()
        changed = {"model_kwargs"} if "depth" in settings else set(settings) - ({"depth"})
        assert set(config.differences(plain)) == changed


@pytest.mark.parametrize(("margin", "seeds"), [(0.0, 5), (9.0, 3)])
def test_two_more_seeds_are_measured_once_where_the_first_leave_it_undecided(tmp_path, margin, seeds):
    asked = []

    def measure(options, data):
        asked.append(options.seeds)
        return {"values": [(-1.0) ** seed + margin for seed in range(options.seeds)]}

    claim = MeasuredOn(
        id="mine", claim="a", test="b", holds_if="c", sets=("digits",), measure=measure,
        second_look=lambda record: True,
        judge=lambda records: [at_least("a", record["values"], 0.0) for record in records.values()],
    )  # fmt: skip
    data = tuple(parse_data(["digits"]))
    options = Options(scale="lab", data=data, second_look=True, evidence=tmp_path, console=Console(quiet=True))
    for _ in range(2):  # the second time it is done
        claim.reproduce(options, Runs(tmp_path, console=Console(quiet=True)))
    assert asked == ([3, 5] if seeds == 5 else [3])
    record = read_json(tmp_path / "mine" / "lab-digits.json")
    assert (record["seeds"], record.get("confidence")) == (seeds, SECOND_LOOK if seeds == 5 else None)


def test_seeds_that_are_measured_are_kept_when_the_time_is_over(tmp_path):
    asked = []

    def measure(options, data):
        values = list(options.known.get("values", []))
        for seed in range(len(values), options.seeds):
            asked.append(seed)
            values.append(float(seed))
            if seed + 1 < options.seeds:
                options.keep({"values": values, "seeds": seed + 1})
        return {"values": values}

    claim = MeasuredOn(
        id="mine", claim="a", test="b", holds_if="c", sets=("digits",), measure=measure,
        judge=lambda records: [at_least("a", record["values"], 0.0) for record in records.values()],
    )  # fmt: skip
    options = Options(scale="lab", data=tuple(parse_data(["digits"])), evidence=tmp_path, console=Console(quiet=True))

    class Late(Runs):
        def check_time(self, what, seconds):
            if len(asked) == 2:
                raise OutOfTime("no time for another")

    with pytest.raises(OutOfTime):
        claim.reproduce(options, Late(tmp_path, console=Console(quiet=True)))
    record = read_json(tmp_path / "mine" / "lab-digits.json")
    assert (record["values"], record["seeds"]) == ([0.0, 1.0], 2)
    claim.reproduce(options, Runs(tmp_path, console=Console(quiet=True)))
    record = read_json(tmp_path / "mine" / "lab-digits.json")
    assert (record["values"], record["seeds"], asked) == ([0.0, 1.0, 2.0], 3, [0, 1, 2])
