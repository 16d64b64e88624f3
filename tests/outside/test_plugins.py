"""A package that is installed, and that nobody imports: the command line finds what it registers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import wellcond
from wellcond import cli
from wellcond.plugins import find_plugins, load_plugins

SOURCE = Path(wellcond.__file__).parents[1]
MODULE = """
import os
from pathlib import Path

import timm
import torch
from timm.models import register_model
from torch import nn
from torch.nn import functional as F

import wellcond
from wellcond.claims import Measured
from wellcond.data import DataSet, Images
from wellcond.models import BlockKind
from wellcond.verdicts import at_least


@wellcond.register_attention("theirs")
def theirs(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, *, tau=10.0):
    query, key = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, scale=tau)


@wellcond.register_source("stripes", takes="COUNT")
def stripes(rest, settings):
    def part(count):
        labels = torch.arange(count) % 2
        pixels = torch.randint(256, (count, 3, 8, 8), generator=torch.Generator().manual_seed(count))
        return Images(pixels.to(torch.uint8), labels, mean=torch.zeros(3), std=torch.ones(3))

    return DataSet(name="stripes", classes=["a", "b"], train=part(int(rest)), val=part(16), skipped=[])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, x):
        return x + self.mix(x)


class Net(nn.Module):
    num_classes = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer(), Layer()])

    def forward(self, images):
        x = images[:, :, :16, :8].flatten(1, 2)
        for layer in self.layers:
            x = layer(x)
        return x


@register_model
def their_net(pretrained=False, **settings):
    net = Net()
    net.pretrained_cfg = {"input_size": (3, 16, 16), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0}
    return net


wellcond.register_family(Net, blocks={Layer: BlockKind(taps={"mlp": "mix:output", "+mlp": ":output"})})
wellcond.register_claim(
    Measured(
        id="their-claim", claim="a", test="b", holds_if="c",
        measure=lambda options: {"room": [0.5, 0.6, 0.4]},
        judge=lambda record: [at_least("room", record["room"], 0.0)],
    )
)
Path(os.environ["SEEN"]).touch()
"""


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder for sys.path with two installed distributions: one that works, and one whose import fails."""
    site = tmp_path / "site"
    for name, text in (("their_plugin", MODULE), ("broken_plugin", "import no_such_package_at_all\n")):
        about = site / f"{name}-1.0.dist-info"
        about.mkdir(parents=True)
        (site / f"{name}.py").write_text(text, encoding="utf-8")
        dashed = name.replace("_", "-")
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dashed}\nVersion: 1.0\n", encoding="utf-8")
        (about / "entry_points.txt").write_text(f"[wellcond.plugins]\n{dashed} = {name}\n", encoding="utf-8")
    return site


@pytest.fixture
def run(installed: Path, tmp_path: Path):
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(filter(None, [str(SOURCE), str(installed), os.environ.get("PYTHONPATH")]))
        variables = {**os.environ, "PYTHONPATH": path, "SEEN": str(tmp_path / "seen"), "NO_COLOR": "1"}
        return subprocess.run(
            [sys.executable, "-m", "wellcond", *arguments],
            cwd=tmp_path, env=variables, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return command


def test_attention_and_source_are_known_to_train_and_a_broken_plug_in_does_not_stop_it(run, tmp_path):
    model = "--model-kwargs=img_size=8,patch_size=4,depth=1,embed_dim=16,num_heads=2"
    settings = ["attention=theirs", "attention_kwargs=tau=5.0", "steps=2", "batch_size=8", "image_size=8"]
    done = run("train", "digits", "--data-dir", "stripes:32", model, "--set", *settings, "--output", "run")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "run" / "config.json").read_text())["config"]["attention"] == "theirs"
    warned = [line for line in done.stderr.splitlines() if line.startswith("warning:")]
    assert len(warned) == 1
    assert "broken-plugin (broken_plugin) is left out" in warned[0]
    assert "No module named 'no_such_package_at_all'" in warned[0]


def test_families_are_known_to_measure(run, tmp_path):
    done = run("measure", "their_net", "--samples", "2", "--output", "found")
    assert done.returncode == 0, done.stderr
    assert "layers.1" in done.stdout


def test_claims_are_known_to_reproduce(run, tmp_path):
    done = run("reproduce", "their-claim", "--scale", "lab")
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "evidence/their-claim/lab.json").read_text())["verdict"]["verdict"] == "holds"


def test_commands_that_take_no_names_import_none(installed, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(installed)
    monkeypatch.setenv("SEEN", str(tmp_path / "seen"))
    monkeypatch.setattr(sys, "argv", ["wellcond", "info", "--json"])
    with pytest.raises(SystemExit):
        cli.main()
    found = json.loads(capsys.readouterr().out)["plugins"]
    assert found == ["broken-plugin (broken_plugin)", "their-plugin (their_plugin)"]
    assert not (tmp_path / "seen").exists()


def test_without_any_there_is_nothing_to_load():
    assert find_plugins() == []
    assert load_plugins() == []
