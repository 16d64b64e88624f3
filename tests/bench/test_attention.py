"""The peers of the attention benchmark: that they compute what their names say, and that one failing harms no other."""

import weakref

import pytest
import torch

from wellcond.attention import kernelized_attention, linear_attention, nystrom_attention, softmax_attention
from wellcond.bench import attention
from wellcond.bench.attention import Peer, flex_gaussian, nystromformer
from wellcond.records import read_json


def inputs(*shape, **options):
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator, **options) for _ in range(4))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")  # on a CPU it compiles no lse
@pytest.mark.parametrize("shape", [(2, 3, 64, 16), (1, 2, 197, 32)])
def test_flex_attention_computes_the_gaussian_kernel(shape):
    q, k, v, _ = inputs(*shape)
    want = kernelized_attention(q.double(), k.double(), v.double())
    found = flex_gaussian(compiled=False)(q, k, v)
    torch.testing.assert_close(found.double(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [96, 197, 16])
def test_nystromformer_as_published_is_ours_in_the_limit(n):
    """It starts from another number, which many steps forget; with as many segments as tokens it is softmax."""
    q, k, v, _ = inputs(1, 1, n, 8, dtype=torch.float64)
    want = nystrom_attention(q, k, v, num_landmarks=16, num_iterations=40)
    found = nystromformer(q, k, v, num_landmarks=16, num_iterations=40)
    torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-8)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at it, in torch 2.11
def test_flex_attention_passes_gradients_on_to_the_keys():
    q, k, v, g = (t.cuda().bfloat16() for t in inputs(2, 2, 256, 32))
    q, k, v = (t.requires_grad_() for t in (q, k, v))
    assert attention._disagreement(flex_gaussian(), kernelized_attention, (q, k, v), g) == ""


def test_a_lost_gradient_is_named():
    q, k, v, g = inputs(1, 2, 32, 8)
    q, k, v = (t.requires_grad_() for t in (q, k, v))

    def forgets_the_key(q, k, v):
        return kernelized_attention(q, k.detach(), v)

    assert attention._disagreement(kernelized_attention, kernelized_attention, (q, k, v), g) == ""
    assert attention._disagreement(forgets_the_key, kernelized_attention, (q, k, v), g) == "gradient of key off by 100%"
    assert "output off by" in attention._disagreement(linear_attention, kernelized_attention, (q, k, v), g)


def test_a_peer_that_fails_marks_its_own_row_alone(tmp_path, monkeypatch):
    """FlexAttention has no backward on a CPU, and says so by raising."""

    def peers(device, *, landmarks):
        flex = Peer("flex", flex_gaussian(compiled=False), torch.float32, twin=kernelized_attention)
        return [
            Peer("softmax", softmax_attention, torch.float32),
            flex,
            Peer("linear", linear_attention, torch.float32),
        ]

    monkeypatch.setattr(attention, "peers_on", peers)
    path = attention.run(output=tmp_path / "attention.json", device="cpu", quick=True)
    rows = read_json(path)["rows"]
    failed = [row for row in rows if row["method"] == "flex"]
    assert [row["n"] for row in failed] == [256, 512]
    assert all(row["both ms"] is None and row["note"].startswith("failed: NotImplementedError") for row in failed)
    assert all(row["both ms"] > 0 and not row["note"] for row in rows if row["method"] != "flex")
    assert "does not support backward" in path.with_suffix(".svg").read_text("utf-8")


def test_a_peer_that_fails_later_harms_no_other(tmp_path, monkeypatch):
    calls = []

    def tires(q, k, v):
        calls.append(1)
        if len(calls) > 5:
            raise RuntimeError("tired")
        return softmax_attention(q, k, v)

    def peers(device, *, landmarks):
        return [Peer("softmax", softmax_attention, torch.float32), Peer("tires", tires, torch.float32)]

    monkeypatch.setattr(attention, "peers_on", peers)
    monkeypatch.setattr(attention, "QUICK", attention.QUICK._replace(lengths=(64,)))
    good, bad = read_json(attention.run(output=tmp_path / "attention.json", device="cpu", quick=True))["rows"]
    times = ("both ms", "forward ms")
    assert all(good[time] > 0 for time in times)
    assert not good["note"]
    assert [bad[name] for name in (*times, "memory MiB")] == [None] * 3
    assert bad["note"] == "failed: RuntimeError tired"
    assert len(calls) == 6


def test_a_failed_peer_keeps_no_memory():
    def fails(q, k, v):
        large = torch.ones(1000)
        held.append(weakref.ref(large))
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    held = []
    trial = attention._Trial(Peer("fails", fails, torch.float32), "length", (1, 2, 16, 8), torch.device("cpu"))
    trial.guarded(trial.alone)()
    assert trial.failed
    assert trial.too_much
    assert held[0]() is None


def test_layers_share_a_backward_pass_and_no_gradients():
    calls = []

    def counted(q, k, v):
        calls.append((q, k, v))
        return softmax_attention(q, k, v)

    trial = attention._Trial(Peer("softmax", counted, torch.float32), "length", (1, 2, 16, 8), torch.device("cpu"))
    trial.repeat(3)
    trial.layered()
    assert trial.row["calls"] == len(calls) == 3
    assert len({id(t) for inputs in calls for t in inputs}) == 9
    assert len({t.data_ptr() for inputs in calls for t in inputs}) == 3


def test_the_record_holds_the_landmarks_that_were_used(tmp_path):
    record = read_json(attention.run(output=tmp_path / "attention.json", device="cpu", quick=True))
    assert record["landmarks"] == 32
    assert record["on"] == "cpu"
    assert record["sizes"] == "quick"
    assert record["quick"] is True


def test_a_cpu_has_sizes_of_its_own_and_says_so(tmp_path, monkeypatch, capsys):
    """They are not those of --quick; here with fewer tokens, so that it takes no minute."""
    assert set(attention.ON_CPU.lengths) > {256, 512, 4096}
    assert attention.ON_CPU.landmarks == attention.ON_GPU.landmarks == 128
    monkeypatch.setattr(attention, "ON_CPU", attention.ON_CPU._replace(tokens=512, lengths=(128, 256), repeats=1))
    record = read_json(attention.run(output=tmp_path / "attention.json", device="cpu"))
    assert record["sizes"] == "cpu"
    assert record["quick"] is False
    assert {row["n"] for row in record["rows"]} == {128, 256, 197}
    assert "on a CPU: 512 tokens in all, sequences of 128 to 256" in capsys.readouterr().out


def test_a_narrow_terminal_shows_whole_names_and_shapes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(attention, "QUICK", attention.QUICK._replace(tokens=128, lengths=(64,), landmarks=8))
    attention.run(output=tmp_path / "attention.json", device="cpu", quick=True)
    lines = capsys.readouterr().out.splitlines()
    for name in ("softmax (SDPA)", "skyformer", "skyformer, as published", "nystrom, as published", "kernelized"):
        assert sum(line.strip().startswith(f"{name}  ") and "2×2×64×32" in line for line in lines) == 1, name
    assert not any("…" in line for line in lines)
