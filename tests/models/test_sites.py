"""Finding the blocks of a model: wherever they sit, whatever is wrapped around them; and teaching unknown ones."""

import copy

import pytest
import timm
import torch
from timm.models.convmixer import ConvMixer
from timm.models.vision_transformer import Block, ParallelScalingBlock
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import wellcond
from wellcond.models.families import family, full_name
from wellcond.models.sites import Site, Tap, find_blocks, select_blocks, sites
from wellcond.words import BLOCK_SITES


@pytest.fixture(autouse=True)
def _forget_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "_blocks", dict(family._blocks))


class HomeMade(nn.Module):
    """A block as people write it: no drop path, no LayerScale."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(dim)
        self.mix = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.ln2 = nn.LayerNorm(dim)
        self.ff = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        x = x + self.mix(y, y, y, need_weights=False)[0]
        return x + self.ff(self.ln2(x))


HOME_TAPS = {"in": "ln:output", "sa": "mix:output", "+sa": "ln2:input", "mlp": "ff:output", "+mlp": ":output"}


# ---- the list


def test_sites_are_listed_in_order_of_execution(vit: nn.Module) -> None:
    listed = wellcond.sites(vit)
    assert listed == [Site(f"blocks.{i}", i, site) for i in range(2) for site in BLOCK_SITES]
    assert listed[1].block == "blocks.0"


def test_stages_are_numbered_through() -> None:
    swin = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=64, window_size=4, depths=(2, 1), num_heads=(2, 4)
    )
    assert [(block.name, block.index) for block in find_blocks(swin)] == [
        ("layers.0.blocks.0", 0),
        ("layers.0.blocks.1", 1),
        ("layers.1.blocks.0", 2),
    ]


def test_the_table_shows_what_is_lacking_and_why() -> None:
    text = str(sites(ConvMixer(dim=8, depth=2, kernel_size=3)))
    assert text == repr(sites(ConvMixer(dim=8, depth=2, kernel_size=3)))
    lines = text.splitlines()
    assert lines[0].split() == ["index", "block", *BLOCK_SITES]
    assert lines[1].split() == ["0", "blocks.0", "x", "x", "x", "x", "-"]
    assert lines[-1] == "no +mlp in 2 × Sequential: a ConvMixer has no skip around its pointwise convolution"
    parallel = nn.Sequential(ParallelScalingBlock(8, 2), ParallelScalingBlock(8, 2, init_values=1.0))
    assert "no sa in 1 × ParallelScalingBlock: LayerScale comes after" in str(sites(parallel))


# ---- where blocks sit


def test_blocks_are_found_in_models_of_ones_own() -> None:
    model = nn.ModuleDict({"encoder": nn.Sequential(Block(8, 2), Block(8, 2)), "head": nn.Linear(8, 3)})
    assert [block.name for block in find_blocks(model)] == ["encoder.0", "encoder.1"]
    (alone,) = find_blocks(Block(8, 2))
    assert (alone.name, alone.taps["+mlp"]) == ("", Tap(path="", end="output"))


def test_subclasses_are_known_by_what_they_derive_from() -> None:
    class Mine(Block):
        pass

    assert find_blocks(nn.Sequential(Mine(8, 2)))[0].taps == find_blocks(Block(8, 2))[0].taps


def test_wrappers_are_seen_through(vit: nn.Module) -> None:
    names = [block.name for block in find_blocks(vit)]
    for wrapped in (torch.compile(vit), nn.DataParallel(vit), nn.DataParallel(torch.compile(vit))):
        assert [block.name for block in find_blocks(wrapped)] == names
        assert find_blocks(wrapped)[0].module is vit.blocks[0]


def test_wrapped_blocks_keep_their_names(vit: nn.Module) -> None:
    first, second = vit.blocks
    vit.blocks[0] = torch.compile(first)
    vit.blocks[1] = checkpoint_wrapper(second)
    assert [(block.name, block.module) for block in find_blocks(vit)] == [("blocks.0", first), ("blocks.1", second)]


def test_chunks_of_an_mlp_are_no_sites() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    assert not find_blocks(transformers.BertModel(config))[0].lacks
    config.chunk_size_feed_forward = 2
    (block,) = find_blocks(transformers.BertModel(config))
    assert set(block.taps) == {"in", "sa", "+sa"}
    assert "chunk_size_feed_forward" in block.lacks["mlp"]


def test_every_path_of_the_table_exists(vit: nn.Module) -> None:
    for block in find_blocks(vit):
        for tap in block.taps.values():
            block.module.get_submodule(tap.path)
        block.module.get_submodule(block.attention or "")


# ---- blocks that nobody knows


def test_a_model_of_no_known_blocks_says_how_to_register_them() -> None:
    with pytest.raises(ValueError, match=r"Sequential has no blocks that wellcond knows.*\n.*register_blocks\(MyBlock"):
        sites(nn.Sequential(HomeMade()))


def test_a_registered_class_is_known() -> None:
    model = nn.Sequential(HomeMade(), HomeMade())
    wellcond.register_blocks(HomeMade, taps=HOME_TAPS, attention="mix")
    blocks = find_blocks(model)
    assert [block.name for block in blocks] == ["0", "1"]
    assert blocks[0].attention == "mix"
    assert blocks[0].taps["sa"] == Tap(path="mix", end="output")
    with pytest.raises(ValueError, match="not how to run it without"):
        wellcond.remove_skip(model, "sa")


def test_a_class_can_be_registered_by_name_and_with_few_sites() -> None:
    taps = {"+mlp": ":output", "mlp": Tap(path="ff", end="output"), "sa": "mix:output:1"}
    wellcond.register_blocks(full_name(HomeMade), taps=taps, lacks={"in": "it is not normed"}, channels_first=True)
    (block,) = find_blocks(HomeMade())
    assert list(block.taps) == ["sa", "mlp", "+mlp"]
    assert block.taps["sa"].call == 1
    assert block.lacks == {"in": "it is not normed", "+sa": "it was registered without"}
    assert block.channels_first


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ({"attn": "mix:output"}, r"no sites \['attn'\]"),
        ({}, "nothing to measure"),
        ({"sa": "mix"}, "a tap is"),
        ({"sa": "mix:outputs"}, "a tap is"),
        ({"sa": "mix:output:last"}, "a tap is"),
    ],
)
def test_wrong_taps_are_refused(taps: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        wellcond.register_blocks(HomeMade, taps=taps)


def test_a_tap_of_a_module_that_is_not_there_is_named() -> None:
    wellcond.register_blocks(HomeMade, taps={"sa": "attn:output"}, attention="mix")
    with pytest.raises(ValueError, match=r"HomeMade has no module attn.*sa"):
        find_blocks(HomeMade())


def test_blocks_within_blocks_are_refused() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Block(8, 2), Block(8, 2)

    wellcond.register_blocks(Pair, taps={"+mlp": ":output"})
    with pytest.raises(ValueError, match=r"0\.first \(Block\) is a block inside the block 0 \(Pair\)"):
        find_blocks(nn.Sequential(Pair()))


# ---- choosing some


def test_blocks_are_chosen_by_name_pattern_and_index(make_vit) -> None:
    blocks = find_blocks(make_vit(depth=12))
    chosen = lambda which: [block.index for block in select_blocks(blocks, which)]  # noqa: E731
    assert chosen(None) == list(range(12))
    assert chosen("blocks.1") == [1]
    assert chosen("blocks.1?") == [10, 11]
    assert chosen(-1) == [11]
    assert chosen(["blocks.1*", 0]) == [0, 1, 10, 11]
    assert chosen(range(0, 12, 5)) == [0, 5, 10]
    for nothing in ("layers.*", 12, -13, ["blocks.0", "block.1"]):
        with pytest.raises(ValueError, match=r"no block is called .*12 blocks are blocks\.0, .*blocks\.11"):
            select_blocks(blocks, nothing)
    with pytest.raises(ValueError, match="None stands for all"):
        select_blocks(blocks, [])


def test_finding_blocks_changes_nothing(vit: nn.Module) -> None:
    before = copy.deepcopy(vit).state_dict()
    find_blocks(vit)
    assert all(torch.equal(value, before[name]) for name, value in vit.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in vit.modules())
