"""Passes that are not quite like others: autocast hidden by LayerScale, surgery in between, repeated by checkpoints."""

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from timm.models.convmixer import ConvMixer
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import wellcond
from wellcond import records
from wellcond.probe import Probe, capture


@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "cait_xxs24_224"])
def test_autocast_is_said_where_layer_scale_hides_it(name: str) -> None:
    """LayerScale is float32, and so is what it gives out of bfloat16."""
    model = timm.create_model(name, img_size=56, depth=1, num_classes=0).train()
    with torch.autocast("cpu", dtype=torch.bfloat16), Probe(model, exact=False) as probe:
        model(torch.randn(2, 3, 56, 56))
    rows = [row for row in probe.rows() if row["name"] == "log_kappa" and row["status"] != "single"]
    assert rows
    assert {row["dtype"] for row in rows} == {"float32"}
    assert {row["status"] for row in rows} <= {"low_precision", "ceiling"}
    with torch.autocast("cpu", dtype=torch.bfloat16), Probe(model) as probe:
        model(torch.randn(2, 3, 56, 56))
    assert {row["status"] for row in probe.rows()} <= {"ok", "ceiling", "single"}


def test_surgery_while_attached_is_noticed() -> None:
    """In CaiT the second call of a module becomes the first when a skip is gone."""
    model = timm.create_model("cait_xxs24_224", img_size=32, depth=1, num_classes=0).eval()
    x = torch.randn(2, 3, 32, 32)
    with Probe(model, blocks=0) as probe:
        model(x)
        wellcond.remove_skip(model, "sa", layer_scale=1.0)
        probe.clear()
        model(x)
    with Probe(model, blocks=0) as fresh:
        model(x)
    values = [[(row["site"], row["name"], row["value"]) for row in p.rows()] for p in (probe, fresh)]
    assert values[0] == values[1]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_model_is_counted_once(vit: Any, images: Tensor, reentrant: bool, exact: bool) -> None:
    vit.train()
    x = images.clone().requires_grad_()
    with Probe(vit, exact=exact) as probe:
        for _ in range(3):
            checkpoint(vit, x, use_reentrant=reentrant).sum().backward()
    assert sorted({row["step"] for row in probe.rows()}) == [0, 1, 2]
    assert probe.step == 3


class Operations(TorchDispatchMode):
    """Notes what runs inside it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("exact", [True, False])
def test_the_users_dispatch_modes_see_the_models_operations_alone(vit: Any, images: Tensor, exact: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    encoder, padding = torch.nn.TransformerEncoder(layer, 1), torch.arange(5) > torch.tensor([[2], [4]])
    vit.blocks[0].attn.fused_attn = False
    for model, x, settings in (
        (vit.train(), images, {}),
        (encoder, torch.randn(2, 5, 8), {"src_key_padding_mask": padding}),
    ):
        with Operations() as plain:
            model(x, **settings)
        with Probe(model, exact=exact) as probe, Operations() as probed:
            model(x, **settings)
        assert probed.seen == plain.seen
        assert {row["name"] for row in probe.rows()} >= {"log_kappa", "attention_entropy"}


@pytest.mark.parametrize("exact", [True, False])
def test_selective_checkpointing(vit: Any, images: Tensor, exact: bool) -> None:
    """It replays the results of some operations in backward, in their order: ours must not be among them."""

    def policy(_context: Any, operation: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        saved = {torch.ops.aten._softmax.default, torch.ops.aten.addmm.default}
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    vit.train().blocks[0].attn.fused_attn = False
    gradients = []
    for probe in (contextlib.nullcontext(), Probe(vit, exact=exact, max_samples=2)):
        vit.zero_grad()
        with probe:
            out = checkpoint(vit, images, use_reentrant=False, context_fn=contexts)
        out.square().sum().backward()
        gradients.append([parameter.grad for parameter in vit.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


def test_a_file_that_cannot_be_written(vit: Any, images: Tensor, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be written to .*: Is a directory"):
        Probe(vit).to(tmp_path)
    full = Path("/dev/full")
    if full.exists():
        vit.train()
        said = r"could not be written, training goes on.*No space left"
        with pytest.warns(UserWarning, match=said), Probe(vit).to(full) as probe:
            vit(images)
        assert probe.rows()


def test_named_twice_a_file_has_each_row_once(vit: Any, images: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "new" / "probe.jsonl"
    with Probe(vit).to(path) as probe:
        vit(images)
    probe.to(path)
    assert len(records.read_rows(path)) == len(probe.rows())


def test_patches_that_do_not_fill_the_image() -> None:
    """The convolution leaves a remainder out, and so do we; the other places are measured in any case."""
    model = ConvMixer(8, 2, kernel_size=3, patch_size=7).eval()
    with Probe(model, sites="*") as probe:
        model(torch.randn(5, 3, 32, 32))
    assert {row["site"] for row in probe.rows()} >= {"tokens", "embed", "sa"}
    assert {row["count"] for row in probe.rows() if row["site"] == "tokens" and row["name"] == "log_kappa"} == {5}


def test_one_failing_place_costs_no_other(vit: Any, images: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    as_tokens = capture._as_tokens

    def fails_at_sa(tensor: Tensor, want: Any) -> Tensor:
        if want.place.site == "sa":
            raise RuntimeError("out of memory")
        return as_tokens(tensor, want)

    monkeypatch.setattr(capture, "_as_tokens", fails_at_sa)
    vit.train()
    with (
        pytest.warns(UserWarning, match="places could not be measured: sa of blocks.0.*out of memory"),
        Probe(vit) as probe,
    ):
        vit(images)
    assert {row["site"] for row in probe.rows()} == {"+sa", "mlp", "+mlp"}
    with pytest.raises(RuntimeError, match="out of memory"), Probe(vit.eval()):
        vit(images)


def test_an_empty_batch_measures_nothing(vit: Any, images: Tensor) -> None:
    with Probe(vit) as probe:
        vit(images[:0])
        vit(images)
    assert {row["step"] for row in probe.rows()} == {1}


@pytest.mark.parametrize("settings", [{"blocks": 1.5}, {"sites": 3}, {"blocks": [None]}])
def test_what_names_no_place(vit: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"blocks are named by|sites are names"):
        Probe(vit, **settings)
