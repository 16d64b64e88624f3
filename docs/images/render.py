"""Draws the README's picture from the demo's page, in light and dark; needs Chromium and the `test` extra.

make demo
.venv/bin/python docs/images/render.py
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image, ImageChops
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
COMPOSE = """() => {
  const pictures = [...document.querySelectorAll("#china-svd-graying .picture")];
  const box = document.createElement("div");
  box.style.cssText = "display:grid;grid-template-columns:1fr 1fr 1fr 1.75fr;gap:14px;align-items:center;padding:10px";
  box.append(...[0, 1, 4].map((i) => pictures[i]), document.querySelector("#china-svd-graying-spectrum svg"));
  document.body.style.cssText = "max-width:none;margin:0;padding:0";
  document.body.replaceChildren(box);
  box.querySelector("svg").style.width = "100%";
  box.id = "composite";
}"""


def main(page: Path) -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("needs chromium (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for scheme in ("light", "dark"):
            context = browser.new_context(
                viewport={"width": 1040, "height": 400}, color_scheme=scheme, device_scale_factor=1.25
            )
            tab = context.new_page()
            tab.goto(page.resolve().as_uri())
            tab.evaluate(COMPOSE)
            picture = Image.open(io.BytesIO(tab.locator("#composite").screenshot())).convert("RGB")
            _trim(picture).save(HERE / f"graying-{scheme}.png", optimize=True)
        browser.close()


def _trim(picture: Image.Image, margin: int = 18) -> Image.Image:
    """Without the empty stripes above and below."""
    background = Image.new("RGB", picture.size, picture.getpixel((0, 0)))
    box = ImageChops.difference(picture, background).getbbox()
    assert box is not None, "the picture is empty"
    return picture.crop((0, max(0, box[1] - margin), picture.width, min(picture.height, box[3] + margin)))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE.parents[1] / "demo" / "index.html")
