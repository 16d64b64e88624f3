"""Draws the picture of docs/trained.md from the page beside it; needs Chromium and the `test` extra.

.venv/bin/python docs/trained/render.py
"""

import io
import shutil
import sys
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

HERE = Path(__file__).parent
CHOSEN = (
    "log-kappa-by-block-and-site-untrained",
    "log-kappa-by-block-and-site-cifar10-vit",
    "spectrum-at-sa-transformer-layers-5",
    "attention-entropy-by-block",
)
COMPOSE = """(chosen) => {
  const box = document.createElement("div");
  box.style.cssText = "display:grid;grid-template-columns:1fr 1fr;gap:14px;padding:12px;align-items:start";
  box.append(...chosen.map((id) => document.getElementById(id)));
  for (const figure of box.children) figure.style.margin = "0";
  document.body.style.cssText = "max-width:none;margin:0;padding:0";
  document.body.replaceChildren(box);
  box.id = "composite";
}"""


def main() -> None:
    chromium = shutil.which("chromium")
    if chromium is None:
        sys.exit("needs chromium (Debian: apt-get install chromium)")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        context = browser.new_context(viewport={"width": 960, "height": 400}, device_scale_factor=1.5)
        tab = context.new_page()
        tab.goto((HERE / "cifar10-vit.html").resolve().as_uri())
        tab.evaluate(COMPOSE, list(CHOSEN))
        picture = Image.open(io.BytesIO(tab.locator("#composite").screenshot())).convert("RGB")
        browser.close()
    picture.quantize(128).save(HERE / "cifar10-vit.png", optimize=True)  # charts have few colours


if __name__ == "__main__":
    main()
