"""Whatever was measured, a page can be drawn of it."""

import json
import math
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wellcond.records import Site, Status, row
from wellcond.report import conditioning_page

pytestmark = pytest.mark.usefixtures("without_vega")


def charts(html):
    """What each figure hands to the script."""
    return [json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', html, re.DOTALL)]


@pytest.mark.parametrize(
    "shape",
    [
        {"blocks": 1, "sites": ("sa",)},
        {"blocks": 48, "steps": (0, 1)},
        {"blocks": 0, "outside": ("tokens",)},
        {"blocks": 3, "sites": ("sa", "mlp", "+mlp")},
        {"blocks": 2, "sites": ("+mlp",), "steps": (7, 9), "outside": ("embed",)},
    ],
)
def test_any_shape_of_run_gives_a_page(probe_rows, shape):
    for runs in ({"a": probe_rows(**shape)}, {"a": probe_rows(**shape), "b": probe_rows(blocks=2)}):
        html = conditioning_page(runs).to_html()
        assert ("By block and site" in html.partition("<main>")[2]) == (shape["blocks"] > 0 or len(runs) > 1)
        assert all(chart["csv"].count("\n") > 1 for chart in charts(html))


values = st.one_of(st.floats(0, 16), st.just(math.nan), st.just(math.inf), st.floats())
names = st.sampled_from(["log_kappa", "capped", "sigma.0", "sigma.3", "largest_logit", "attention_entropy", "odd"])


@settings(max_examples=10, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-1, 3),
            st.integers(-1, 2),
            st.sampled_from(Site.__args__),
            names,
            values,
            st.sampled_from(Status.__args__),
        ),
        max_size=40,
    )
)
def test_any_rows_give_a_page(drawn):
    """Whatever is missing, repeated or not finite: one condition number of the last run is enough for a page."""
    fields = {"run": "r", "count": 4, "dtype": "float32"}
    rows = []
    for step, index, site, name, value, status in drawn:
        status = "non_finite" if status == "ok" and not math.isfinite(value) else status
        place = {"step": step, "block": f"b{index}", "index": index, "site": site}
        rows.append(row(**fields, **place, name=name, value=value, status=status))
    rows.append(row(**fields, step=0, block="b0", index=0, site="sa", name="log_kappa", value=3.0, status="ok"))
    assert charts(conditioning_page({"a": rows}).to_html())
