"""Vision models of transformers by name: their weights, the pictures that they expect, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from sklearn.datasets import load_sample_image

import wellcond
from wellcond.models.build import build_model
from wellcond.models.huggingface import create_huggingface, folder_of
from wellcond.models.pretrained import find_pretrained, weights_behind
from wellcond.models.sites import find_blocks

SMALL: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 64}
VIT: dict[str, Any] = {**SMALL, "image_size": 32, "patch_size": 8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vit")
    transformers.ViTForImageClassification(transformers.ViTConfig(**VIT | {"num_labels": 5})).save_pretrained(folder)
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32}, image_mean=[0.1, 0.2, 0.3])
    processor.save_pretrained(folder)
    return folder


def test_a_folder_gives_the_model_that_was_saved(folder: Path) -> None:
    saved = transformers.ViTForImageClassification.from_pretrained(folder)
    built = build_model(f"hf:{folder}", pretrained=True)
    assert built.trained
    assert not built.model.training
    assert type(built.model) is type(saved)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(built.model(images).logits, saved.eval()(images).logits)
    assert built.data_config["input_size"] == (3, 32, 32)
    assert built.data_config["mean"] == (0.1, 0.2, 0.3)
    assert built.data_config["std"] == (0.5, 0.5, 0.5)


def test_pictures_come_out_as_its_own_processor_makes_them(folder: Path) -> None:
    from PIL import Image

    picture = Image.fromarray(load_sample_image("china.jpg")).resize((64, 64))  # so that resizing is by a whole factor
    ours = build_model(f"hf:{folder}").transform()(picture)
    theirs = transformers.ViTImageProcessor.from_pretrained(folder)(picture, return_tensors="pt")["pixel_values"][0]
    assert (ours - theirs).abs().mean() < 0.05
    assert ours.mean((1, 2)) == pytest.approx(theirs.mean((1, 2)), abs=0.02)


def test_random_weights_and_other_settings(folder: Path) -> None:
    built = build_model(f"hf:{folder}", model_kwargs={"num_hidden_layers": 1})
    assert not built.trained
    assert len(find_blocks(built.model)) == 1
    with pytest.raises(ValueError, match=r"has no 'num_hiden_layers'; did you mean num_hidden_layers\?"):
        create_huggingface(f"hf:{folder}", {"num_hiden_layers": 1}, pretrained=False)


def test_of_images_and_text_the_image_part_is_built(tmp_path: Path) -> None:
    config = transformers.CLIPConfig(
        text_config={**SMALL, "vocab_size": 50000}, vision_config={**VIT, "num_hidden_layers": 2}
    )
    saved = transformers.CLIPModel(config)
    saved.save_pretrained(tmp_path)
    built = build_model(f"hf:{tmp_path}", pretrained=True)
    assert isinstance(built.model, transformers.CLIPVisionModel)
    weights = saved.vision_model.state_dict()
    mine = {name.removeprefix("vision_model."): value for name, value in built.model.state_dict().items()}
    assert all(torch.equal(mine[name], value) for name, value in weights.items())


def test_what_cannot_be_measured_is_refused(tmp_path: Path, folder: Path) -> None:
    transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=100)).save_pretrained(tmp_path / "bert")
    with pytest.raises(ValueError, match=r"reads input_ids, not images: .* wellcond\.Probe"):
        build_model(f"hf:{tmp_path / 'bert'}")
    with pytest.raises(ValueError, match="cannot read the configuration of hf:nowhere/at/all"):
        build_model("hf:nowhere/at/all")
    with pytest.raises(ValueError, match=f"timm knows no model .*hf:{folder}"):
        build_model(str(folder))


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**VIT))
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    assert find_pretrained(f"hf:{tmp_path}").why == "the folder has none as safetensors"
    with pytest.raises(ValueError, match="transformers cannot build"):
        build_model(f"hf:{tmp_path}", pretrained=True)


def saved(folder: Path, model: Any, processor: dict[str, Any] | None = None) -> str:
    model.save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return f"hf:{folder}"


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({}, ("squash", 1.0, (0.5,) * 3)),
        ({"image_processor_type": "BitImageProcessor", "size": {"shortest_edge": 256}, "do_center_crop": True,
          "crop_size": {"height": 224, "width": 224}, "image_mean": [0.1, 0.2, 0.3]},
         ("center", 0.875, (0.1, 0.2, 0.3))),  # as DINOv2, whose own size is larger than both
        ({"image_processor_type": "DeiTImageProcessor", "size": {"height": 256, "width": 256}, "do_center_crop": True,
          "crop_size": {"height": 224, "width": 224}, "image_mean": 0.25}, ("squash", 0.875, (0.25,) * 3)),
        ({"feature_extractor_type": "CLIPFeatureExtractor", "size": 32, "do_center_crop": True, "crop_size": 32,
          "image_mean": [0.4] * 3}, ("center", 1.0, (0.4,) * 3)),
        ({"image_processor_type": "ViTImageProcessor", "size": 32, "do_normalize": False}, ("squash", 1.0, (0.0,) * 3)),
    ],
)  # fmt: skip
def test_pictures_are_framed_and_normalised_as_the_file_says(
    tmp_path: Path, processor: dict[str, Any], expected: tuple[str, float, tuple[float, ...]]
) -> None:
    name = saved(tmp_path, transformers.ViTModel(transformers.ViTConfig(**VIT)), processor)
    found = build_model(name).data_config
    assert found["input_size"] == (3, 32, 32)
    assert (found["crop_mode"], found["crop_pct"], found["mean"]) == expected


def test_a_model_without_a_size_takes_its_processors(tmp_path: Path) -> None:
    name = saved(tmp_path, transformers.SegformerForImageClassification(transformers.SegformerConfig()))
    with pytest.raises(ValueError, match=r"does not say how large its images are: .* wellcond\.Probe"):
        build_model(name)
    size = {"image_processor_type": "SegformerImageProcessor", "size": {"height": 64, "width": 96}, "resample": 2}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(size))
    found = build_model(name).data_config
    assert (found["input_size"], found["interpolation"]) == ((3, 64, 96), "bilinear")


def test_weights_that_would_be_left_random_are_refused(tmp_path: Path) -> None:
    model = transformers.ViTModel(transformers.ViTConfig(**VIT))
    state = {f"encoder_of_mine.{name}": value for name, value in model.state_dict().items()}
    model.config.save_pretrained(tmp_path)
    safetensors.torch.save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not those of a ViTModel: embeddings.cls_token, .* would be left random"):
        build_model(f"hf:{tmp_path}", pretrained=True)
    del state["encoder_of_mine.pooler.dense.weight"], state["encoder_of_mine.pooler.dense.bias"]
    own = {name.removeprefix("encoder_of_mine."): value for name, value in state.items()}
    safetensors.torch.save_file(own, tmp_path / "model.safetensors", metadata={"format": "pt"})
    built = build_model(f"hf:{tmp_path}", pretrained=True)  # only the pooler is missing
    assert torch.equal(built.model.get_parameter("embeddings.cls_token"), own["embeddings.cls_token"])


def test_half_precision_is_measured_in_float32_and_nothing_is_hidden(tmp_path: Path) -> None:
    decoder = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2}
    masked = transformers.ViTMAEForPreTraining(transformers.ViTMAEConfig(**VIT, **decoder)).half()
    built = build_model(saved(tmp_path, masked), pretrained=True)
    assert {parameter.dtype for parameter in built.model.parameters()} == {torch.float32}
    assert built.model(torch.randn(1, 3, 32, 32)).last_hidden_state.shape[1] == 16 + 1


def test_code_of_a_repository_is_not_run(tmp_path: Path) -> None:
    where = {"AutoConfig": "own.Config", "AutoModel": "own.Model"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": where}))
    (tmp_path / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(ValueError, match=r"needs code of its own, which is not run; .* wellcond\.Probe"):
        build_model(f"hf:{tmp_path}")


def test_weights_are_looked_for_where_they_are(folder: Path) -> None:
    assert find_pretrained(f"hf:{folder}") == (True, "of that folder")
    assert weights_behind(f"hf:{folder}") == folder / "model.safetensors"
    assert folder_of("hf:google/vit-base-patch16-224") is None


def test_a_grayed_file_is_loaded_grayed(folder: Path, tmp_path: Path) -> None:
    model = wellcond.gray(build_model(f"hf:{folder}", pretrained=True).model, "dct", epsilon=0.9)
    wellcond.save(model, tmp_path / "model.safetensors")
    built = build_model(f"hf:{folder}", checkpoint=tmp_path / "model.safetensors")
    assert any("grayed as when it was saved: dct, epsilon 0.9" in note for note in built.notes)
