"""What suits data and machine is chosen and said, what was given is left alone, and a command means one run."""

from pathlib import Path

import pytest
from PIL import Image

from wellcond.cli.training import configure, run
from wellcond.data import open_data
from wellcond.data.sources import look_at
from wellcond.train.choices import choose
from wellcond.train.config import Config
from wellcond.train.recipes import recipe


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """CLASS/FILE, without train/ and val/: 40 pictures of each class, wider than high."""
    for label, color in (("red", (200, 0, 0)), ("blue", (0, 0, 200))):
        (tmp_path / "photos" / label).mkdir(parents=True)
        for index in range(40):
            picture = Image.new("RGB", (220, 150), color)
            picture.paste((0, 250, 0), (index, 0, index + 20, 30))
            picture.save(tmp_path / "photos" / label / f"{index}.png")
    return tmp_path / "photos"


def chosen(photos: Path, name: str = "vit_tiny", *, device: str = "cpu", **changes: object) -> tuple[Config, str]:
    config, said = choose(recipe(name, data=str(photos), **changes), device=device, scale="lab")
    config.check()
    assert config.given == {"data", *changes}
    return config, "\n".join(said)


def test_a_folder_is_looked_at(photos: Path) -> None:
    looked = look_at(str(photos))
    assert looked is not None
    assert (looked.train, looked.val, looked.classes, looked.side) == (64, 16, ["blue", "red"], 150)
    assert "no val/" in looked.note
    (photos / "red" / "broken.png").write_bytes(b"no picture")
    assert look_at(str(photos)) is not None
    assert look_at("digits") is None


def test_pictures_are_not_trained_at_32_pixels(photos: Path) -> None:
    config, said = chosen(photos)
    assert (config.image_size, config.model_kwargs) == (128, {"img_size": 128, "patch_size": 16})
    assert (config.batch_size, config.amp_dtype, config.compile) == (8, "float32", False)
    assert config.epochs == 100  # 64 pictures, 6,400 through the model: a CPU bears it
    assert 0 < config.lr < 1e-3
    for line in ("image size: 128 pixels", "patch: 16 × 16", "batch size: 8", "precision: float32", "compiled: no"):
        assert line in said
    assert all("to change it: --" in line for line in said.splitlines()[1:])
    large, _ = chosen(photos, device="cuda")
    assert (large.image_size, large.amp_dtype) == (128, "bfloat16")


def test_a_cpu_gets_an_end_that_it_reaches(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellcond.train.choices.PASSES", 640)
    config, said = chosen(photos)
    assert config.epochs == 10
    assert "to change it: --epochs 100" in said
    assert chosen(photos, device="cuda")[0].epochs == 100
    few, said = chosen(photos, device="cuda", epochs=3)
    assert (few.epochs, few.compile) == (3, False)
    assert "compiled: no (it takes longer" in said


@pytest.mark.parametrize(
    ("changes", "size", "model"),
    [
        ({"image_size": 64}, 64, {"img_size": 64, "patch_size": 8}),
        ({"image_size": 224}, 224, {"img_size": 224, "patch_size": 16}),
        ({"model_kwargs": {"img_size": 96, "patch_size": 12}}, 96, {"img_size": 96, "patch_size": 12}),
    ],
)
def test_what_was_given_stays_and_the_rest_follows(photos: Path, changes: dict, size: int, model: dict) -> None:
    config, said = chosen(photos, batch_size=32, lr=0.5, epochs=7, amp_dtype="bfloat16", compile=True, **changes)
    assert (config.image_size, config.model_kwargs) == (size, model)
    assert (config.batch_size, config.lr, config.epochs) == (32, 0.5, 7)
    assert (config.amp_dtype, config.compile) == ("bfloat16", True)
    assert "epochs:" not in said
    assert "precision:" not in said


@pytest.mark.parametrize("name", ["swin_small", "cait_s24", "pvt_v2_b3", "convmixer", "mae_base"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_recipe_of_images_has_a_form_for_them(photos: Path, name: str, device: str) -> None:
    assert chosen(photos, name, device=device)[0].image_size == 128


def test_data_of_a_recipe_and_other_scales_are_left_alone(photos: Path) -> None:
    lab = recipe("vit_tiny")
    config, said = choose(lab, device="cuda", scale="lab")
    assert (config, said) == (lab, [])
    paper = recipe("vit_tiny", scale="paper", data=str(photos))
    assert choose(paper, device="cuda", scale="paper") == (paper, [])
    smoke, said = choose(recipe("vit_tiny", scale="smoke", data=str(photos)), device="cpu", scale="smoke")
    assert (smoke.image_size, smoke.batch_size) == (32, 8)  # of 128, which it has not
    assert len(said) == 4


def test_a_run_goes_on_as_it_began(photos: Path) -> None:
    config, _ = chosen(photos)
    more = recipe("vit_tiny", data=str(photos))
    before = config.changed({"image_size": 64, "model_kwargs": {"img_size": 64, "patch_size": 8}, "epochs": 3})
    again, said = choose(more, device="cpu", scale="lab", before=before.as_json())
    assert (again.image_size, again.model_kwargs["patch_size"]) == (64, 8)
    assert "as this run began" in "\n".join(said)
    other = choose(more, device="cpu", scale="lab", before={**before.as_json(), "data": "elsewhere"})[0]
    assert other.image_size == 128


def test_a_run_goes_on_as_it_began_on_another_machine(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellcond.train.choices.PASSES", 640)  # on a CPU, 10 epochs
    monkeypatch.setattr("wellcond.train.recipes._has_triton", lambda: True)
    config = recipe("vit_tiny", data=str(photos))
    for began, goes_on in (("cpu", "cuda"), ("cuda", "cpu")):
        before, _ = choose(config, device=began, scale="lab")
        again, said = choose(config, device=goes_on, scale="lab", before=before.as_json())
        assert again == before
        for line in ("epochs", "precision"):
            assert any(one.startswith(f"{line}:") and "as this run began" in one for one in said)
    arena = recipe("lra_listops")
    before, _ = choose(arena, device="cuda", scale="lab")
    again, _ = choose(arena, device="cpu", scale="lab", before=before.as_json())
    assert (again.amp_dtype, again.compile) == ("bfloat16", True)
    given, _ = choose(arena.changed({"amp_dtype": "float32"}), device="cpu", scale="lab", before=before.as_json())
    assert given.amp_dtype == "float32"
    other, _ = choose(arena, device="cpu", scale="lab", before=before.changed({"steps": 9}).as_json())
    assert (other.amp_dtype, other.compile) == ("float32", False)  # not this run


def test_mistakes_come_before_a_look_at_the_data(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellcond.train.choices.look_at", lambda *_, **__: pytest.fail("looked"))
    with pytest.raises(ValueError, match="timm knows no model 'vit_tinny'"):
        choose(recipe("vit_tiny", data=str(photos), model="vit_tinny"), device="cpu", scale="lab")


def test_a_small_folder_is_trained_and_goes_on(photos: Path, tmp_path: Path, capsys) -> None:
    small = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 16, "num_heads": 2}
    options = {"data": str(photos), "epochs": 1, "model_kwargs": small}
    settings = [f"cache_dir={tmp_path / 'cache'}"]
    for _ in range(2):
        config = configure("vit_tiny", scale="lab", options=options, settings=settings, output=tmp_path / "run")
        assert (config.image_size, config.batch_size) == (32, 8)
        assert run(config, tmp_path / "run", device="cpu") == 0
    told = capsys.readouterr().err
    assert "64 pictures to train on and 16 to validate, of 2 classes (blue, red); it has no val/" in told
    assert "8 steps; loss" in told


def test_the_divided_folder_is_the_same_wherever_it_lies(photos: Path, tmp_path: Path) -> None:
    first = open_data(str(photos), image_size=8, cache_dir=tmp_path / "cache")
    moved = photos.rename(tmp_path / "moved")
    again = open_data(str(moved), image_size=8, cache_dir=tmp_path / "cache")
    assert (first.val.content(), first.val.labels.tolist()) == (again.val.content(), again.val.labels.tolist())
    assert first.val.labels.bincount().tolist() == [8, 8]
    (moved / "train").mkdir()
    for label in ("red", "blue"):
        (moved / label).rename(moved / "train" / label)  # train/ alone is divided, too
    assert len(open_data(str(moved), image_size=8, cache_dir=tmp_path / "cache").val) == 16
    (moved / "train" / "green").mkdir()
    Image.new("RGB", (9, 9)).save(moved / "train" / "green" / "0.png")
    with pytest.raises(ValueError, match="green holds one image; two are needed"):
        look_at(str(moved))
