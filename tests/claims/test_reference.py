"""The reference that pages read is what the evidence says, of plain models alone."""

import json
from types import SimpleNamespace

import pytest

from wellcond.claims import ledger
from wellcond.claims.reference import ADVICE, reference

ENTRIES = {id_: SimpleNamespace(verdict="undecided", finding="Something.") for id_ in ADVICE.values()}
CONFIG = {
    "task": "classify", "remove_skips": [], "attention": "", "gray": "", "probe_exact": "float64",
    "model_kwargs": {"img_size": 32, "patch_size": 4},
}  # fmt: skip


def write(path, record):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record))


def run(evidence, name, *, recipe="vit_tiny", sa=(10.0, 12.0), scale="lab", **config):
    steps = {"sa": [[20.0, 21.0], [0.0, 0.0], list(sa)]}  # at the start, on the way, at the end
    measured = {"log_kappa": steps} if config.get("probe_exact") != "float32" else None
    ends = {"images": 100, "blocks": 2, "trained": {"sa": [5.0, 6.0]}, "untrained": {"sa": [15.9, 15.9]}}
    record = {"name": f"cifar100/{recipe}/{name}", "status": "finished", "config": {**CONFIG, **config}}
    record |= {"measured": measured, "log_kappa": {**ends, "capped": {"trained": 1, "untrained": 150}}}
    write(evidence / "runs" / scale / "cifar100" / recipe / name / "result.json", record)


def test_bands_are_those_of_all_blocks_of_plain_runs(tmp_path):
    for seed in range(10):
        run(tmp_path, f"both/seed-{seed}", sa=(10.0 + seed, 20.0 + seed))
    run(tmp_path, "no-sa/seed-0", remove_skips=["sa"], sa=(99.0, 99.0))
    run(tmp_path, "gray/seed-0", gray="dct", sa=(99.0, 99.0))
    run(tmp_path, "both/grid-0.1", sa=(99.0, 99.0))
    run(tmp_path, "both/seed-77", scale="smoke", sa=(99.0, 99.0))
    run(tmp_path, "both/seed-0", recipe="swin_small", sa=(99.0, 99.0))  # whose stages have several shapes
    (found,) = reference(tmp_path, ENTRIES)["models"]
    assert (found["model"], found["tokens"], found["width"], found["runs"]) == ("ViT-Tiny", 65, 192, 10)
    assert found["sets"] == ["CIFAR-100"]
    assert found["trained"]["sa"] == [pytest.approx(10.95), 19.5, pytest.approx(28.05)]  # of 10, 11, … 29
    assert found["untrained"]["sa"] == [20.0, 20.5, 21.0]


def test_float32_counts_where_it_sees_the_number(tmp_path):
    run(tmp_path, "both/seed-0", probe_exact="float32")
    (found,) = reference(tmp_path, ENTRIES)["models"]
    assert found["trained"]["sa"] == [5.05, 5.5, 5.95]
    assert found["untrained"] == {}  # at the ceiling


def test_other_shapes_are_other_models_and_the_largest_group_is_first(tmp_path):
    run(tmp_path, "a/seed-0", model_kwargs={"img_size": 224, "patch_size": 16})
    for seed in range(2):
        run(tmp_path, f"b/seed-{seed}", recipe="vit_small")
    found = [(one["model"], one["tokens"], one["width"], one["runs"]) for one in reference(tmp_path, ENTRIES)["models"]]
    assert found == [("ViT-Small", 65, 384, 2), ("ViT-Tiny", 197, 192, 1)]


def test_a_run_that_is_in_a_claims_record_too_counts_once(tmp_path):
    ends = {"images": 100, "blocks": 2, "trained": {"sa": [5.0, 6.0]}, "untrained": {"sa": [7.0, 8.0]}}
    runs = [
        {"run": f"cifar10/vit_tiny/both/seed-{seed}", "status": "finished",
         "log_kappa": {**ends, "capped": {"trained": 0, "untrained": 0}}}
        for seed in range(2)
    ]  # fmt: skip
    write(tmp_path / "asa-fig1b" / "lab-cifar10.json", {"data": "cifar10", "arms": {"both": {"runs": runs}}})
    (found,) = reference(tmp_path, ENTRIES)["models"]
    assert (found["runs"], found["sets"]) == (2, ["CIFAR-10"])
    run(tmp_path, "both/seed-0")
    place = "runs/lab/cifar100/vit_tiny/both/seed-0/result.json"
    record = json.loads((tmp_path / place).read_text()) | {"name": "cifar10/vit_tiny/both/seed-0"}
    write(tmp_path / place.replace("cifar100", "cifar10"), record)
    (found,) = reference(tmp_path, ENTRIES)["models"]
    assert (found["runs"], found["sets"]) == (3, ["CIFAR-10", "CIFAR-100"])


def test_the_ledger_writes_it_and_tells_an_old_one(tmp_path):
    evidence, page, packaged = tmp_path / "evidence", tmp_path / "claims.md", tmp_path / "reference.json"
    evidence.mkdir()
    ledger.run(evidence, page, packaged)
    assert json.loads(packaged.read_text())["models"] == []
    assert ledger.check(evidence, page, packaged) == ""
    run(evidence, "both/seed-0")
    assert "reference.json is not what" in ledger.check(evidence, page, packaged)
    assert ledger.check(evidence, page) == ""
