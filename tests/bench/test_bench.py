"""Every benchmark runs anywhere, and writes what it showed together with where it ran."""

import pytest
import torch

from wellcond.bench import attention, graying, kappa, probe
from wellcond.bench.photographs import photographs
from wellcond.bench.timing import chosen_device, interleaved_ms, sustained_ms
from wellcond.graying import TokenGraying
from wellcond.models import graying_of
from wellcond.records import read_json


def test_photographs_are_the_same_for_the_same_seed_and_normalised():
    first, again, other = photographs(3, 64), photographs(3, 64), photographs(3, 64, seed=1)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (3, 3, 64, 64)
    assert first.abs().max() < 3


def test_what_cannot_be_written_is_not_measured(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(kappa, "interleaved_ms", lambda *_, **__: pytest.fail("it was measured"))
    with pytest.raises(ValueError, match="nothing can be written"):
        kappa.run(output=tmp_path / "file" / "kappa.json", quick=True)
    with pytest.raises(ValueError, match="is a folder"):
        kappa.run(output=tmp_path, quick=True)


def test_functions_are_called_in_turns():
    calls: list[str] = []
    times = interleaved_ms(
        [lambda: calls.append("a"), lambda: calls.append("b")], torch.device("cpu"), repeats=2, warmup=1
    )
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert len(times) == 2


def test_on_a_cpu_single_calls_are_timed_in_turns():
    calls: list[str] = []
    times = sustained_ms(
        [lambda: calls.append("a"), lambda: calls.append("b")], torch.device("cpu"), repeats=2, warmup=1
    )
    assert calls == ["a", "b", "a", "b", "a", "b"]
    assert all(time > 0 for time in times)


def test_a_gpu_that_is_named_is_the_one_that_is_timed(monkeypatch):
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert chosen_device("cuda:1") == torch.device("cuda", 1)
    assert chosen_device("cpu").type == "cpu"
    assert current == [torch.device("cuda", 1)]


def test_kappa(tmp_path):
    path = kappa.run(output=tmp_path / "kappa.json", device="cpu", batch_size=2, quick=True)
    record = read_json(path)
    assert {row["method"] for row in record["rows"]} >= {"torch.linalg.cond", "condition_number"}
    ours = [row for row in record["rows"] if row["method"] == "condition_number"]
    assert all(row["error"] < 1e-3 for row in ours)
    assert [row["of"] for row in ours] == ["tokens", "sa 1", *["random"] * len(kappa.KAPPAS)]
    assert [row["kappa"] for row in ours[2:]] == pytest.approx(kappa.KAPPAS, rel=1e-3)
    assert record["environment"]["versions"]["torch"]


def test_no_kappa_is_judged_that_float32_cannot_see():
    low, high = kappa.matrices(1, 9, 12, 1e2), kappa.matrices(1, 9, 12, 1e9)
    rows = kappa._compare("both", torch.cat([low, high]), repeats=1)
    assert {row["beyond"] for row in rows} == {1}
    assert all(row["error"] < 1e-3 for row in rows)
    assert all(row["error"] is None for row in kappa._compare("none", high, repeats=1))


def test_probe(tmp_path):
    record = read_json(probe.run(output=tmp_path / "probe.json", device="cpu", batch_size=1, quick=True))
    assert {row["pass"] for row in record["rows"]} == {"its own, float32", "its own, float64", "as trained"}
    assert all(row["step ms"] > 0 for row in record["rows"])
    assert record["every"] == 100


def test_attention(tmp_path):
    record = read_json(attention.run(output=tmp_path / "attention.json", device="cpu", quick=True))
    assert {"softmax (SDPA)", "skyformer", "kernelized", "nystrom", "nystrom, as published"} <= {
        row["method"] for row in record["rows"]
    }
    assert all(row["both ms"] > 0 and row["times faster"] > 0 for row in record["rows"])


@pytest.mark.parametrize("exponent", [1.0, 1.5, 2.0])
def test_the_exponent_of_a_power_law_is_found(exponent):
    rows = [
        {
            "kind": "length",
            "method": "m",
            "n": n,
            "tokens": max(n, 65536),
            "both ms": max(n, 65536) * n ** (exponent - 1),
        }
        for n in attention.ON_GPU.lengths
    ]
    assert attention.cost_exponent(rows, "m") == pytest.approx(exponent)


def test_graying(tmp_path, monkeypatch):
    monkeypatch.setattr(graying, "EPSILONS", (0.95,))
    path = graying.run(output=tmp_path / "graying.json", device="cpu", batch_size=1, quick=True)
    rows = read_json(path)["rows"]
    for name in graying.MODELS.values():
        plain, *grayed = [row for row in rows if row["kind"] == "step" and row["model"] == name]
        assert plain["ratio"] == 1
        assert {(row["path"], row["epsilon"]) for row in grayed} == {
            ("dct", 0.95),
            ("dct", 0.8),
            ("svd", 0.95),
            ("svd", 0.5),
        }
        assert all(0 < row["from"] <= row["ratio"] <= row["to"] for row in grayed)
    errors = [row for row in rows if row["kind"] == "error"]
    judged = [row for row in errors if "all in" not in row["path"]]
    assert {row["tokens"] for row in errors} == {"196×768", "3136×48"}
    assert all(row["frobenius"] < 1e-3 for row in judged)
    assert all(row["singular values"] < 0.02 for row in judged if row["path"].startswith("svd"))
    assert max(row["frobenius"] for row in errors if "bfloat16" in row["path"]) > 5e-3  # what autocast would do


def test_copies_are_grayed_and_their_model_is_not():
    model = graying.create_model("vit_tiny_patch16_224", {"depth": 1, "num_classes": 3}).eval()
    copies = graying.grayed_copies(model, [("svd", 0.9), ("dct", 0.8)])
    assert [(one.method, one.epsilon) for one in map(graying_of, copies)] == [("svd", 0.9), ("dct", 0.8)]
    assert graying_of(model) is None
    images = photographs(2)
    with torch.no_grad():
        changed = graying.Changed(TokenGraying("dct", 0.8, 16), model)(images)
        assert torch.allclose(copies[1](images), changed, atol=1e-5)
        assert not torch.allclose(model(images), changed, atol=1e-5)


def test_the_fft_peer_computes_the_same():
    tokens = torch.randn(2, 6, 10, generator=torch.Generator().manual_seed(0))
    want = graying.dct_power(tokens, 0.95)
    assert torch.allclose(graying._fft_gray(tokens, 0.95), want, atol=1e-4)
