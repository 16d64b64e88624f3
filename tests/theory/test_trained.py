from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wellcond.theory import asa_eq6, check
from wellcond.theory.draws import softmax_attention
from wellcond.theory.trained import describe, read_blocks

FOLDER = Path(__file__).parents[2] / "evidence" / "trained"
FILES = [FOLDER / "digits-vit-blocks.safetensors", FOLDER / "digits-vit-mlps.safetensors"]


def test_parts_of_one_model_make_whole_blocks():
    blocks = read_blocks(FILES)
    assert [block.name for block in blocks] == ["blocks.0", "blocks.2", "blocks.5"]
    for block in blocks:
        x, wq, wk, wv = block.attention()
        mlp = block.mlp()
        assert mlp is not None
        assert block.heads == 4
        assert x.shape == mlp[0].shape == (8, 65, 64)
        assert wq.shape == wk.shape == wv.shape == (8, 64, 64)
        assert (mlp[1].shape, mlp[2].shape) == ((8, 64, 256), (8, 256, 64))
        assert x.dtype == torch.float64
    assert describe(FILES) == describe(FILES[:1])  # the same model, said once


def test_packed_heads_are_the_files_heads():
    (block, *_) = read_blocks(FILES[:1])
    x, *packed = block.attention()
    q, k = block.queries_and_keys()
    values = x[:, None] @ block.tensors["w_v"].double()
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, values).movedim(1, 2).flatten(2)
    torch.testing.assert_close(softmax_attention(x, *packed, heads=4), expected)
    assert block.mlp() is None


def test_statements_use_them():
    trained = [c for c in asa_eq6.cases(40, 0, read_blocks(FILES)) if c.settings["weights"] == "trained"]
    assert {case.draws for case in trained} == {8}
    assert len([case for case in trained if case.part == "claim"]) == 3
    assert [case.name for case in trained if case.part == "instead" and case.failures] == []
    assert "digits" in check("sky-lemma3", draws=40, trained=FILES).trained


def test_other_files_are_refused(tmp_path):
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="no safetensors file"):
        read_blocks([tmp_path / "text"])
    with pytest.raises(ValueError, match="no safetensors file"):
        read_blocks([tmp_path / "missing"])
    save_file({"blocks.0.x": torch.zeros(1, 2, 2)}, tmp_path / "part")
    with pytest.raises(ValueError, match="lacks w_k, w_q, w_v"):
        read_blocks([tmp_path / "part"])
