"""Sequences in the engine: every task and attention trains; padded or not, killed, in parts, by two processes."""

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from wellcond import records
from wellcond.data import DataSet, open_data
from wellcond.models.sequence import TASKS as SIZES
from wellcond.models.sequence import PairClassifier
from wellcond.probe import Probe
from wellcond.train.checkpoint import latest, saved_steps
from wellcond.train.config import Config
from wellcond.train.loop import train
from wellcond.train.processes import join
from wellcond.train.recipes import bearable, recipe
from wellcond.train.tasks import Sequence, Validation, make_task

ARENA = ("lra_listops", "lra_text", "lra_retrieval", "lra_pathfinder", "lra_image")
ATTENTIONS = ("", "linear", "kernelized", "skyformer", "nystrom")
COUNTS = {"listops": 209_802, "text": 370_562, "retrieval": 395_138, "pathfinder": 173_954, "image": 158_602}
TINY = {"dim": 8, "mlp_dim": 8, "num_heads": 2}
SMALL: dict[str, Any] = {
    "model_kwargs": {**TINY, "dropout": 0.0, "attention_dropout": 0.0}, "data_kwargs": {"samples": 80, "length": 32},
    "steps": 6, "batch_size": 16, "eval_steps": 3, "log_every": 1, "save_every": 2,
}  # fmt: skip
AS_TEXT = (
    "model_kwargs=dim=8,mlp_dim=8,dropout=0.1", "data_kwargs=samples=80,length=32", "batch_size=16", "eval_steps=3",
    "log_every=1", "save_every=2",
)  # fmt: skip


def small(name: str = "lra_text", **changes: Any) -> Config:
    config = recipe(name, scale="smoke", **{**SMALL, **changes})
    return bearable(config.changed({"data_kwargs": {"samples": 200}}) if name == "lra_retrieval" else config, "cpu")


def run(config: Config, folder: Path) -> tuple[dict[str, float], list[dict[str, Any]]]:
    outcome = train(config, folder, device="cpu", quiet=True)
    return outcome.metrics, records.read_rows(folder / "metrics.jsonl")


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in records.read_rows(folder / "metrics.jsonl") if row["split"] == "train"]


@pytest.fixture
def start(launcher: Any, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    begun: list[Any] = []

    def go(folder: Path, *settings: str, **how: Any) -> Any:
        arguments = ["train", "lra_text", "--scale", "smoke", "--output", str(folder), "--device", "cpu"]
        for setting in (*AS_TEXT, *settings):
            arguments += ["--set", setting]
        begun.append(launcher.start(arguments, log=tmp_path / f"log-{len(begun)}.txt", **how))
        return begun[-1]

    yield go
    for started in begun:
        if started.alive():
            started.kill()


# ---- recipes


@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("name", ARENA)
def test_every_task_and_attention_trains_at_smoke(name: str, attention: str, tmp_path: Path) -> None:
    changes = {"steps": 2, "batch_size": 2 if name == "lra_pathfinder" else 8, "model_kwargs": TINY}
    changes |= {"eval_batches": 1}
    config = bearable(recipe(name, scale="smoke", attention=attention, **changes), "cpu")
    if name == "lra_pathfinder":
        config = config.changed({"data_kwargs": {"samples": 20, "contour": 6}})
    metrics, rows = run(config, tmp_path)
    assert all(math.isfinite(value) for value in metrics.values())
    assert [row["step"] for row in rows if row["split"] == "val"] == [2]


def test_recipes_are_the_published_setting() -> None:
    table = {  # batch, rate, warm-up, steps from one validation to the next, batches of one
        "lra_text": (16, 1e-4, 80, 500, 200),
        "lra_listops": (32, 1e-4, 1000, 500, 62),
        "lra_retrieval": (16, 2e-4, 800, 1000, 300),
        "imdb_pairs": (16, 2e-4, 800, 1000, 300),
        "lra_pathfinder": (128, 2e-4, 312, 500, 156),
        "lra_image": (256, 1e-4, 175, 50, 20),
    }
    for name, expected in table.items():
        for scale in ("lab", "paper"):
            c = recipe(name, scale=scale)
            assert (c.batch_size, c.lr, c.warmup_steps, c.eval_steps, c.eval_batches) == expected
            assert (c.steps, c.sched, c.opt, c.opt_eps, c.weight_decay, c.clip_value) == (
                50_000, "onecycle", "adamw", 1e-6, 0.0, 1.0,
            )  # fmt: skip
            assert (c.opt_betas, c.model_kwargs, c.accumulate) == ((0.9, 0.999), {}, 1)
            assert (c.data_kwargs, c.amp_dtype, c.compile, c.step_graph) == ({"mask": "fixed"}, "bfloat16", True, True)
    assert recipe("lra_listops", data_kwargs="mask=published").data_kwargs == {"mask": "published"}
    kept = recipe("lra_listops", scale="smoke", data_kwargs="mask=published").data_kwargs
    assert kept == {"mask": "published", "samples": 300, "length": 128}
    assert "samples" not in recipe("lra_listops", scale="smoke", data_kwargs="samples=None").data_kwargs


@pytest.mark.parametrize("name", COUNTS)
def test_a_task_builds_the_published_model_by_its_seed(name: str) -> None:
    sizes = SIZES[name]
    part = SimpleNamespace(length=sizes.length, vocab=sizes.vocab_size, pairs=sizes.documents == 2)
    data: Any = SimpleNamespace(train=part, classes=list(map(str, range(sizes.num_classes))))
    for attention, dropout in (("", 0.1), ("skyformer", 0.1), ("kernelized", 0.0)):
        config = recipe(f"lra_{name}", attention=attention)
        model: Any = Sequence(config, data).build()
        assert sum(p.numel() for p in model.parameters()) == COUNTS[name]
        assert isinstance(model, PairClassifier) == (name == "retrieval")
        assert (model.drop.p, model.blocks[0].attn.attn_drop.p) == (0.1, dropout)
        torch.manual_seed(99)
        again: Any = Sequence(config, data).build()
        assert torch.equal(model.embedding.positions, again.embedding.positions)
        if attention == "skyformer":
            assert model.blocks[0].attn.attention_core.num_landmarks == 128


# ---- training


def test_killed_and_gone_on_to_the_same_bits(start: Any, assert_same_run: Any, tmp_path: Path) -> None:
    settings = (
        "steps=10",
        "attention=skyformer",
        "ema_decay=0.9",
        "probe_every=4",
        "probe_samples=8",
        "eval_batches=1",
    )
    whole = start(tmp_path / "whole", *settings)
    assert whole.wait() == [0], whole.output()
    killed = start(tmp_path / "killed", *settings, slow_disk=0.05)
    killed.until(lambda: saved_steps(tmp_path / "killed/checkpoints"))
    assert killed.kill() == [-9], killed.output()
    assert max(saved_steps(tmp_path / "killed/checkpoints")) < 10
    again = start(tmp_path / "killed", *settings)
    assert again.wait() == [0], again.output()
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_two_processes_and_parts_of_a_batch_give_the_same_as_one(start: Any, tmp_path: Path) -> None:
    plain = ("steps=4", "model_kwargs=dim=8,mlp_dim=8,dropout=0,attention_dropout=0")
    two = start(tmp_path / "two", *plain, world=2)
    assert two.wait() == [0, 0], two.output()
    config = small(steps=4)
    run(config, tmp_path / "one")
    run(config.changed({"accumulate": 2}), tmp_path / "parts")
    expected = losses(tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)
    assert losses(tmp_path / "parts") == pytest.approx(expected, rel=1e-5)


def test_sharded_parameters_give_the_same(start: Any, tmp_path: Path) -> None:
    plain = ("steps=3", "model_kwargs=dim=8,mlp_dim=8,dropout=0,attention_dropout=0", "shard=true")
    two = start(tmp_path / "two", *plain, world=2)
    assert two.wait() == [0, 0], two.output()
    run(small(steps=3), tmp_path / "one")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)


@pytest.mark.parametrize("changes", [{"gray": "dct"}, {"remove_skips": ("sa",)}, {"amp_dtype": "bfloat16"}])
def test_surgery_and_half_precision_train(changes: dict[str, Any], tmp_path: Path) -> None:
    for name in ("lra_text", "lra_retrieval"):
        run(small(name, **changes), tmp_path / name)
        found = losses(tmp_path / name)
        assert len(found) == 6
        assert all(map(math.isfinite, found))
    run(small(), tmp_path / "plain")
    assert losses(tmp_path / "plain") != losses(tmp_path / "lra_text")


def test_the_probe_measures_tokens_and_not_their_padding(tmp_path: Path) -> None:
    config = small(probe_every=3, probe_samples=4, steps=3)
    run(config, tmp_path)
    found = {
        (row["block"], row["site"]): row["value"]
        for row in records.read_rows(tmp_path / "probe.jsonl")
        if row["name"] == "log_kappa" and row["step"] == 0
    }
    data = opened(config)
    task = make_task(config, data)
    model = task.build().eval()
    validation = Validation(config, task, data.val, join("cpu"))
    tokens, mask = validation.samples(4)
    assert not mask.all()
    values: dict[tuple[str, str], list[float]] = {}
    for one, counts in zip(tokens, mask, strict=True):
        with Probe(model, exact=True) as probe, torch.no_grad():
            model(one[counts][None])
        for row in probe.rows():
            if row["name"] == "log_kappa":
                values.setdefault((row["block"], row["site"]), []).append(row["value"])
    assert values.keys() == found.keys()
    for place, several in values.items():
        assert found[place] == pytest.approx(sum(several) / len(several), rel=1e-2), place


def opened(config: Config) -> DataSet:
    return open_data(config.data, options=config.data_kwargs)


def test_black_pixels_count_unless_published(tmp_path: Path) -> None:
    fixed, published = small("lra_image", data_kwargs=NO_SIZE), small("lra_image", data_kwargs=NO_SIZE | PUBLISHED)
    assert [len(opened(config).train.inputs(torch.arange(2))) for config in (fixed, published)] == [1, 2]
    run(fixed, tmp_path / "fixed")
    run(published, tmp_path / "published")
    assert losses(tmp_path / "fixed") != losses(tmp_path / "published")


NO_SIZE = {"samples": None, "length": None}
PUBLISHED = {"mask": "published"}


# ---- validation


def test_each_validation_takes_the_next_batches(tmp_path: Path) -> None:
    config = small(data_kwargs={"samples": 200}, eval_batches=1, batch_size=8)
    data = opened(config)
    validation = Validation(config, make_task(config, data), data.val, join("cpu"))
    for number in range(4):  # the longest of them first
        wanted = data.val.window(number, 8).by_length()
        assert torch.equal(validation._stretch(number).tokens, wanted.tokens)
        assert wanted.lengths.tolist() == sorted(data.val.window(number, 8).lengths.tolist(), reverse=True)
    coupled = config.changed({"attention": "skyformer", "attention_kwargs": {"compat": True}})
    published = Validation(coupled, make_task(coupled, data), data.val, join("cpu"))
    assert torch.equal(torch.cat([published._stretch(n).labels for n in range(4)]), data.val.labels.repeat(3)[:32])
    _, rows = run(config.changed({"steps": 7}), tmp_path)
    assert [row["step"] for row in rows if row["split"] == "val"] == [3, 6, 7]
    whole = Validation(config.changed({"eval_batches": 50}), make_task(config, data), data.val, join("cpu"))
    assert len(whole._stretch(3)) == len(data.val)


def test_small_batches_are_validated_several_at_once_on_a_gpu() -> None:
    config = small()  # 16 samples of 32 tokens
    data = opened(config)
    sizes = []
    for changes in ({}, {"attention": "skyformer"}, {"attention": "skyformer", "attention_kwargs": {"compat": True}}):
        validation = Validation(config.changed(changes), make_task(config, data), data.val, join("cpu"))
        sizes.append(validation._batch_size())
        validation.here = cast(Any, SimpleNamespace(device=torch.device("cuda"), world=1))
        sizes.append(validation._batch_size())
    assert sizes == [16, 8192, 16, 8192, 16, 16]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention": "kernelized"},
        {"attention": "nystrom"},
        {"attention": "skyformer"},
        {"attention": "skyformer", "attention_kwargs": {"compat": True}},
        {"gray": "dct", "probe_every": 5, "probe_samples": 4},
        {"attention": "skyformer", "amp_dtype": "bfloat16", "compile": True},
        {"attention": "skyformer", "amp_dtype": "float16"},
        {"amp_dtype": "bfloat16", "ema_decay": 0.9},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["lra_text", "lra_retrieval", "lra_image"])  # padded, pairs, without masks
def test_replayed_steps_train_the_same(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"data_kwargs": NO_SIZE} if name == "lra_image" else {}
    config = small(name, **sizes, **changes, steps=12).changed({"model_kwargs": {"dim": 32, "num_heads": 2}})
    for folder, graph in (("plain", False), ("replayed", True)):
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="a step of this training cannot be replayed")
            train(config.changed({"step_graph": graph}), tmp_path / folder, device="cuda", quiet=True)
    # Compiled for one length, and for any, code rounds in other places.
    near = 5e-3 if changes.get("compile") else 1e-3
    assert losses(tmp_path / "replayed") == pytest.approx(losses(tmp_path / "plain"), rel=near)


def test_the_best_state_is_kept_once_it_may_be(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"steps": 8, "eval_steps": 1, "save_every": 100, "keep": 1}
    for after, folder in ((0.0, tmp_path / "any"), (0.95, tmp_path / "late")):
        _, rows = run(small(**settings, keep_best=True, keep_best_after=after), folder)
        scores = [row["top1"] for row in rows if row["split"] == "val"]
        best = 1 + scores.index(max(scores))
        assert best < 8
        assert (folder / "checkpoints/best").exists() == (after == 0)
        assert saved_steps(folder / "checkpoints") == ([best, 8] if after == 0 else [8])
    states = [latest(tmp_path / name / "checkpoints") for name in ("any", "late")]
    assert all(state is not None and state.counters["best_step"] == best for state in states)


# ---- what cannot be


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_size": 32}, "image_size is a setting of task=classify or .*, and the task is sequence"),
        ({"data_kwargs": {"contour": 6}}, "made_up_text has no option 'contour' .its options: samples, length, mask"),
        ({"model": "lra_listop"}, "there is no task 'lra_listop' .* listops, text"),
        ({"model_kwargs": {"width": 3}}, "lra_text has no setting 'width'; did you mean depth. .its settings: dim, d"),
        ({"model_kwargs": {"pooling": "max"}}, "pooling is padded or valid, not 'max'"),
        ({"attention": "skyform"}, "skyform"),
        ({"pretrained": True}, "pretrained is for timm's models"),
        ({"keep_best": False, "keep_best_after": 0.5}, "keep_best_after is for keep_best=true"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        recipe("lra_text", scale="smoke", **changes).check()


def test_images_and_sequences_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lra_text is for single sequences, and made_up_pairs has pairs"):
        run(small(data="made_up_pairs", data_kwargs={"samples": 200}), tmp_path / "pairs")
    with pytest.raises(ValueError, match="task=classify trains on images, and digit_tokens gives sequences"):
        run(recipe("digits", data="digit_tokens"), tmp_path / "images")
    with pytest.raises(ValueError, match="task=sequence trains on sequences of tokens, and digits gives"):
        run(small(data="digits", data_kwargs={**NO_SIZE, "mask": None}), tmp_path / "sequences")
    with pytest.raises(ValueError, match=r"are less than one batch of 4000|more than the .* training samples"):
        run(small(batch_size=4000), tmp_path / "large")
