"""Turn rows into one self-contained HTML page: no network, no torch, light and dark, readable on a phone.

    chart = line_chart(rows, title="Spectrum", x=Axis("index"), y=Axis("sigma", log=True), by="line", looks=looks)
    page = Page("Block 11 is worst", "One sentence on what this is.", about="My run")
    page.add(section("Spectra", "Text is escaped.", grid(chart)))
    page.write("runs/a/report.html")

    report_runs(["runs/a", "runs/b"], "report.html")          # two run folders, compared

Charts are drawn with Altair: they zoom, toggle lines, highlight a block in all charts at once, and can be saved as SVG,
PNG and CSV. Writing a page without Altair installed raises ValueError.
"""

from .charts import Axis, Chart, Look, can_draw, grid, line_chart, looks_of
from .markup import Html, tag
from .page import Page, bullets, code_block, note, paragraph, section, slider, table, tiles
from .run_page import conditioning_page
from .runs import report_runs

__all__ = [
    "Axis",
    "Chart",
    "Html",
    "Look",
    "Page",
    "bullets",
    "can_draw",
    "code_block",
    "conditioning_page",
    "grid",
    "line_chart",
    "looks_of",
    "note",
    "paragraph",
    "report_runs",
    "section",
    "slider",
    "table",
    "tag",
    "tiles",
]
