"""Asked beforehand, answered truly, and nothing left behind."""

import os
from pathlib import Path

import pytest

from wellcond.report.writable import check_writable


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
