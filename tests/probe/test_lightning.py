"""The Lightning callback in real fits."""

import csv
import importlib
import sys

import pytest
import timm
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

lightning = pytest.importorskip("lightning.pytorch", reason="needs lightning")

from lightning.pytorch.loggers import CSVLogger  # noqa: E402

from wellcond import Probe  # noqa: E402
from wellcond.probe.lightning import ProbeCallback, called_module  # noqa: E402
from wellcond.records import read_rows  # noqa: E402

pytestmark = [
    # Advice on workers, log intervals and devices, none of which a test wants to follow
    pytest.mark.filterwarnings("ignore:The '\\w+' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
    pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated"),
]


def tiny(**kwargs):
    settings = {"img_size": 16, "patch_size": 4, "embed_dim": 24, "depth": 2, "num_heads": 2, "num_classes": 3}
    return timm.create_model("vit_tiny_patch16_224", **{**settings, **kwargs})


class Classifier(lightning.LightningModule):
    def __init__(self, model=None, fail_at=None):
        super().__init__()
        self.model = tiny() if model is None else model
        self.fail_at = fail_at

    def loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if batch_idx == self.fail_at:
            raise ArithmeticError("as if")
        return loss

    def validation_step(self, batch, batch_idx):
        self.loss(batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(count, size=4):
    images, labels = torch.randn(count * size, 3, 16, 16), torch.arange(count * size) % 3
    return DataLoader(TensorDataset(images, labels), batch_size=size)


def fit(module, callback, folder, *, count=6, more=(), **kwargs):
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = lightning.Trainer(
        accelerator="cpu",
        default_root_dir=folder,
        enable_model_summary=False,
        callbacks=[callback, *more],
        **{**settings, **kwargs},
    )
    trainer.fit(module, batches(count), batches(2))
    return trainer


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def steps_of(rows):
    return sorted({row["step"] for row in rows})


def test_steps_are_optimiser_steps_and_validation_is_not_measured(tmp_path):
    module, callback = Classifier(), ProbeCallback(every=2)
    fit(module, callback, tmp_path, count=8, accumulate_grad_batches=2, val_check_interval=2)
    rows = read_rows(tmp_path / "probe.jsonl")
    assert callback.path == tmp_path / "probe.jsonl"
    assert steps_of(rows) == [0, 2, 3]  # the last one, too
    assert {row["count"] for row in rows if row["name"] == "log_kappa"} == {4}  # one batch a step
    assert len(rows) == len({(r["step"], r["block"], r["site"], r["name"]) for r in rows})
    assert hooks(module) == 0


def test_the_first_rows_are_those_of_the_first_batch(tmp_path):
    module = Classifier()
    torch.manual_seed(1)
    images, _ = next(iter(batches(6)))
    with Probe(module.model.train()) as truth:
        module.model(images)
    torch.manual_seed(1)  # so that the images of the fit are these
    fit(module, ProbeCallback(every=100), tmp_path)
    rows = read_rows(tmp_path / "probe.jsonl")
    assert [row for row in rows if row["step"] == 0] == truth.rows()


def test_curves_are_of_the_same_samples_in_float32_while_training_is_in_bfloat16(tmp_path):
    module = Classifier()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.0)  # so that nothing else changes
    fit(module, ProbeCallback(every=2), tmp_path, precision="bf16-mixed")
    rows = read_rows(tmp_path / "probe.jsonl")
    numbers = [
        [(row["block"], row["site"], row["name"], row["value"]) for row in rows if row["step"] == step]
        for step in (0, 2, 4)
    ]
    assert numbers[0] == numbers[1] == numbers[2]
    assert {(row["dtype"], row["status"]) for row in rows} == {("float32", "ok")}


def test_as_often_as_time_allows(tmp_path):
    fit(Classifier(), ProbeCallback(every="auto"), tmp_path)
    assert steps_of(read_rows(tmp_path / "probe.jsonl"))[0] == 0  # when the next comes is up to the machine
    with pytest.raises(ValueError, match="every must be a whole number from 1 on"):
        ProbeCallback(every="now and then")


def test_training_is_the_same_to_the_bit_with_and_without_it(tmp_path):
    weights = []
    for number, every in enumerate((1, 10**6)):
        torch.manual_seed(1)
        module = Classifier(tiny(drop_path_rate=0.5, proj_drop_rate=0.1))
        fit(module, ProbeCallback(every=every), tmp_path / str(number))
        weights.append(module.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_log_kappa_goes_to_the_loggers_and_the_file_into_their_folder(tmp_path):
    logger = CSVLogger(tmp_path, name="run")
    callback = ProbeCallback(every=3)
    fit(Classifier(), callback, tmp_path, logger=logger, log_every_n_steps=1)
    assert callback.path.parent.samefile(logger.log_dir)
    rows = [row for row in read_rows(callback.path) if row["name"] == "log_kappa" and row["site"] == "+sa"]
    with open(callback.path.with_name("metrics.csv"), newline="") as file:
        logged = {int(line["step"]): line for line in csv.DictReader(file) if line.get("probe/plus_sa/mean_log_kappa")}
    assert sorted(logged) == [0, 3, 5]
    for step, line in logged.items():
        here = [row["value"] for row in rows if row["step"] == step]
        assert float(line["probe/plus_sa/mean_log_kappa"]) == pytest.approx(sum(here) / 2)
        assert float(line["probe/plus_sa/worst_log_kappa"]) == pytest.approx(max(here))


def test_an_exception_takes_the_hooks_away(tmp_path):
    module = Classifier(fail_at=2)
    with pytest.raises(ArithmeticError, match="as if"):
        fit(module, ProbeCallback(every=1), tmp_path)
    assert hooks(module) == 0
    assert steps_of(read_rows(tmp_path / "probe.jsonl")) == [0, 1, 2]


def test_settings_and_path_are_the_users(tmp_path):
    callback = ProbeCallback(every=4, path=tmp_path / "mine.jsonl", sites="in", blocks=1, run="a", max_samples=3)
    fit(Classifier(), callback, tmp_path)
    rows = read_rows(tmp_path / "mine.jsonl")
    assert {(row["run"], row["site"], row["block"]) for row in rows} == {("a", "in", "blocks.1")}
    assert {row["count"] for row in rows} == {3}
    with pytest.raises(ValueError, match="no setting site; its settings are sites"):
        ProbeCallback(site="sa")


class Inside(nn.Module):
    """Holds a model that somebody else calls."""

    def __init__(self):
        super().__init__()
        self.vit = tiny()


class CallsAPart(Classifier):
    def __init__(self):
        super().__init__(Inside())

    def loss(self, batch):
        images, labels = batch
        return F.cross_entropy(self.model.vit(images), labels)


def test_a_module_that_is_not_called_is_an_error_with_names_and_can_be_named(tmp_path):
    module = CallsAPart()
    with pytest.raises(RuntimeError, match=r"Inside was not called.*'model', 'model\.vit'"):
        fit(module, ProbeCallback(), tmp_path)
    assert hooks(module) == 0
    with pytest.raises(ValueError, match=r"no module 'vit'; those with blocks inside are 'model', 'model\.vit'"):
        fit(module, ProbeCallback(module="vit"), tmp_path)
    fit(module, ProbeCallback(module="model.vit"), tmp_path)
    assert steps_of(read_rows(tmp_path / "probe.jsonl")) == [0, 5]


def test_the_module_found_is_the_outermost_that_is_called():
    vit = tiny()
    assert called_module(Classifier(vit)) is vit
    sequence = nn.Sequential(nn.Identity(), vit)
    assert called_module(Classifier(sequence)) is sequence
    module = Classifier(vit)
    module.model = nn.ModuleDict({"body": vit, "head": nn.Linear(3, 3)})  # a dictionary is never called
    assert called_module(module) is vit
    module.teacher = tiny()  # two models: only the whole holds all blocks
    assert called_module(module) is module
    compiled = torch.compile(tiny())
    assert called_module(Classifier(compiled)) is compiled


def test_a_compiled_model_is_measured_underneath_and_a_compiled_training_step_is_refused(tmp_path):
    callback = ProbeCallback(every=2)
    fit(Classifier(torch.compile(tiny(), backend="eager")), callback, tmp_path, count=3)
    assert steps_of(read_rows(tmp_path / "probe.jsonl")) == [0, 2]
    assert "compiled code skips hooks" in callback.probe.table()
    with pytest.raises(ValueError, match="the whole LightningModule was compiled"):
        fit(torch.compile(Classifier(), backend="eager"), ProbeCallback(), tmp_path)


def test_without_lightning_the_import_says_how_to_install_it(monkeypatch):
    for name in ("lightning", "lightning.pytorch", "pytorch_lightning"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "wellcond.probe.lightning")
    with pytest.raises(ImportError, match=r"pip install 'wellcond\[lightning\]'"):
        importlib.import_module("wellcond.probe.lightning")


def test_a_training_whose_last_step_nobody_knows_is_measured_all_the_same(tmp_path):
    changing = lightning.callbacks.GradientAccumulationScheduler(scheduling={0: 1, 1: 2})
    fit(Classifier(), ProbeCallback(every=4), tmp_path, max_epochs=2, more=[changing])
    assert steps_of(read_rows(tmp_path / "probe.jsonl")) == [0, 4, 8]
