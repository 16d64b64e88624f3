import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import fft

from wellcond.bench.photographs import photographs
from wellcond.claims.asa_dct import CLAIM, low_energies, lowest
from wellcond.claims.claim import Options
from wellcond.claims.reproduce import reproduce
from wellcond.records import read_json

SETS = ("cifar10", "cifar100", "tiny-imagenet", "imagenette", "photographs")


def test_the_lowest_tenth_is_a_tenth_and_has_the_lowest():
    for n, d in ((64, 48), (196, 768), (16, 4)):
        low = lowest(n, d)
        assert int(low.sum()) == round(0.1 * n * d)
        k, l = low.nonzero(as_tuple=True)  # noqa: E741
        frequency = torch.arange(n)[:, None] / n + torch.arange(d) / d
        assert frequency[k, l].max() <= frequency[~low].min()
        assert bool(low[0, 0])


def test_energies_are_those_of_numpy_and_scipy():
    images = photographs(2, 32).double()
    found = low_energies(images, 8)
    for row, image in enumerate(images.numpy()):
        tokens = np.stack(
            [image[:, i : i + 8, j : j + 8].reshape(-1) for i in range(0, 32, 8) for j in range(0, 32, 8)]
        )  # 16 × 192
        u, _, vh = np.linalg.svd(tokens, full_matrices=False)
        for at in (0, 3, 9):
            direction = np.outer(u[:, at], vh[at])
            mine = fft.dctn(direction, norm="ortho")[lowest(16, 192).numpy()]
            assert float(found["tokens"][row, at]) == pytest.approx((mine**2).sum(), abs=1e-9)
            picture = np.zeros((3, 32, 32))
            for number, patch in enumerate(direction.reshape(16, 3, 8, 8)):
                i, j = 8 * (number // 4), 8 * (number % 4)
                picture[:, i : i + 8, j : j + 8] = patch
            mine = fft.dctn(picture, axes=(1, 2), norm="ortho")[:, lowest(32, 32).numpy()]
            assert float(found["image"][row, at]) == pytest.approx((mine**2).sum(), abs=1e-9)


def test_a_constant_image_is_all_low_and_a_chessboard_is_not():
    constant = torch.ones(1, 3, 16, 16, dtype=torch.float64)
    board = (torch.arange(16)[:, None] + torch.arange(16)).remainder(2) * 2.0 - 1
    found = low_energies(torch.cat([constant, board.expand(1, 3, 16, 16).double()]), 4)
    assert float(found["tokens"][0, 0]) == pytest.approx(1.0)
    assert float(found["image"][0, 0]) == pytest.approx(1.0)
    assert float(found["image"][1, 0]) < 0.1


def record(name, *, every=0.9, first=0.95, spread=0.01):
    def found(mean):
        return [mean + spread * (number % 5 - 2) for number in range(50)]

    one = {"directions": [first, *[every] * 9], "all": found(every), "first": found(first)}
    return {"data": name, "scale": "lab", "images": 50, "patch": 4, "energies": {"tokens": one, "image": one}}


def test_the_rule_decides_set_by_set():
    whole = CLAIM.verdict([record(name) for name in SETS])
    assert (whole.verdict, len(whole.parts)) == ("holds", 2 * 5)
    parts = CLAIM.verdict([record(name, every=0.4 if name == "cifar10" else 0.9) for name in SETS])
    assert parts.verdict == "holds in part"
    assert [part.name for part in parts.parts if part.outcome == "does not hold"] == [
        "CIFAR-10: the 10 leading directions have 80 % of the energy in the lowest 10 % of frequencies"
    ]
    first = CLAIM.verdict([record(name, every=0.4, first=0.99) for name in SETS])  # as the paper says of this one
    assert first.verdict == "holds in part"
    assert [part.outcome for part in first.parts] == ["holds"] * 5 + ["does not hold"] * 5
    assert CLAIM.verdict([record(name, every=0.4, first=0.5) for name in SETS]).verdict == "does not hold"
    near = CLAIM.verdict([record(name, every=0.8) for name in SETS])
    assert near.verdict == "undecided"
    assert "these 50 images could have seen" in near.parts[5].why
    assert CLAIM.verdict([record("cifar10")]).verdict == "undecided"  # the other sets are missing


def test_the_finding_spans_the_sets_that_there_are(cells):
    sets = [record("cifar10", every=0.3, first=0.87), record("imagenette", every=0.55)]
    assert CLAIM.finding(sets) == (
        "The dominant singular direction of image tokens is of low frequency: the lowest 10 % of the DCT's frequencies "
        "hold 87 to 95 % of its energy (of the ten leading directions 30 to 55 %)."
    )
    assert "(of the ten leading directions 30 %)" in CLAIM.finding(sets[:1])
    high = CLAIM.finding([record("cifar10", every=0.3, first=0.4)])
    assert high.startswith("The dominant singular direction of image tokens is not of low frequency: the lowest 10 %")
    first, every = cells(CLAIM.lines(sets[0])).values()
    assert {cell.partition(" ")[0] for column, cell in first.items() if column != "the paper"} == {"87.00"}
    assert {cell.partition(" ")[0] for cell in every.values()} == {"30.00"}  # of which the paper says nothing


def test_smoke_needs_no_data_and_goes_on(tmp_path, cells):
    places = {"output": tmp_path / "runs", "evidence": tmp_path / "evidence"}
    assert reproduce("asa-dct", scale="smoke", console=Console(quiet=True), **places) == 0
    records = [
        read_json(tmp_path / "evidence" / "asa-dct" / f"smoke-{name}.json") for name in ("digits", "photographs")
    ]
    assert CLAIM.verdict(records).verdict == "undecided"
    drawn = CLAIM.draw(records).to_dict()
    assert len(drawn["hconcat"]) == 2
    first = cells(CLAIM.lines(records[1]))["Photographs, energy of the dominant direction in the lowest tenth"]
    assert first["the paper"] == "typically low frequencies"
    again = Console(record=True, width=200)
    assert reproduce("asa-dct", scale="smoke", console=again, **places) == 0
    assert again.export_text().count("done before") == 2
    assert "Nothing was run" in CLAIM.plan_paper(Options(scale="paper"))[0]
