"""The benchmark of the Long Range Arena runs anywhere, and leaves neither data nor attentions behind."""

import math

import pytest
import torch

from wellcond.attention import ATTENTIONS, softmax_attention
from wellcond.bench import lra
from wellcond.data.sources import SOURCES
from wellcond.records import read_json


def test_every_method_is_timed(tmp_path):
    before = sorted(SOURCES), sorted(ATTENTIONS)
    record = read_json(
        lra.run(output=tmp_path / "lra.json", device="cpu", quick=True, tasks=["image", "lra_retrieval"])
    )
    assert (sorted(SOURCES), sorted(ATTENTIONS)) == before
    rows = record["rows"]
    assert [row["attention"] for row in rows] == [method.name for method in lra.METHODS] * 2
    assert {row["task"] for row in rows} == {"image", "retrieval"}
    for row in rows:
        assert row["note"] == ""
        assert row["loop ms"] > 0
        assert row["eager ms"] > 0
        assert row["graph ms"] is row["share"] is None
        first = next(other for other in rows if other["task"] == row["task"])
        assert row["times SDPA"] == pytest.approx(first["loop ms"] / row["loop ms"])
    assert rows[0]["times SDPA"] == 1


def test_what_fails_costs_its_own_cell_alone(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("out of memory\nwith a long story")

    monkeypatch.setattr(lra, "train", fail)
    rows = read_json(lra.run(output=tmp_path / "lra.json", device="cpu", quick=True, tasks=["image"]))["rows"]
    assert all(row["note"] == "loop ms failed: RuntimeError: out of memory " for row in rows)
    assert all(math.isnan(row["loop ms"]) and row["eager ms"] > 0 for row in rows)
    with pytest.raises(ValueError, match="there is no task 'imag'"):
        lra.run(output=tmp_path / "lra.json", quick=True, tasks=["imag"])


def test_the_published_softmax_is_softmax():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 2, 9, 4, requires_grad=True) for _ in range(3))
    mask = torch.arange(9)[None, None, None, :] < torch.tensor([9, 5])[:, None, None, None]
    ours, theirs = (attend(q, k, v, mask) for attend in (softmax_attention, lra.checkpointed_softmax))
    torch.testing.assert_close(theirs, ours)
    gradients = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (ours, theirs)]
    torch.testing.assert_close(*gradients)
