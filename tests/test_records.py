import json
import math
import os
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wellcond import records
from wellcond.records import (
    append_rows,
    check_writable,
    read_json,
    read_rows,
    row,
    write_json,
    write_record,
    write_text,
)

FIELDS = {
    "run": "a",
    "step": 10,
    "block": "blocks.3",
    "index": 3,
    "site": "+sa",
    "name": "log_kappa",
    "value": 4.25,
    "count": 64,
    "dtype": "float32",
    "status": "ok",
}
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)
TEXT = st.text() | st.builds(
    lambda count, mark: "\\" * count + mark, st.integers(0, 3), st.sampled_from([*records.MARKS])
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBERS | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def same(a, b) -> bool:
    """Equal, where NaN equals NaN and 1 does not equal True or 1.0."""
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def refuse_constant(name: str) -> None:
    pytest.fail(f"{name} is not JSON")


# --- rows ---


def test_row_has_the_fields_of_the_design_in_their_order():
    assert list(row(**FIELDS)) == list(FIELDS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"site": "attn"}, r"unknown site 'attn'; the sites are .*\+sa"),
        ({"status": "fine"}, "unknown status 'fine'; the statuses are ok, ceiling"),
        ({"value": math.nan}, "log_kappa of blocks.3 is nan, but its status is 'ok'"),
        ({"value": math.inf}, "is inf, but its status is 'ok'"),
        ({"extra": 1}, "a row has the fields run, step, .*extra"),
    ],
)
def test_row_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        row(**(FIELDS | change))


def test_row_refuses_a_missing_field():
    with pytest.raises(ValueError, match="a row has the fields run, step"):
        row(**{key: value for key, value in FIELDS.items() if key != "dtype"})


def test_row_takes_numpy_and_torch_numbers():
    assert type(row(**FIELDS | {"value": np.float32(2.5)})["value"]) is float
    assert row(**FIELDS | {"value": torch.tensor(2.5)})["value"] == 2.5


def test_row_keeps_a_nan_that_says_why():
    assert math.isnan(row(**FIELDS | {"value": math.nan, "status": "non_finite"})["value"])


# --- JSON lines ---


@given(batches=st.lists(st.lists(st.dictionaries(st.text(), JSON, max_size=4), max_size=3), max_size=3))
def test_rows_come_back_as_they_went(batches, tmp_path_factory):
    path = tmp_path_factory.mktemp("rows") / "deep" / "rows.jsonl"
    append_rows(path, [])
    for batch in batches:
        append_rows(path, batch)
    assert same(read_rows(path), [row for batch in batches for row in batch])
    for line in path.read_text(encoding="utf-8").split("\n")[:-1]:
        json.loads(line, parse_constant=refuse_constant)


@pytest.mark.parametrize(("value", "mark"), [(math.nan, "NaN"), (math.inf, "Infinity"), (-math.inf, "-Infinity")])
def test_non_finite_values_are_strings_on_disk_and_numbers_again(tmp_path, value, mark):
    append_rows(tmp_path / "a.jsonl", [row(**FIELDS | {"value": value, "status": "non_finite"})])
    assert json.loads((tmp_path / "a.jsonl").read_text())["value"] == mark
    assert same(read_rows(tmp_path / "a.jsonl")[0]["value"], value)


def test_every_way_of_tearing_the_last_line(tmp_path):
    """Whatever byte a crash stopped at, the whole rows are read, and the next append goes on cleanly after them."""
    path = tmp_path / "rows.jsonl"
    whole = [{"name": "κ", "value": 1.5}, {"name": "σ", "value": math.inf}]
    append_rows(path, whole)
    data = path.read_bytes()
    first = data.index(b"\n") + 1
    for cut in range(first, len(data) + 1):
        path.write_bytes(data[:cut])
        torn = first < cut < len(data) - 1
        kept = whole if cut >= len(data) - 1 else whole[:1]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert read_rows(path) == kept
            append_rows(path, [{"value": 7}])
        assert [("torn" in str(w.message)) for w in caught] == [True, True] * torn
        assert read_rows(path) == [*kept, {"value": 7}]


def test_a_torn_line_longer_than_one_read(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"a": 1}])
    with open(path, "ab") as file:
        file.write(b'{"b": "' + b"x" * 200_000)
    with pytest.warns(UserWarning, match="torn by an interruption and has been removed"):
        append_rows(path, [{"c": 2}])
    assert read_rows(path) == [{"a": 1}, {"c": 2}]


def test_a_file_that_is_one_torn_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"a": ')
    with pytest.warns(UserWarning, match="the last line, 1, is torn"):
        assert read_rows(path) == []


def test_a_bad_line_in_the_middle_raises_and_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is not JSON"):
        read_rows(path)


def test_a_row_that_cannot_be_written_leaves_the_file_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"a": 1}])
    with pytest.raises(ValueError, match="a set cannot be written as JSON"):
        append_rows(path, [{"a": 2}, {"a": {1, 2}}])
    assert read_rows(path) == [{"a": 1}]


# --- JSON files ---


@given(payload=JSON)
def test_json_comes_back_as_it_went(payload, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "a.json"
    write_json(path, payload)
    assert same(read_json(path), payload)
    json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse_constant)


def test_short_json_stays_on_a_line_and_lists_of_numbers_fill_lines(tmp_path):
    payload = {"a": {"b": [1, 2.5, None]}, "curve": [[i, i / 8] for i in range(40)], "many": list(range(100)), "c": []}
    write_json(tmp_path / "a.json", payload)
    lines = (tmp_path / "a.json").read_text().splitlines()
    assert lines[:5] == ["{", '  "a": {"b": [1, 2.5, null]},', '  "curve": [', "    [0, 0.0],", "    [1, 0.125],"]
    assert max(map(len, lines)) < 120
    assert len(lines) == 3 + 42 + 6 + 1
    assert read_json(tmp_path / "a.json") == payload


def test_json_takes_arrays_tensors_paths_and_tuples(tmp_path):
    payload = {"a": np.arange(3), "b": torch.tensor([[1.0, math.nan]]), "c": Path("x/y"), "d": (1, np.bool_(True))}
    write_json(tmp_path / "a.json", payload)
    assert same(read_json(tmp_path / "a.json"), {"a": [0, 1, 2], "b": [[1.0, math.nan]], "c": "x/y", "d": [1, True]})


def test_text_that_looks_like_a_number_stays_text(tmp_path):
    """A class folder, a run or a path may be called so."""
    payload = ["NaN", math.nan, "Infinity", "-Infinity", -math.inf, "\\NaN", "nan", {"NaN": Path("NaN")}]
    write_json(tmp_path / "a.json", payload)
    assert same(read_json(tmp_path / "a.json"), [*payload[:-1], {"NaN": "NaN"}])
    raw = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse_constant)
    assert raw[:3] == ["\\NaN", "NaN", "\\Infinity"]  # whoever reads the file alone can tell them apart


@pytest.mark.parametrize("payload", [{1: 2}, {"a": object()}, 1j])
def test_json_refuses_what_it_could_not_give_back(tmp_path, payload):
    with pytest.raises(ValueError, match=r"not a string|cannot be written"):
        write_json(tmp_path / "a.json", payload)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_json(path, {"a": 1})

    def full_disk(fd):
        raise OSError("no space left")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space left"):
        write_text(path, "half")
    assert read_json(path) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


# --- records and their environment ---


def test_record_carries_the_seed_and_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("WELLCOND_COMMIT", "abc123")
    write_record(tmp_path / "a.json", {"ratio": 120.0}, seed=3)
    record = read_json(tmp_path / "a.json")
    assert record["ratio"] == 120.0
    assert record["seed"] == 3
    assert {"command", "versions", "platform", "cpu", "device", "commit", "date"} <= record["environment"].keys()
    assert record["environment"]["commit"] == "abc123"
    assert torch.__version__.startswith(record["environment"]["versions"]["torch"])
    assert record["environment"]["cpu"]["name"]


def test_record_refuses_a_payload_with_its_own_environment(tmp_path):
    with pytest.raises(ValueError, match="already has environment, seed"):
        write_record(tmp_path / "a.json", {"seed": 1, "environment": {}}, seed=1)


# ---- whether files can be written: asked beforehand, answered truly, and nothing left behind


def test_nothing_is_left_behind(tmp_path):
    check_writable(tmp_path / "a" / "b" / "page.html", tmp_path / "a" / "rows.jsonl")
    assert os.listdir(tmp_path) == []
    (tmp_path / "page.html").write_text("mine")
    check_writable(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == "mine"
    assert os.listdir(tmp_path) == ["page.html"]


def test_what_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file" / "page.html", tmp_path / "file" / "deeper" / "page.html"):
        with pytest.raises(ValueError, match=r"nothing can be written to .*file.*choose another output"):
            check_writable(path)
    (tmp_path / "page.html").mkdir()
    with pytest.raises(ValueError, match=r"page\.html is a folder"):
        check_writable(tmp_path / "page.html")
    assert sorted(os.listdir(tmp_path)) == ["file", "page.html"]


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs a file system that refuses even root")
def test_permissions_are_not_trusted():
    with pytest.raises(ValueError, match="nothing can be written to /proc/wellcond"):
        check_writable(Path("/proc/wellcond/page.html"))


def test_a_record_that_says_the_same_keeps_its_environment(tmp_path, monkeypatch):
    path, payload = tmp_path / "a.json", {"rows": [{"x": 1.5, "y": math.inf}], "of": ("a", "b")}
    write_record(path, payload, seed=0)
    first = path.read_text()
    monkeypatch.setattr(records.rows, "environment", lambda: {"command": "another"})
    write_record(path, payload, seed=0)
    assert path.read_text() == first
    for changed, seed in (({**payload, "of": "a"}, 0), (payload, 1)):
        write_record(path, changed, seed=seed)
        assert read_json(path)["environment"] == {"command": "another"}
    path.write_text("{")
    write_record(path, payload, seed=0)
    assert read_json(path)["seed"] == 0
