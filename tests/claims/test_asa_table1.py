import pytest
import torch
from rich.console import Console

from wellcond.bench.graying import published_grayings
from wellcond.bench.photographs import photographs
from wellcond.claims.asa_table1 import CLAIM, TITLES, ratios
from wellcond.claims.claim import Options
from wellcond.claims.reproduce import reproduce
from wellcond.graying import TokenGraying
from wellcond.records import read_json


def record(*, svd=20.0, dct=1.01, exact=1.01, device="NVIDIA H200", noise=0.002):
    plain = [75.0 + 0.1 * number for number in range(10)]
    times = {"svd": svd, "dct": dct, "dct float32": exact, "our svd": 1.02, "our dct": 1.003}
    ms = {"plain": plain}
    for name, ratio in times.items():
        ms[name] = [(ratio + noise * (number % 3 - 1)) * one for number, one in enumerate(plain)]
    return {
        "data": "photographs",
        "scale": "lab",
        "device": device,
        "batch": 256,
        "ms": ms,
        "paper": {"svd": 6.3, "dct": 1.012},
    }


def test_every_way_to_gray_gives_the_same_images():
    images = photographs(2)
    arms = published_grayings(images.shape, 16, 0.95, images.device, compiled=False)
    ours = {f"our {method}": TokenGraying(method, 0.95, 16) for method in ("svd", "dct")}
    assert [*arms, *ours] == list(TITLES)
    grayed = {name: arm(images) for name, arm in (arms | ours).items()}
    assert torch.equal(grayed["plain"], images)
    for naive, ours in (("svd", "our svd"), ("dct", "our dct"), ("dct float32", "dct")):
        error = (grayed[naive] - grayed[ours]).norm() / grayed[ours].norm()
        assert float(error) < 1e-3
    assert float((grayed["svd"] - images).abs().max()) > 0.01
    assert not torch.backends.cuda.matmul.allow_tf32  # as it was found


def test_the_rule_decides_by_the_rounds():
    whole = CLAIM.verdict([record()])
    assert whole.verdict == "holds"
    assert whole.parts[1].found.mean == pytest.approx(1.0, abs=0.05)  # % that it adds
    assert CLAIM.verdict([record(svd=2.0)]).verdict == "holds in part"
    assert CLAIM.verdict([record(exact=1.05)]).verdict == "holds in part"
    assert CLAIM.verdict([record(svd=2.0, dct=1.03, exact=1.05)]).verdict == "does not hold"
    near = CLAIM.verdict([record(dct=1.02)])
    assert near.verdict == "undecided"
    assert "these 10 rounds" in near.parts[1].why
    assert "a CPU was timed" in CLAIM.verdict([record(device="cpu")]).parts[0].why
    assert ratios(record(noise=0.0), "svd") == pytest.approx([20.0] * 10)


def test_lines_and_figure_have_the_papers_numbers_beside_ours(cells):
    lines = cells(CLAIM.lines(record()))
    assert lines["Photographs, SVD, torch.linalg.svd"] == {
        "× a plain step, the median": "20", "in 10 rounds": "20 to 20", "the paper": "6.3",
    }  # fmt: skip
    assert lines["Photographs, DCT, ours"] == {
        "× a plain step, the median": "1.003", "in 10 rounds": "1.001 to 1.005",
    }  # fmt: skip
    rows = CLAIM.draw([record()]).to_dict()["data"]["values"]
    assert {row["arm"]: row["paper"] for row in rows if row["paper"]} == {TITLES["svd"]: 6.3, TITLES["dct"]: 1.012}
    assert len(rows) == 5 * 10


def test_the_finding_has_every_ratio():
    assert CLAIM.finding([record(noise=0.0)]) == (
        "SVD graying by torch.linalg.svd makes a training step of ViT-B/16 20 times as long; DCT graying adds 1.0 % in "
        "TF32 and 1.0 % in float32; our own versions add 2.0 % (SVD) and 0.3 % (DCT)."
    )


def test_smoke_shows_that_it_runs(tmp_path):
    places = {"output": tmp_path / "runs", "evidence": tmp_path / "evidence"}
    assert reproduce("asa-table1", scale="smoke", device="cpu", console=Console(quiet=True), **places) == 0
    found = read_json(tmp_path / "evidence" / "asa-table1" / "smoke-photographs.json")
    assert list(found["ms"]) == list(TITLES)
    assert all(len(times) == 2 and min(times) > 0 for times in found["ms"].values())
    assert CLAIM.verdict([found]).verdict == "undecided"
    assert "three trainings of ViT-B" in CLAIM.plan_paper(Options(scale="paper"))[0]


def test_at_lab_scale_it_asks_for_a_gpu(tmp_path):
    with pytest.raises(ValueError, match="on a GPU, and there is none here"):
        reproduce(
            "asa-table1", scale="lab", device="cpu", console=Console(quiet=True), output=tmp_path, evidence=tmp_path
        )
    assert not list(tmp_path.rglob("*.json"))
