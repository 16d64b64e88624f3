"""The callback for Hugging Face's Trainer in real trainings."""

import importlib
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs transformers")
pytest.importorskip("accelerate", reason="Hugging Face's Trainer needs accelerate")

from wellcond import Probe  # noqa: E402
from wellcond.probe.transformers import ProbeCallback  # noqa: E402
from wellcond.records import read_rows  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator is found")


def tiny(dropout=0.0):
    config = transformers.ViTConfig(
        image_size=16, patch_size=4, hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48,
        num_labels=3, hidden_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


class Images(torch.utils.data.Dataset):
    def __init__(self, count):
        self.images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "labels": index % 3}


def trainer_of(model, folder, *, count=24, **settings):
    args = transformers.TrainingArguments(
        output_dir=str(folder),
        **{
            "per_device_train_batch_size": 4,
            "num_train_epochs": 1,
            "use_cpu": True,
            "report_to": "none",
            "save_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **settings,
        },
    )
    return transformers.Trainer(model=model, args=args, train_dataset=Images(count), eval_dataset=Images(8))


def train(model, callback, folder, **settings):
    trainer = trainer_of(model, folder, **settings)
    trainer.add_callback(callback)
    trainer.train()
    return trainer


def hooks(model):
    kinds = ("_forward_hooks", "_forward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def steps_of(rows):
    return sorted({row["step"] for row in rows})


def test_steps_are_optimiser_steps_and_evaluation_is_not_measured(tmp_path):
    model, callback = tiny(), ProbeCallback(every=2)
    settings = {"gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    train(model, callback, tmp_path, count=32, **settings)
    rows = read_rows(tmp_path / "probe.jsonl")
    assert callback.path == tmp_path / "probe.jsonl"
    assert steps_of(rows) == [0, 2, 3]  # the last one, too
    assert {row["count"] for row in rows if row["name"] == "log_kappa"} == {4}  # one batch a step
    assert len(rows) == len({(r["step"], r["block"], r["site"], r["name"]) for r in rows})
    assert hooks(model) == 0


class Watcher(transformers.TrainerCallback):
    """Keeps the first batch that the model is called with."""

    batch = None

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        def keep(_module, _args, kwargs):
            self.batch = kwargs["pixel_values"] if self.batch is None else self.batch

        model.register_forward_pre_hook(keep, with_kwargs=True)


def test_the_first_rows_are_those_of_the_first_batch(tmp_path):
    model = tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    watcher = Watcher()
    trainer = trainer_of(model, tmp_path)
    trainer.add_callback(watcher)
    trainer.add_callback(ProbeCallback(every=100))
    trainer.train()
    model.load_state_dict(before)
    with Probe(model.train()) as truth:
        model(watcher.batch)
    rows = read_rows(tmp_path / "probe.jsonl")
    assert [row for row in rows if row["step"] == 0] == truth.rows()


def test_training_is_the_same_to_the_bit_with_and_without_it(tmp_path):
    weights = []
    for every in (1, 10**6):
        torch.manual_seed(1)
        model = tiny(dropout=0.1)
        train(model, ProbeCallback(every=every), tmp_path / str(every), seed=3)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


class Heard(transformers.TrainerCallback):
    def __init__(self):
        self.logs = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.logs.append(dict(logs))


@pytest.mark.parametrize("knows_the_trainer", [True, False])
def test_log_kappa_goes_into_the_logs(tmp_path, knows_the_trainer):
    trainer, heard = trainer_of(tiny(), tmp_path), Heard()
    callback = ProbeCallback(every=3, trainer=trainer if knows_the_trainer else None)
    trainer.add_callback(heard)
    trainer.add_callback(callback)
    trainer.train()
    rows = [row for row in read_rows(callback.path) if row["name"] == "log_kappa" and row["site"] == "+sa"]
    history = [entry for entry in trainer.state.log_history if "probe/plus_sa/mean_log_kappa" in entry]
    assert [entry["step"] for entry in history] == [1, 4, 6]  # the Trainer's count, once the step is done
    for entry in history:
        here = [row["value"] for row in rows if row["step"] == entry["step"] - 1]
        assert entry["probe/plus_sa/mean_log_kappa"] == pytest.approx(sum(here) / 2)
        assert entry["probe/plus_sa/worst_log_kappa"] == max(here)
    told = [logs for logs in heard.logs if "probe/plus_sa/mean_log_kappa" in logs]
    assert len(told) == (3 if knows_the_trainer else 0)  # what trackers get


def test_an_exception_leaves_no_hooks(tmp_path):
    model = tiny()

    class Failing(transformers.Trainer):
        def compute_loss(self, *args, **kwargs):
            super().compute_loss(*args, **kwargs)
            raise ArithmeticError("as if")

    plain = trainer_of(model, tmp_path)
    trainer = Failing(model=model, args=plain.args, train_dataset=Images(24), callbacks=[ProbeCallback(every=1)])
    with pytest.raises(ArithmeticError, match="as if"):
        trainer.train()
    assert hooks(model) == 0
    assert steps_of(read_rows(tmp_path / "probe.jsonl")) == [0]


def test_a_compiled_model_is_refused_without_the_trainer_and_measured_with_it(tmp_path, monkeypatch):
    for name in ("BACKEND", "MODE"):  # TrainingArguments of older versions set them for good
        monkeypatch.setenv(f"ACCELERATE_DYNAMO_{name}", "no" if name == "BACKEND" else "default")
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "count": 12}
    with pytest.raises(ValueError, match=r"torch\.compile and shows callbacks the inner one.*trainer=trainer"):
        train(tiny(), ProbeCallback(), tmp_path, **settings)
    trainer = trainer_of(tiny(), tmp_path, **settings)
    callback = ProbeCallback(every=2, trainer=trainer)
    trainer.add_callback(callback)
    trainer.train()
    assert steps_of(read_rows(tmp_path / "probe.jsonl")) == [0, 2]
    assert "compiled code skips hooks" in callback.probe.table()


def test_settings_are_the_probes(tmp_path):
    callback = ProbeCallback(every=4, path=tmp_path / "mine.jsonl", sites="in", blocks=1, run="a", max_samples=3)
    train(tiny(), callback, tmp_path / "out")
    rows = read_rows(tmp_path / "mine.jsonl")
    assert {(row["run"], row["site"], row["index"]) for row in rows} == {("a", "in", 1)}
    assert {row["count"] for row in rows} == {3}
    with pytest.raises(ValueError, match="no setting site; its settings are sites"):
        ProbeCallback(site="sa")


def test_without_transformers_the_import_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "wellcond.probe.transformers")
    with pytest.raises(ImportError, match=r"pip install 'wellcond\[hf\]'"):
        importlib.import_module("wellcond.probe.transformers")
