"""Jacobians of a ViT's halves against torch's own, and the two claims about their spectra."""

import copy

import pytest
import torch
from rich.console import Console
from torch.nn.attention import SDPBackend, sdpa_kernel

from wellcond.claims import CLAIMS, ledger
from wellcond.claims.claim import Options
from wellcond.claims.jacobian_spectra import MEASURES, exact_row, probed_row
from wellcond.claims.jacobians import KINDS, halves, small_vit
from wellcond.claims.reproduce import reproduce
from wellcond.models.build import create_model
from wellcond.records import read_json, write_json
from wellcond.verdicts import SECOND_LOOK

IDS = ("asa-fig7", "asa-fig8")
CONSOLE = Console(quiet=True)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    size = small_vit(8, 2, img_size=8, patch_size=4, depth=2, num_classes=3)
    return create_model("vit_tiny_patch16_224", size).double().eval()


@pytest.fixture(scope="module")
def parts(model):
    return halves(model, torch.randn(1, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spectra")
    places = {"output": folder / "runs", "evidence": folder / "evidence"}
    assert reproduce(IDS, scale="smoke", device="cpu", console=CONSOLE, **places) == 0
    return {id_: read_json(folder / "evidence" / id_ / "smoke-digits.json") for id_ in IDS}


@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_every_half_s_jacobians_are_torch_s(model, parts, at):
    part, block = parts[at], model.blocks[at // 2]
    norm, inner = (block.norm1, block.attn) if part.site == "sa" else (block.norm2, block.mlp)
    x = part.tokens
    size = x.numel()
    names = dict(inner.named_parameters())
    with sdpa_kernel(SDPBackend.MATH):
        truth = {
            "skip": torch.func.jacrev(lambda x: x + inner(norm(x)))(x).reshape(size, size),
            "bare": torch.func.jacrev(inner)(norm(x)).reshape(size, size),
        }
        by = torch.func.jacrev(lambda p: torch.func.functional_call(inner, p, (norm(x),)))(names)
    truth["params"] = torch.cat([by[name].reshape(size, -1) for name in names], 1)
    for kind in KINDS:
        values = torch.linalg.svdvals(truth[kind].detach())
        assert torch.allclose(part.spectrum(kind).values.flatten(), values, rtol=1e-6, atol=1e-12 * float(values[0]))
    out = inner(norm(x))[0].detach()
    assert part.log_kappa() == pytest.approx(float(torch.linalg.cond(out).log()), rel=1e-6)
    assert part.log_kappa(skip=True) == pytest.approx(float(torch.linalg.cond(out + x[0]).log()), rel=1e-6)


def test_halves_are_in_order_and_read_what_the_blocks_do(model, parts):
    assert [part.site for part in parts] == ["sa", "mlp", "sa", "mlp"]
    with torch.no_grad():
        assert torch.allclose(model.blocks[0](parts[0].tokens), parts[2].tokens)
    assert not any(block.norm1._forward_pre_hooks for block in model.blocks)


def test_a_probe_sees_the_upper_decile_of_the_exact_spectrum():
    torch.manual_seed(0)
    model = create_model("vit_tiny_patch16_224", small_vit(24, 2, img_size=16, patch_size=4, depth=1)).double()
    half = halves(model, torch.randn(1, 3, 16, 16, dtype=torch.float64))[0]
    for kind in KINDS:
        exact, probed = exact_row(half, kind), probed_row(half, kind, steps=dict.fromkeys(KINDS, 96))
        assert probed["tenth"] == pytest.approx(exact["tenth"], rel=0.05)
        assert probed["rms"] == pytest.approx(exact["rms"], abs=0.5)  # of one direction
        assert probed["log κ at least"] <= exact["log κ"] + 1e-6
        assert exact["curve"][0] == 0.0
        assert exact["curve"][-1] == pytest.approx(exact["log κ"], rel=1e-4)


@pytest.mark.parametrize("id_", IDS)
def test_smoke(smoke, id_, cells):
    record, claim = smoke[id_], CLAIMS[id_]
    assert (record["tokens"], record["exact"], record["graying"]) == (16, True, "svd" if id_ == "asa-fig7" else "dct")
    assert all(len(record["rows"][kind][epsilon]) == 2 for kind in KINDS for epsilon in record["rows"][kind])
    assert claim.verdict([record]).verdict == "undecided"
    means = cells(claim.lines(record), "Means over the seeds")
    asked = "16 tokens, with its skip, by its input: log κ"
    (log_kappa,) = [row for what, row in means.items() if what.endswith(asked)]
    mean = sum(row["log κ"] for row in record["rows"]["skip"]["0.9"]) / 2
    assert log_kappa["ε 0.9"] == f"{mean:.3g}"
    drawn = claim.draw([record]).to_dict()
    assert len(drawn["data"]["values"]) == 3 * 4 * 33
    assert "Nothing was run" in claim.plan_paper(Options(scale="paper"))[0]


def test_more_seeds_go_on_from_those_that_are_there(smoke, tmp_path):
    where = {"scale": "smoke", "device": "cpu", "console": CONSOLE, "output": tmp_path, "evidence": tmp_path}
    path = tmp_path / "asa-fig7" / "smoke-digits.json"
    assert reproduce("asa-fig7", seeds=1, **where) == 0
    one = read_json(path)
    marked = copy.deepcopy(one)
    marked["rows"]["skip"]["1"][0]["rms"] = 77.0  # it is kept, not measured again
    write_json(path, marked)
    assert reproduce("asa-fig7", seeds=2, **where) == 0
    two = read_json(path)
    assert two["rows"]["skip"]["1"][0]["rms"] == 77.0
    two["rows"]["skip"]["1"][0]["rms"] = one["rows"]["skip"]["1"][0]["rms"]
    assert two["rows"] == smoke["asa-fig7"]["rows"]
    assert [(made["seeds"], made["date"]) for made in two["earlier"]] == [(1, one["environment"]["date"])]
    assert "earlier" not in one
    (entry,) = [entry for entry in ledger.entries(tmp_path) if entry.id == "asa-fig7"]
    assert "its first 1 seeds by `" in entry.made


def test_the_plain_arm_is_one_start_for_both_figures(smoke):
    assert smoke["asa-fig7"]["rows"]["bare"]["1"] == smoke["asa-fig8"]["rows"]["bare"]["1"]
    assert smoke["asa-fig7"]["rows"]["bare"]["0.5"] != smoke["asa-fig7"]["rows"]["bare"]["1"]


def made(*, exact=True, falls=(0.5, 0.5, 0.5), noise=0.02):
    """A record whose values fall by so much from each ε to the next, with seeds that differ."""
    rows = {}
    for kind in KINDS:
        rows[kind] = {}
        for at, epsilon in enumerate(("1", "0.9", "0.7", "0.5")):
            value = 20 - sum(falls[:at])
            found = [dict.fromkeys(MEASURES, value + noise * (seed * (at + 1) % 4)) for seed in range(5)]
            rows[kind][epsilon] = [one | {"curve": [0.0] * 33, "capped": False} for one in found]
    set_ = "tiny-imagenet" if exact else "imagenette"
    return {
        "data": set_,
        "scale": "lab",
        "exact": exact,
        "tokens": 64 if exact else 197,
        "graying": "svd",
        "rows": rows,
    }


def test_each_step_down_in_epsilon_has_to_lower_it():
    claim = CLAIMS["asa-fig7"]
    whole = claim.verdict([made(), made(exact=False)])
    assert whole.verdict == "holds"
    assert [part.name.partition(":")[2].strip().partition(" ")[0] for part in whole.parts] == ["log"] * 3 + ["ln"] * 3
    assert whole.parts[0].found.mean == pytest.approx(100 * 0.5 / 20, abs=0.3)
    rises = claim.verdict([made(falls=(0.5, -0.5, 0.5)), made(exact=False)])
    assert rises.verdict == "holds in part"
    assert "from 0.9 to 0.7" in rises.parts[0].name
    flat = claim.verdict([made(falls=(0.5, 0.5, 0.0)), made(exact=False)])
    assert {part.outcome for part in flat.parts} == {"holds", "undecided"}
    missing = claim.verdict([made()])
    assert [part.outcome for part in missing.parts][-1] == "not run"


def test_the_finding_answers_for_each_kind_of_jacobian():
    claim = CLAIMS["asa-fig7"]
    assert claim.finding([made(noise=0.0)]) == (
        "The lower ε of SVD graying, the better conditioned is an untrained attention's Jacobian: this is so with its "
        "skip, without its skip and by its parameters."
    )
    rises = made(falls=(0.5, -0.5, 0.5), noise=0.0)
    rises["rows"]["skip"] = made(noise=0.0)["rows"]["skip"]
    rises["rows"]["params"] = made(falls=(0.5, 0.0, 0.5))["rows"]["params"]
    both = claim.finding([rises, made(exact=False, noise=0.0)])
    assert both.endswith(
        ": this is so with its skip, without its skip (at 197 tokens) and by its parameters (at 197 tokens); it is not "
        "so without its skip (at 64 tokens); it is undecided by its parameters (at 64 tokens)."
    )


def test_a_second_look_has_wider_intervals_and_is_not_for_exact_spectra():
    claim = CLAIMS["asa-fig7"]
    assert not claim.second_look(made())
    assert claim.second_look(made(exact=False))
    first, second = (
        next(iter(claim.judge({"imagenette": made(exact=False) | more}))) for more in ({}, {"confidence": SECOND_LOOK})
    )
    assert second.found.low < first.found.low < first.found.high < second.found.high
    assert any("chosen after a look" in str(line) for line in claim.lines(made(exact=False)))


def test_what_lies_beyond_float64_is_counted(cells):
    record = copy.deepcopy(made())
    record["rows"]["bare"]["1"][0]["capped"] = True
    rows = cells(CLAIMS["asa-fig7"].lines(record), "Means over the seeds")
    (beyond,) = [what for what in rows if "beyond float64" in what]
    said = "64 tokens, without its skip, by its normed input: log κ (1 beyond float64, counted as its ceiling)"
    assert beyond == f"Tiny-ImageNet, {said}"
