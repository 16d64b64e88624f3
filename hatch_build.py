"""The README for package indexes, which show it without the repository around it: relative links would lead nowhere.

With a `Source` in [project.urls] they become absolute. Without one, links become their text and pictures are left out.
hatchling calls this when it builds, or installs from a clone.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

PICTURE = re.compile(r"<picture>.*?</picture>\n*|!\[[^\]]*\]\((?!https?:)[^)]*\)", re.DOTALL)
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:|#)([^)]+)\)")
SOURCE = re.compile(r'((?:src|srcset)="|!\[[^\]]*\]\()(?!https?:)([^")]+)')


def outside(readme: str, home: str | None) -> str:
    """The text as it makes sense anywhere. `home` is the repository on a code host, where HEAD is the newest state."""
    if home is None:
        return LINK.sub(r"\1", PICTURE.sub("", readme))
    readme = SOURCE.sub(rf"\1{home.rstrip('/')}/raw/HEAD/\2", readme)
    return LINK.sub(rf"[\1]({home.rstrip('/')}/blob/HEAD/\2)", readme)


class ReadmeHook(MetadataHookInterface):
    def update(self, metadata: dict[str, Any]) -> None:
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = outside(text, metadata.get("urls", {}).get("Source"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
