"""wellcond measure: the numbers of the probe, the same on paper and on screen, and nobody's files overwritten."""

import errno
import io
import json
import math
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import save_file
from sklearn.datasets import load_sample_image
from timm.models import register_model
from timm.models.convmixer import ConvMixer
from timm.models.vision_transformer import ParallelScalingBlock
from torch import nn

from wellcond import cli
from wellcond.data import sample_images
from wellcond.measure.measure import Measurement, images_for, measure
from wellcond.measure.table import kappa_table, kappa_tables, legend
from wellcond.models import gray, graying_of, load, replace_attention, save
from wellcond.models.build import build_model
from wellcond.models.pretrained import Pretrained
from wellcond.numerics import singular_values
from wellcond.probe import Probe
from wellcond.records import read_json, read_rows, write_json
from wellcond.report import report_runs
from wellcond.report.reference import reference
from wellcond.train import recipe
from wellcond.train.checkpoint import export
from wellcond.train.loop import train

NAME = "vit_tiny_patch16_224"
SMALL: dict[str, Any] = {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 3}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "WELLCOND_DEBUG"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    save(timm.create_model(NAME, num_classes=5, **SMALL), tmp_path / "trained.safetensors")
    return tmp_path / "trained.safetensors"


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def small(**options: Any) -> Any:
    return measure(NAME, **{"model_kwargs": SMALL, "samples": 3, "console": quiet(), **options})


def kappas(rows: list[Any]) -> dict[tuple[str, str], float]:
    return {(row["block"], row["site"]): row["value"] for row in rows if row["name"] == "log_kappa"}


# ---- the numbers


def test_the_numbers_are_those_of_the_model_on_these_images(checkpoint: Path) -> None:
    found = kappas(small(checkpoint=checkpoint).rows)
    built = build_model(NAME, model_kwargs=SMALL, checkpoint=checkpoint)
    sample = sample_images(built.transform(), limit=3)
    tokens: dict[str, torch.Tensor] = {}
    for index, block in enumerate(built.model.blocks):
        block.register_forward_hook(lambda _, __, output, index=index: tokens.update({f"blocks.{index}": output}))
    with torch.no_grad():
        built.model(sample.images)
    for block, output in tokens.items():
        values = singular_values(output.double())
        expected = (values[:, 0] / values[:, -1]).log().mean()
        assert found[block, "+mlp"] == pytest.approx(expected.item(), abs=1e-3)
    assert found.keys() == {(f"blocks.{i}", site) for i in range(2) for site in ("sa", "+sa", "mlp", "+mlp")}


def test_what_is_written(checkpoint: Path) -> None:
    result = small(checkpoint=checkpoint, untrained=True, spectrum=True)
    folder = Path(f"measure-{NAME}")
    assert {file.name for file in folder.iterdir()} == {"config.json", "probe.jsonl", "untrained.jsonl", "report.html"}
    assert read_rows(folder / "probe.jsonl") == result.rows
    assert read_rows(folder / "untrained.jsonl") == result.untrained
    config = read_json(folder / "config.json")
    assert config["model"] == NAME
    assert config["seed"] == 0
    assert len(config["images"]) == 3
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert result.page == folder / "report.html"
    for note in ("weights of trained.safetensors", "5 classes", "crops of two photographs", "untrained"):
        assert note in page
    assert any(row["name"].startswith("sigma.") for row in result.rows)


def test_blocks_of_a_single_token_have_a_table_and_no_page() -> None:
    def cait(blocks: str | int, console: Console) -> Measurement:
        return measure(
            "cait_xxs24_224", pretrained=False, model_kwargs={"img_size": 32, "depth": 1}, blocks=blocks, samples=2,
            console=console,
        )  # fmt: skip

    folder, console = Path("measure-cait_xxs24_224"), quiet()
    assert cait("*", quiet()).page == folder / "report.html"
    result = cait(-1, console)
    assert result.page is None
    assert "No page: these blocks work on a single token" in console.file.getvalue()
    assert console.file.getvalue().count("No page") == 1
    assert {file.name for file in folder.iterdir()} == {"config.json", "probe.jsonl"}
    assert read_rows(folder / "probe.jsonl") == result.rows


def test_without_altair_the_rows_are_there_and_the_page_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    console = quiet()
    assert small(console=console).page is None
    assert f"`wellcond report measure-{NAME}` draws it" in console.file.getvalue()
    assert {file.name for file in Path(f"measure-{NAME}").iterdir()} == {"config.json", "probe.jsonl"}
    monkeypatch.delitem(sys.modules, "altair")
    assert report_runs([f"measure-{NAME}"]).name == "report.html"


def test_the_untrained_twin_has_the_same_surgery_and_its_own_weights(tmp_path: Path) -> None:
    trained = gray(timm.create_model(NAME, num_classes=5, **SMALL), "dct", epsilon=0.5)
    save(trained, tmp_path / "grayed.safetensors")
    result = small(checkpoint=tmp_path / "grayed.safetensors", untrained=True, sites=["tokens", "+sa"], seed=3)
    mine, twin = kappas(result.rows), kappas(result.untrained)
    tokens = next(place for place in mine if place[1] == "tokens")
    assert mine[tokens] == twin[tokens]  # grayed alike: no weight has had a part in it
    assert mine[tokens] != kappas(small(sites=["tokens"], output="plain").rows)[tokens]
    assert mine["blocks.1", "+sa"] != twin["blocks.1", "+sa"]
    start = {**SMALL, "num_classes": 5}
    again = small(model_kwargs=start, gray="dct", epsilon=0.5, sites=["tokens", "+sa"], seed=3, output="again")
    assert kappas(again.rows) == twin  # the start that this seed gives


def test_an_untrained_model_says_so() -> None:
    state = torch.get_rng_state()
    first = small()
    assert torch.equal(torch.get_rng_state(), state)
    assert "random weights, never trained" in first.page.read_text(encoding="utf-8")
    assert first.untrained is None
    assert small().rows == first.rows
    assert small(seed=1).rows != first.rows
    with pytest.raises(ValueError, match="already has random weights"):
        small(untrained=True)


def test_another_attention_is_named_everywhere(tmp_path: Path) -> None:
    model = timm.create_model(NAME, num_classes=5, **SMALL)
    replace_attention(model, "skyformer", num_landmarks=8)
    save(model, tmp_path / "sky.safetensors")
    result = small(checkpoint=tmp_path / "sky.safetensors", untrained=True)
    said = "the attention is skyformer (num_landmarks=8) in 2 blocks"
    for text in (result.notes[0], result.page.read_text(), (result.page.parent / "config.json").read_text()):
        assert said in text
    plain = small(checkpoint=tmp_path / "sky.safetensors", output="again").rows
    assert kappas(plain) == kappas(result.rows)


def test_graying_for_the_measurement_alone(checkpoint: Path, tmp_path: Path) -> None:
    result = small(checkpoint=checkpoint, gray="dct", epsilon=0.5, sites=["tokens"])
    assert any("grayed for this measurement: dct, epsilon 0.5; it was trained without" in note for note in result.notes)
    plain = small(checkpoint=checkpoint, sites=["tokens"])
    assert kappas(result.rows) != kappas(plain.rows)
    model = gray(timm.create_model(NAME, num_classes=5, **SMALL), "dct", epsilon=0.5)
    save(model, tmp_path / "grayed.safetensors")
    assert graying_of(model) is not None
    other = small(checkpoint=tmp_path / "grayed.safetensors", gray="svd", sites=["tokens"])
    assert any("it was trained with dct, epsilon 0.5" in note for note in other.notes)


def test_a_model_without_all_the_usual_sites() -> None:
    parallel = {**SMALL, "block_fn": ParallelScalingBlock}  # one add for both branches
    result = small(model_kwargs=parallel)
    assert {site for _, site in kappas(result.rows)} == {"sa", "mlp", "+mlp"}
    assert "ParallelScalingBlock" in read_json(result.page.parent / "config.json")["model_kwargs"]["block_fn"]
    with pytest.raises(ValueError, match=r"\+sa"):
        small(model_kwargs=parallel, sites="+sa")


def test_files_of_the_user(tmp_path: Path) -> None:
    photograph = Image.fromarray(load_sample_image("flower.jpg"))
    folder = tmp_path / "photos"
    for index in range(4):
        (folder / str(index % 2)).mkdir(parents=True, exist_ok=True)
        photograph.crop((index * 50, 0, index * 50 + 200, 200)).save(folder / str(index % 2) / f"{index}.jpg")
    whole = (folder / "0" / "0.jpg").read_bytes()
    (folder / "0" / "broken.jpg").write_bytes(whole[: len(whole) // 2])
    result = small(data_dir=folder, samples=10)
    assert all(row["count"] == 4 for row in result.rows if row["name"] == "log_kappa")
    assert any(note.startswith("4 images of 64 × 64 pixels: of 5 in photos") for note in result.notes)
    page = result.page.read_text(encoding="utf-8")
    assert "1 files could not be read and were left out: 0/broken.jpg" in page
    assert str(tmp_path) not in page


def test_nan_weights_are_shown_as_such(tmp_path: Path) -> None:
    model = timm.create_model(NAME, num_classes=5, **SMALL)
    nn.init.constant_(model.blocks[1].mlp.fc2.bias, math.nan)
    save_file(model.state_dict(), tmp_path / "nan.safetensors")
    console = quiet()
    result = small(checkpoint=tmp_path / "nan.safetensors", console=console)
    found = kappas(result.rows)
    assert math.isnan(found["blocks.1", "mlp"])
    assert math.isfinite(found["blocks.1", "sa"])
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "!non_finite" in text
    assert "2 non_finite" in text
    assert result.page.exists()


# ---- what is refused, before anything is measured


def test_folders_of_others_are_left_alone(tmp_path: Path) -> None:
    for name in ("probe.jsonl", "report.html", "config.json"):
        folder = tmp_path / f"run-{name}"
        folder.mkdir()
        (folder / name).write_text("{}")
        with pytest.raises(ValueError, match=rf"holds {name} of something else"):
            small(output=folder)
        assert (folder / name).read_text() == "{}"
        assert len(list(folder.iterdir())) == 1
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="is a file"):
        small(output=tmp_path / "file")


def test_an_output_that_cannot_be_written_is_named_before_a_model_is_built(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"nothing can be written to .*choose another output"):
        measure("no such model", output=tmp_path / "file" / "out", console=quiet())
    small(output="ours", samples=1)
    (tmp_path / "ours" / "report.html").unlink()
    (tmp_path / "ours" / "report.html").mkdir()
    with pytest.raises(ValueError, match=r"report\.html is a folder"):
        small(output="ours")


def test_the_table_comes_before_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("wellcond.records.rows.write_json", full)
    console = quiet()
    with pytest.raises(ValueError, match=r"can no longer be written to \(No space left on device\)"):
        small(console=console)
    assert "blocks.1" in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


def test_our_own_folder_is_written_anew(checkpoint: Path) -> None:
    small(checkpoint=checkpoint, untrained=True)
    result = small(samples=2)
    folder = result.page.parent
    assert read_rows(folder / "probe.jsonl") == result.rows  # not appended
    assert not (folder / "untrained.jsonl").exists()  # it would belong to another measurement
    (folder / "my notes.txt").touch()
    small(samples=1)
    assert (folder / "my notes.txt").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "gpu"}, "no device 'gpu'"),
        ({"device": "cuda:99"}, "no device 'cuda:99'"),
        ({"data_dir": "nowhere"}, "there is no folder nowhere"),
        ({"sites": "sb"}, "there is no site 'sb'"),
        ({"exact": "float46"}, "not 'float46'; did you mean float64"),
        ({"blocks": "layer.1"}, "called 'layer.1'"),
        ({"gray": "fft"}, "fft"),
        ({"gray": "dct", "epsilon": 7}, "epsilon"),
        ({"epsilon": 0.5}, "epsilon is the exponent of graying, and nothing is grayed"),
        ({"checkpoint": "nowhere.pt"}, "^there is no file nowhere.pt$"),
        ({"samples": 0}, "max_samples"),
    ],
)
def test_mistakes_leave_nothing_behind(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)
    assert list(tmp_path.iterdir()) == []


def test_a_model_without_known_blocks() -> None:
    with pytest.raises(ValueError, match="ResNet has no blocks that wellcond knows"):
        measure("resnet10t", samples=1, console=quiet())


def test_weights_that_fit_in_part(tmp_path: Path) -> None:
    save(timm.create_model(NAME, num_classes=5, **{**SMALL, "depth": 3}), tmp_path / "deep.safetensors")
    settings = {**SMALL, "num_classes": 5}
    with pytest.raises(ValueError, match=r"does not fit.*--no-strict"):
        small(model_kwargs=settings, checkpoint=tmp_path / "deep.safetensors")
    result = small(model_kwargs=settings, checkpoint=tmp_path / "deep.safetensors", strict=False)
    assert "in it, but not in the model, and left out" in result.notes[0]


# ---- the page, made again


@pytest.mark.parametrize("untrained", [True, False])
def test_the_report_of_a_measurement_is_its_page(checkpoint: Path, untrained: bool) -> None:
    result = small(checkpoint=checkpoint, untrained=untrained) if untrained else small()

    def content() -> str:
        return re.sub(r"<footer>.*?</footer>", "", result.page.read_text(encoding="utf-8"))

    first = content()
    assert report_runs([result.page.parent]) == result.page
    assert content() == first


# ---- the table


@pytest.mark.parametrize("width", [120, 80, 46, 30])
def test_a_narrow_terminal_loses_no_digit(checkpoint: Path, width: int) -> None:
    rows = small(checkpoint=checkpoint).rows
    console = Console(file=io.StringIO(), width=width)
    tables = kappa_tables(console, rows, rows)
    for table in tables:
        console.print(table)
    text: str = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert (len(tables) > 1) is (width < 80)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for (block, _), value in kappas(rows).items():
        assert any(block in line and f"{value:.2f} (" in line for line in text.splitlines())
    heads = [word for line in text.splitlines() if "block" in line and "┃" in line for word in re.split(r"[ ┃]+", line)]
    assert [word for word in heads if word not in ("", "block")] == ["sa", "+sa", "mlp", "+mlp"]


def test_the_narrowest_terminal_breaks_lines(checkpoint: Path) -> None:
    rows = small(checkpoint=checkpoint).rows
    console = Console(file=io.StringIO(), width=14)
    console.print(*kappa_tables(console, rows))
    text: str = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "…" not in text
    assert text.count("┡") == 4


def test_marks_of_means() -> None:
    base = {"run": "", "step": 0, "index": 0, "block": "b", "count": 4, "dtype": "float32"}
    capped = {**base, "site": "sa", "name": "log_kappa", "value": 15.94, "status": "ceiling"}
    hidden = [
        {**base, "site": "mlp", "name": "log_kappa", "value": 9.0, "status": "non_finite"},
        {**base, "site": "mlp", "name": "capped", "value": 1.0, "status": "non_finite"},
    ]
    rows = [row | {"index": i, "block": f"b{i}"} for i in range(2) for row in (capped, *hidden)]
    console = quiet()
    console.print(kappa_table(rows), *legend(console, rows))
    text: str = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    mean = next(line for line in text.splitlines() if "mean" in line)
    assert ("≥15.94" in mean, "!≥9.00" in mean) == (True, True)
    assert ("≥ some samples" in text, "! some samples" in text) == (True, True)


@pytest.mark.parametrize(("color", "terminal"), [(True, True), (False, True), (True, False)])
def test_colours_only_where_they_are_wanted(
    checkpoint: Path, color: bool, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not color:
        monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    rows = small(checkpoint=checkpoint).rows
    console = Console(file=io.StringIO(), width=100, force_terminal=terminal)
    console.print(kappa_table(rows, rows), *legend(console, rows, rows))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert ("\x1b[38;" in text) is (color and terminal)
    assert ("\x1b" in text) is terminal
    plain = Console(file=io.StringIO(), width=100)
    plain.print(kappa_table(rows, rows))
    for (block, site), value in kappas(rows).items():
        line = next(line for line in plain.file.getvalue().splitlines() if block in line)  # pyright: ignore
        assert f"{value:.2f} ({value:.2f})" in line, site


# ---- the command


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def wellcond(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["wellcond", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


SETTINGS = ["--model-kwargs", *(f"{key}={value}" for key, value in SMALL.items())]


def test_the_command(wellcond: Run, checkpoint: Path, tmp_path: Path) -> None:
    code, out, err = wellcond(
        "measure", NAME, *SETTINGS, "--checkpoint", str(checkpoint), "--untrained", "--samples", "2", "--blocks", "1",
        "--sites", "+sa, mlp", "--spectrum", "--output", "here", "--seed", "7", "--device", "cpu",
    )  # fmt: skip
    assert (code, err) == (0, "")
    rows = read_rows("here/probe.jsonl")
    assert kappas(rows).keys() == {("blocks.1", "+sa"), ("blocks.1", "mlp")}
    assert all(row["count"] == 2 for row in rows if row["name"] == "log_kappa")
    assert any(row["name"] == "sigma.0" for row in rows)
    assert f"{kappas(rows)['blocks.1', '+sa']:.2f}" in out
    assert "random weights" in out
    assert "here/report.html" in out
    config = json.loads(Path("here/config.json").read_text())
    assert (config["seed"], config["model_kwargs"]) == (7, SMALL)
    assert str(tmp_path) not in Path("here/config.json").read_text()


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (["vit_tny_patch16_224"], "did you mean vit_tiny_patch16_224"),
        ([NAME, "--model-kwargs", "depth"], "'depth' is not KEY=VALUE"),
        ([NAME, "--model-kwargs", "depht=2"], "did you mean depth"),
        ([NAME, "--samples", "0"], "--samples"),
        ([NAME, "--epsilon", "0.5"], "nothing is grayed: add --gray svd or --gray dct"),
        ([NAME, *SETTINGS, "--gray", "dct", "--epsilon", "2"], "epsilon"),
        ([NAME, *SETTINGS, "--gray", "dtc"], "dtc"),
        ([NAME, *SETTINGS, "--sites", "foo"], "foo"),
        ([NAME, *SETTINGS, "--blocks", "99"], "99"),
        ([NAME, "--exact", "foo"], "exact must be one of auto, float32, float64"),
        ([NAME, "--device", "foo"], "there is no device 'foo' here"),
        ([NAME, *SETTINGS, "--data-dir", "nowhere"], "nowhere"),
        (["mine.safetensors"], "wellcond measure MODEL --checkpoint mine.safetensors"),
        ([NAME, "--checkpoint", "nowhere.pt"], "there is no file nowhere.pt"),
    ],
)
def test_mistakes_at_the_command_line_are_wrong_usage(wellcond: Run, wrong: list[str], words: str) -> None:
    code, out, err = wellcond("measure", *wrong)
    assert (code, out.count("log κ")) == (2, 0)
    assert words in " ".join(err.replace("│", " ").split())
    assert not list(Path().glob("measure-*/*"))


def test_a_run_is_measured_as_its_last_state_has_it(tmp_path: Path) -> None:
    """Digits have one channel and ten classes, which the configuration does not name."""
    config = recipe("digits", scale="smoke", epochs=1, gray="dct", remove_skips=["mlp"], batch_size=512)
    train(config, tmp_path / "run", device="cpu", quiet=True)
    found = measure(
        str(tmp_path / "run"), samples=2, output=tmp_path / "page", device="cpu", untrained=True, console=quiet()
    )
    assert found.untrained
    assert found.untrained != found.rows
    assert "10 classes, as its head has them, pictures of 1 channel, as its first layer takes them" in found.notes[0]
    assert "grayed as when it was saved: dct, epsilon 0.95, the skip mlp is removed in 4 blocks" in found.notes[0]
    state = sorted((tmp_path / "run" / "checkpoints").glob("*/model.safetensors"))[-1]
    built = build_model(NAME, model_kwargs={"in_chans": 1, "num_classes": 10, **config.model_kwargs})
    load(built.model, state)
    with Probe(built.model, sites="+sa", max_samples=2) as probe, torch.no_grad():
        built.model(images_for(built, None, 2, 0).images)
    expected, kappa = (
        {row["block"]: row["value"] for row in rows if (row["site"], row["name"]) == ("+sa", "log_kappa")}
        for rows in (probe.rows(), found.rows)
    )
    assert len(expected) == 4
    assert kappa == pytest.approx(expected, abs=1e-3)


def test_a_convmixer_of_another_size_is_measured_at_the_size_of_its_images(tmp_path: Path) -> None:
    config = recipe("convmixer", scale="smoke", steps=2, warmup_steps=1)
    train(config, tmp_path / "run", device="cpu", quiet=True)
    found = measure(str(tmp_path / "run"), samples=2, output=tmp_path / "page", device="cpu", console=quiet())
    assert "10 classes, as its head has them, pictures of 1 channel" in found.notes[0]
    assert any(f"{config.image_size} × {config.image_size} pixels" in note for note in found.notes)
    assert [row["site"] for row in found.rows if row["name"] == "log_kappa"]


def test_of_a_masked_autoencoders_run_the_encoder_is_measured(tmp_path: Path) -> None:
    config = recipe("mae_base", scale="smoke", steps=2, warmup_steps=1, gray="dct")
    train(config, tmp_path / "run", device="cpu", quiet=True)
    found = measure(str(tmp_path / "run"), samples=2, output=tmp_path / "page", device="cpu", console=quiet())
    assert "no head, as it has none" in found.notes[0]
    assert "grayed as when it was saved: dct, epsilon 0.95" in found.notes[0]
    assert "random" not in found.notes[0]
    assert {row["block"] for row in found.rows if row["name"] == "log_kappa"} == {"blocks.0", "blocks.1"}


def measured_run(output: Path, name: str, **options: Any) -> tuple[list[str], dict[tuple[str, str], float]]:
    found = measure(name, samples=2, output=output, device="cpu", console=quiet(), **options)
    return found.notes, kappas(found.rows)


def test_the_newest_state_of_a_run_is_measured_and_named(tmp_path: Path) -> None:
    """Of its sharded states only the best and the last have the weights in a file, here only an older one."""
    config = recipe("digits", scale="smoke", steps=3, warmup_steps=1, batch_size=512, ema_decay=0.5)
    config = config.changed({"save_format": "sharded", "save_every": 1, "keep": 9})
    run = tmp_path / "run"
    train(config, run, device="cpu", quiet=True)
    states = run / "checkpoints"
    export(states / "step-00000001", states / "step-00000001/model.safetensors")
    export(states / "step-00000002", tmp_path / "2.safetensors")
    shutil.rmtree(states / "step-00000003")
    for ema, file in ((False, "2.safetensors"), (True, "ema-2.safetensors")):
        notes, found = measured_run(tmp_path / f"page-{ema}", str(run), ema=ema)
        assert "The weights are those after step 2, of the run's newest state." in notes
        assert found == measured_run(tmp_path / f"again-{ema}", str(run), checkpoint=tmp_path / file)[1]


def test_an_average_that_a_run_has_not_is_not_measured(tmp_path: Path) -> None:
    train(recipe("digits", scale="smoke", epochs=1, batch_size=512), tmp_path / "run", device="cpu", quiet=True)
    with pytest.raises(ValueError, match="keeps no average of its weights"):
        measure(str(tmp_path / "run"), ema=True)


def test_of_a_linear_probes_run_the_features_are_measured(tmp_path: Path) -> None:
    train(recipe("mae_base", scale="smoke", steps=2, warmup_steps=1), tmp_path / "mae", device="cpu", quiet=True)
    start = tmp_path / "mae/checkpoints/step-00000002/model.safetensors"
    config = recipe("mae_base_probe", scale="smoke", steps=2, warmup_steps=1, checkpoint=str(start))
    train(config, tmp_path / "run", device="cpu", quiet=True)
    notes, found = measured_run(tmp_path / "page", str(tmp_path / "run"))
    assert "no head, as it has none" in notes[0]
    assert found == measured_run(tmp_path / "other", str(tmp_path / "mae"))[1]  # they are frozen


def test_a_run_that_cannot_be_measured_says_why(tmp_path: Path) -> None:
    about = {"what": "wellcond train", "version": 1, "config": {"model": NAME, "model_kwargs": {}}}
    write_json(tmp_path / "config.json", about)
    with pytest.raises(ValueError, match="is a run without saved weights"):
        measure(str(tmp_path))
    for other in ({"model": "lra_text", "task": "sequence"}, {"task": "from another package"}):
        write_json(tmp_path / "config.json", about | {"config": about["config"] | other})
        with pytest.raises(ValueError, match=r"is a run whose model reads no pictures.*wellcond report"):
            measure(str(tmp_path))


def test_blocks_from_the_end(wellcond: Run) -> None:
    settings = ["--model-kwargs", ",".join(SETTINGS[1:])]  # as wellcond train has them
    code, _, err = wellcond("measure", NAME, *settings, "--samples", "1", "--blocks", "-1", "--device", "cpu")
    assert (code, err) == (0, "")
    assert {block for block, _ in kappas(read_rows(f"measure-{NAME}/probe.jsonl"))} == {"blocks.1"}


# ---- weights that mean something


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names whose weights were looked for; there are none."""
    names: list[str] = []

    def find(name: str) -> Pretrained:
        names.append(name)
        return Pretrained(False, "the hub is asleep")

    monkeypatch.setattr("wellcond.measure.measure.find_pretrained", find)
    return names


@pytest.mark.parametrize(
    ("options", "asked", "why"),
    [
        ({"model_kwargs": {"img_size": 32}}, [NAME], "the hub is asleep"),
        ({"model_kwargs": {"img_size": 32}, "pretrained": False}, [], "as requested"),
        ({}, [], "pretrained ones fit only the unchanged model, and you gave depth, embed_dim, num_heads"),
    ],
)
def test_random_weights_are_told_above_everything(
    options: dict[str, Any], asked: list[str], why: str, looked: list[str]
) -> None:
    console = quiet()
    result = small(**{"samples": 2, "blocks": 0, "console": console, **options})
    assert looked == asked
    text: str = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    said = f"Random weights ({why}): these numbers describe the model before training"
    assert text.index(said) < text.index("log κ (natural) of")
    page = result.page.read_text(encoding="utf-8")
    assert page.index(said) < page.index("mean log κ at sa")


def test_weights_that_can_be_had_are_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    name, settings = "test_vit", {"img_size": 64}
    torch.manual_seed(5)
    weights = timm.create_model(name, **settings).state_dict()
    create = timm.create_model

    def pretrained_too(wanted: str, pretrained: bool = False, **given: Any) -> nn.Module:
        model = create(wanted, **given)
        if pretrained:
            model.load_state_dict(weights)
        return model

    for place in ("wellcond.measure.measure", "wellcond.models.build"):
        monkeypatch.setattr(f"{place}.find_pretrained", lambda name: Pretrained(True, "from huggingface.co, 2 MB"))
    monkeypatch.setattr(timm, "create_model", pretrained_too)
    console = quiet()
    result = measure(name, model_kwargs=settings, samples=2, untrained=True, console=console)
    text: str = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "Using the pretrained weights of test_vit, from huggingface.co, 2 MB (--no-pretrained" in text
    assert "Random weights" not in text
    save_file(weights, tmp_path / "same.safetensors")
    again = measure(name, model_kwargs=settings, samples=2, checkpoint=tmp_path / "same.safetensors", console=quiet())
    assert kappas(result.rows) == kappas(again.rows)
    assert kappas(result.rows) != kappas(result.untrained or [])
    plain = measure(name, model_kwargs=settings, samples=2, pretrained=False, console=quiet())
    assert kappas(plain.rows) == kappas(result.untrained or [])


def test_weights_that_do_not_come_after_all_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wellcond.measure.measure.find_pretrained", lambda _: Pretrained(True, "from the hub"))
    monkeypatch.setattr("wellcond.models.build.find_pretrained", lambda _: Pretrained(False, "it broke off"))
    console = quiet()
    small(model_kwargs={"img_size": 32}, samples=1, blocks=0, console=console)
    text: str = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    assert "Random weights (timm cannot build" in text
    assert "it broke off" in text
    with pytest.raises(ValueError, match="it broke off"):
        small(model_kwargs={"img_size": 32}, pretrained=True)


# ---- numbers, not ceilings


def test_beyond_the_ceiling_of_float32_it_looks_in_float64(checkpoint: Path) -> None:
    model = timm.create_model(NAME, num_classes=5, **SMALL)
    with torch.no_grad():
        model.blocks[0].attn.proj.weight[16:] *= 1e-5  # of 17 directions of the tokens one is all but lost
        model.blocks[0].attn.proj.bias.zero_()
    save(model, checkpoint)
    blind = kappas(small(checkpoint=checkpoint, exact="float32").rows)
    result = small(checkpoint=checkpoint)
    seen = kappas(result.rows)
    assert blind["blocks.0", "sa"] == pytest.approx(15.94, abs=0.01)
    assert {row["dtype"] for row in result.rows if row["site"] == "sa"} == {"float64"}
    assert {row["dtype"] for row in result.rows if row["site"] == "+mlp"} == {"float32"}
    assert seen["blocks.0", "+mlp"] == blind["blocks.0", "+mlp"]
    assert [row["name"] for row in result.rows] == [row["name"] for row in small(checkpoint=checkpoint).rows]
    built = build_model(NAME, model_kwargs=SMALL, checkpoint=checkpoint)
    images = sample_images(built.transform(), limit=3).images.double()
    block, double = built.model.double().blocks[0], []
    block.attn.register_forward_hook(lambda _, __, output: double.append(output))
    with torch.no_grad():
        built.model(images)
    values = torch.linalg.svdvals(double[0])
    assert seen["blocks.0", "sa"] == pytest.approx((values[:, 0] / values[:, -1]).log().mean().item(), abs=1e-3)
    assert any("sa: in float64" in note for note in result.notes)
    whole = small(checkpoint=checkpoint, exact="float64")
    assert {row["dtype"] for row in whole.rows} == {"float64"}


def test_batch_norms_that_never_saw_data_do_not_hide_the_model() -> None:
    register_model(small_convmixer)
    result = measure("small_convmixer", samples=2, console=quiet())
    assert any("batch norms use the statistics of these images" in note for note in result.notes)
    sample = sample_images(build_model("small_convmixer").transform(), limit=2)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = small_convmixer()
    outputs: list[torch.Tensor] = []
    model.blocks[1].register_forward_hook(lambda _, __, output: outputs.append(output.flatten(2).mT))
    with torch.no_grad():
        model.train()(sample.images)  # batch norms take the statistics of the batch, as in training
    values = singular_values(outputs[0].double())
    expected = (values[:, 0] / values[:, -1]).log().mean().item()
    assert kappas(result.rows)["blocks.1", "mlp"] == pytest.approx(expected, abs=0.02)
    blind = Probe(small_convmixer().eval(), samples=sample.images)
    blind.measure(0)
    assert kappas(blind.rows())["blocks.1", "mlp"] > expected + 1


def small_convmixer(pretrained: bool = False, **settings: Any) -> Any:
    model: Any = ConvMixer(dim=16, depth=6, kernel_size=5, patch_size=8, num_classes=3)
    model.pretrained_cfg = {"input_size": (3, 64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    return model


# ---- where other models lie


def test_other_models_stand_beside_the_numbers(checkpoint: Path) -> None:
    console = quiet()
    result = small(checkpoint=checkpoint, untrained=True, console=console)
    like = reference().nearest(17, 48)
    assert like is not None
    text: str = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    for who, bands in (("trained", like.trained), ("untrained", like.untrained)):
        line = next(line for line in text.splitlines() if line.startswith(f"│{who} "))
        assert [str(bands[site]) in line for site in ("sa", "+sa", "mlp", "+mlp")] == [True] * 4
    assert f"{like.about}; here 17 of 48" in text
    assert like.about in result.page.read_text(encoding="utf-8")
    alone = small(checkpoint=checkpoint)
    page = alone.page.read_text(encoding="utf-8")
    assert f"trained {like.them} {like.trained['+sa']}" in page
    assert f"untrained {like.them}" not in page


def test_stages_of_several_shapes_are_compared_with_none() -> None:
    settings: dict[str, Any] = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 16}
    settings |= {"depths": (1, 1), "num_heads": (2, 2)}
    console = quiet()
    measure("swin_tiny_patch4_window7_224", model_kwargs=settings, samples=1, console=console)
    assert "in our evidence" not in console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
