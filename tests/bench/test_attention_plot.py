"""The plot of a benchmark that was really run, on a CPU, and of the same with rows taken out."""

import xml.etree.ElementTree as ElementTree

import pytest

from wellcond.bench import attention
from wellcond.bench.attention_plot import plot
from wellcond.records import read_json, write_json

SVG = "{http://www.w3.org/2000/svg}"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    return attention.run(output=tmp_path_factory.mktemp("bench") / "attention-cpu.json", device="cpu", quick=True)


def texts(path):
    return [element.text for element in ElementTree.parse(path).iter(f"{SVG}text")]


def lines(path):
    """The points of each line, in pixels."""
    found = [element.get("d") for element in ElementTree.parse(path).iter(f"{SVG}path")]
    return [[tuple(map(float, point.split(","))) for point in d[1:].split("L")] for d in found]


def test_the_benchmark_draws_itself_beside_its_json(ran):
    drawing = ran.with_suffix(".svg")
    again = drawing.read_text("utf-8")
    assert plot(ran) == drawing
    assert drawing.read_text("utf-8") == again
    methods = {row["method"] for row in read_json(ran)["rows"]}
    assert methods <= set(texts(drawing))
    assert {"forward + backward, ms", "256", "512"} <= set(texts(drawing))
    assert "peak memory, MiB" not in texts(drawing)  # a CPU has no such count
    assert len(lines(drawing)) == len(methods)


def test_points_are_the_rows_times_in_their_order(ran):
    record = read_json(ran)
    drawn = lines(ran.with_suffix(".svg"))
    for n, column in ((256, 0), (512, 1)):
        times = [row["both ms"] for row in record["rows"] if row["n"] == n]
        heights = [line[column][1] for line in drawn]
        by_time = [height for _, height in sorted(zip(times, heights, strict=True))]
        assert by_time == sorted(heights, reverse=True)  # pixels count downwards


def test_memory_longer_sequences_and_missing_points(ran, tmp_path):
    """Rows as a GPU writes them: with memory, one sequence of more tokens than there are in all, and a failure."""
    record = read_json(ran)
    for row in record["rows"]:
        row["memory MiB"] = row["both ms"]
        if row["n"] == 512:  # twice the tokens at the same cost a token: the same height
            row["tokens"] *= 2
            row["both ms"] = row["memory MiB"] = 2 * next(
                other["both ms"] for other in record["rows"] if other["method"] == row["method"]
            )
        if row["method"] == "kernelized" and row["n"] == 512:
            row.update({"both ms": None, "memory MiB": None, "note": "failed: OutOfMemoryError"})
    path = tmp_path / "attention.json"
    write_json(path, record)
    drawing = plot(path)
    assert "peak memory, MiB" in texts(drawing)
    assert "kernelized at n = 512: failed: OutOfMemoryError" in texts(drawing)
    assert "n = 512 is one sequence, shown per 1,024 tokens too." in texts(drawing)
    assert sorted({len(line) for line in lines(drawing)}) == [1, 2]
    for line in lines(drawing):
        assert len({y for _, y in line}) == 1


def test_the_gpus_time_has_its_own_panel(ran, tmp_path):
    record = read_json(ran)
    methods = list(dict.fromkeys(row["method"] for row in record["rows"]))
    assert "the same on the GPU alone, ms" not in texts(ran.with_suffix(".svg"))  # a CPU has none
    for row in record["rows"]:
        row["gpu ms"] = 1.0 + methods.index(row["method"]) if row["method"] != "linear" else None
    path = tmp_path / "attention.json"
    write_json(path, record)
    drawing = plot(path)
    assert "the same on the GPU alone, ms" in texts(drawing)
    assert sum("captured as a CUDA graph" in (text or "") for text in texts(drawing)) == 1
    assert [text for text in texts(drawing) if text in methods] == methods  # one legend
    called, alone = lines(drawing)[: len(methods)], lines(drawing)[len(methods) :]
    assert called == lines(ran.with_suffix(".svg"))  # the panel that was there is as it was
    assert len(alone) == len(methods) - 1
    heights = [{y for _, y in line} for line in alone]
    assert all(len(found) == 1 for found in heights)
    assert [min(found) for found in heights] == sorted((min(found) for found in heights), reverse=True)
    for row in record["rows"]:
        row.pop("gpu ms")  # as older records
    write_json(path, record)
    assert plot(path).read_text("utf-8") == ran.with_suffix(".svg").read_text("utf-8")


def test_what_is_not_this_benchmark_is_refused(ran, tmp_path):
    record = read_json(ran)
    path = tmp_path / "a.json"
    write_json(path, {**record, "benchmark": "kappa"})
    with pytest.raises(ValueError, match="not a record of"):
        plot(path)
    write_json(path, {**record, "rows": [{**row, "both ms": None} for row in record["rows"]]})
    with pytest.raises(ValueError, match="no time to draw"):
        plot(path)
