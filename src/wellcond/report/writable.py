"""Whether files can be written, asked before the work whose result they shall hold.

check_writable(Path("out/report.html"), Path("out/probe.jsonl"))      # ValueError, or nothing
"""

import contextlib
import tempfile
from pathlib import Path

__all__ = ["check_writable"]


def check_writable(*files: Path) -> None:
    """Try it: make the folders and a file in each, and take all of it away again.

    Raises ValueError where that fails, or where a folder stands in a file's place. Permissions are not asked: they do
    not tell of file systems that are full, read-only or no file systems at all.
    """
    for file in files:
        if file.is_dir():
            raise ValueError(f"{file} is a folder, and a file has to be written there; choose another output")
    for folder in dict.fromkeys(file.parent for file in files):
        missing = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=".wellcond-", dir=folder) as file:
                file.write(b"?")
        except OSError as error:
            raise ValueError(
                f"nothing can be written to {folder} ({error.strerror or error}); choose another output"
            ) from None
        finally:
            for made in missing:
                with contextlib.suppress(OSError):  # it was not made, or somebody has put something there meanwhile
                    made.rmdir()
