"""Rows and figures become one self-contained HTML page: no network, no torch, light and dark, readable on a phone.

    chart = line_chart([Series("plain", x, y)], title="Spectrum", x="index", y=Axis("σ", log=True))
    page = Page("My run", "One sentence on what this is.")
    page.add(section("Spectra", "Text is escaped.", chart))
    page.write("runs/a/report.html")

    report_runs(["runs/a", "runs/b"], "report.html")          # two run folders, compared

Every chart is drawn as SVG by hand and carries its own downloads: the drawing as SVG, the numbers as CSV.
"""

from .axes import format_number
from .figures import Axis, Chart, Series, line_chart, ordered_colors
from .markup import Html, join, tag
from .page import Page, bullets, code_block, note, paragraph, section, side_by_side, table, tiles
from .pictures import Picture, picture_grid
from .run_page import conditioning_page
from .runs import report_runs

__all__ = [
    "Axis",
    "Chart",
    "Html",
    "Page",
    "Picture",
    "Series",
    "bullets",
    "code_block",
    "conditioning_page",
    "format_number",
    "join",
    "line_chart",
    "note",
    "ordered_colors",
    "paragraph",
    "picture_grid",
    "report_runs",
    "section",
    "side_by_side",
    "table",
    "tag",
    "tiles",
]
