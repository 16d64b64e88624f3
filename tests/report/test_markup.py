import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wellcond.report.markup import Html, format_number, join, tag


def test_text_is_escaped_and_markup_is_not():
    inner = tag("b", "a < b & c")
    assert tag("p", inner, ' "x" ', class_="<y>") == ('<p class="&lt;y&gt;"><b>a &lt; b &amp; c</b> &quot;x&quot; </p>')


@given(st.text(), st.text())
def test_any_text_stays_text(text, value):
    """Whatever goes in, a parser finds one element with one attribute in it, and no child."""
    element = ElementTree.fromstring(tag("p", text, title=value))
    assert len(element) == 0
    assert list(element.keys()) == ["title"]


def test_attributes():
    assert tag("p", aria_label="2", hidden=True, title=None, class_=False) == '<p aria-label="2" hidden=""></p>'


def test_children_may_be_lists_nothing_numbers_and_objects_that_know_their_markup():
    class Known:
        def __html__(self):
            return "<hr>"

    assert join(["a", ["b"]], None, 3, Known(), Html("<br>")) == "ab3<hr><br>"


def test_elements_without_content():
    assert tag("img", alt="x") == '<img alt="x">'
    with pytest.raises(AssertionError, match="no content"):
        tag("br", "text")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0541, "0.0541"),
        (3566.9, "3,567"),
        (1.234e7, "1.23·10⁷"),
        (-2e-5, "−2.00·10⁻⁵"),
        (0, "0"),
        (float("inf"), "∞"),
    ],
)
def test_numbers_for_readers(value, text):
    assert format_number(value) == text
