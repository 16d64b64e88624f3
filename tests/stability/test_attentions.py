"""Attentions compared by their instability: against the paper's protocol written out in plain float64."""

import functools
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from wellcond.models.sequence import build
from wellcond.stability import OneCycle, attention_stability

SMALL: dict[str, Any] = {"length": 12, "vocab_size": 9, "dim": 8, "mlp_dim": 12, "num_classes": 3}
LANDMARKS = {"nystrom": 4, "skyformer": 6}


class Batch(NamedTuple):
    inputs: tuple[Any, ...]
    targets: Tensor


def batches(seed: int, *, count: int = 4, documents: int = 1) -> list[Batch]:
    draws = torch.Generator().manual_seed(seed)

    def document() -> tuple[Tensor, Tensor]:
        mask = torch.arange(12) < torch.randint(3, 13, (5, 1), generator=draws)
        return torch.randint(1, 9, (5, 12), generator=draws).int(), mask

    parts = [sum((document() for _ in range(documents)), ()) for _ in range(count)]
    return [Batch(inputs, torch.randint(0, 3, (5,), generator=draws)) for inputs in parts]


def make(name: str, task: str = "text", *, dtype: torch.dtype = torch.float64, **more: Any) -> torch.nn.Module:
    settings = {"num_landmarks": LANDMARKS[name]} if name in LANDMARKS else {}
    return build(task, name, **{**SMALL, **settings, **more}).to(dtype)


def by_hand(name: str, seed: int, schedule: OneCycle, steps: int) -> tuple[list[float], list[float]]:
    """τ before and after the final norm, step by step, with Adam and the cycle written out."""
    torch.manual_seed(seed)
    start = make("softmax", dropout=0.0, attention_dropout=0.0).state_dict()
    model: Any = make(name, dropout=0.0, attention_dropout=0.0)
    model.load_state_dict(start)
    weights = list(model.parameters())
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    torch.manual_seed(seed)  # of the landmarks drawn in training
    taus: tuple[list[float], list[float]] = ([], [])

    def embeddings(batch: Batch) -> list[Tensor]:
        model.eval()
        with torch.no_grad():
            x = model.embedding(batch.inputs[0])
            for block in model.blocks:
                x = block(x, batch.inputs[1][:, None, None])
            found = [x * batch.inputs[1][..., None], model.norm(x) * batch.inputs[1][..., None]]
        model.train()
        return found

    for step, batch in enumerate(batches(seed)[:steps], start=1):
        before, old = embeddings(batch), [w.detach().clone() for w in weights]
        share = (step - 1) / (schedule.warmup - 1)  # of the way up
        lr = schedule.lr / 25 + share * (schedule.lr - schedule.lr / 25)
        beta = 0.95 + share * (0.85 - 0.95)
        gradients = torch.autograd.grad(F.cross_entropy(model(*batch.inputs), batch.targets), weights)
        with torch.no_grad():
            for w, g, m, v in zip(weights, gradients, first, second, strict=True):
                g = g.clamp(-schedule.clip, schedule.clip)
                m.mul_(beta).add_(g, alpha=1 - beta)
                v.mul_(0.999).add_(g * g, alpha=0.001)
                # torch corrects the first moment by beta to the power of the step, as if it had not changed
                size = (v / (1 - 0.999**step)).sqrt() + schedule.eps
                w.sub_(lr * (m / (1 - beta**step)) / size)
        moved = sum(float((w.detach() - o).square().sum()) for w, o in zip(weights, old, strict=True))
        for tau, a, b in zip(taus, embeddings(batch), before, strict=True):
            tau.append(float((a - b).square().sum()) / moved)
    return taus


def test_against_the_protocol_written_out() -> None:
    schedule = OneCycle(lr=1e-2, warmup=10, steps=100, clip=1e-2)
    state = torch.get_rng_state()
    found = attention_stability(
        functools.partial(make, dropout=0.0, attention_dropout=0.0), batches, schedule=schedule, steps=4, seeds=(3, 8)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert found.attentions == ["nystrom", "kernelized", "skyformer"]
    assert found.embeddings == ["before", "after"]
    for number, seed in enumerate((3, 8)):
        expected = {name: by_hand(name, seed, schedule, 4) for name in ("softmax", *found.attentions)}
        for name, scores in found.found[number].scores.items():
            for kind, embedding in enumerate(found.embeddings):
                assert [s[embedding].tau for s in scores] == pytest.approx(expected[name][kind], rel=1e-6)
        for name in found.attentions:
            for kind, embedding in enumerate(found.embeddings):
                pairs = zip(expected[name][kind], expected["softmax"][kind], strict=True)
                ratios = [a / b for a, b in pairs]
                assert found.means(name, embedding)[number] == pytest.approx(sum(ratios) / 4, rel=1e-6)


def test_pairs_dropout_and_rows_in_float32() -> None:
    said = []
    found = attention_stability(
        functools.partial(make, task="retrieval", dtype=torch.float32),
        functools.partial(batches, documents=2),
        schedule=OneCycle(lr=2e-4, warmup=8),
        attentions=("kernelized",),
        steps=3,
        seeds=[1],
        progress=lambda seed, name: said.append((seed, name)),
    )
    assert said == [(1, "softmax"), (1, "kernelized")]
    rows = found.rows("here")
    assert len(rows) == 3 * 2 * 3  # steps, embeddings; τ twice and a ratio
    assert {(row["name"], row["attention"]) for row in rows} == {
        ("tau", "softmax"), ("tau", "kernelized"), ("ratio", "kernelized"),
    }  # fmt: skip
    assert {row["status"] for row in rows} == {"ok"}
    ratios = [row["value"] for row in rows if row["name"] == "ratio" and row["embedding"] == "before"]
    assert found.means("kernelized", "before") == [pytest.approx(sum(ratios) / 3)]


def test_an_attention_is_as_stable_as_itself() -> None:
    def same(name: str) -> torch.nn.Module:
        return make("skyformer" if name == "other" else name)

    found = attention_stability(
        same, batches, schedule=OneCycle(lr=1e-3, warmup=8), attentions=["other"], baseline="skyformer", steps=2,
        seeds=[0],
    )  # fmt: skip
    assert found.found[0]["other"].ratios == (1.0, 1.0)  # the same draws of dropout and landmarks


def test_mistakes_are_named() -> None:
    schedule = OneCycle(lr=1e-3, warmup=8)
    with pytest.raises(ValueError, match="for 20 steps"):
        attention_stability(make, batches, schedule=schedule, seeds=[0])
    with pytest.raises(ValueError, match="at least one"):
        attention_stability(make, batches, schedule=schedule, seeds=[])
    with pytest.raises(ValueError, match="cannot start alike"):
        attention_stability(lambda name: make(name, dim=8 if name == "softmax" else 16), batches, schedule=schedule)
