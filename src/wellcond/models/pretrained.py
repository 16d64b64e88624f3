"""Whether the pretrained weights of a model name are here, or can be downloaded.

    found = find_pretrained("vit_tiny_patch16_224")
    found.there, found.why        # True, "from huggingface.co, 23 MB"; or False, "huggingface.co cannot be reached (…)"

Without a network, timm and the hub's library retry for a minute. Here a single request is made, with a time limit of
`WAIT` seconds that includes name lookup and proxies.
"""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlparse

from wellcond.models.huggingface import HUGGINGFACE, folder_of

__all__ = ["FOLDER", "HUB", "Pretrained", "find_pretrained", "weights_behind"]

HUB, FOLDER = "hf-hub:", "local-dir:"
WAIT = 5.0  # seconds in total to wait for an answer
ENDINGS = (".safetensors", ".bin", ".pth", ".pt", ".pth.tar")
FILES = ("model.safetensors", "pytorch_model.bin")  # file names that timm looks for on the hub
SAFE = ("model.safetensors", "model.safetensors.index.json")  # and transformers: the second lists several files


class Pretrained(NamedTuple):
    """Whether the weights of a model name are available now."""

    there: bool
    why: str
    """Where from, or why not, as a phrase to follow a colon."""


def find_pretrained(name: str) -> Pretrained:
    """Look for the weights of a timm model name, or of an `hf-hub:`, `local-dir:` or `hf:` name; downloads nothing."""
    if name.startswith(FOLDER):
        there = any(file.name.endswith(ENDINGS) for file in Path(name.removeprefix(FOLDER)).glob("*"))
        return Pretrained(there, "of that folder" if there else "the folder has none")
    if name.startswith(HUGGINGFACE) and (folder := folder_of(name)):
        there = any(folder.glob("*.safetensors"))
        return Pretrained(there, "of that folder" if there else "the folder has none as safetensors")
    if name.startswith((HUB, HUGGINGFACE)):
        repository, _, revision = name.partition(":")[2].partition("@")
        found = _on_hub(repository, revision or None, FILES if name.startswith(HUB) else SAFE)
        if name.startswith(HUGGINGFACE) and not found.there:
            return Pretrained(False, f"there is no folder {repository}, and {found.why}")
        return found
    import timm

    try:
        config = timm.get_pretrained_cfg(name)
    except RuntimeError as error:  # an unknown tag; create_model will fail and list the known ones
        return Pretrained(True, str(error))
    if config is None or not config.has_weights:
        return Pretrained(False, f"there are none for {name}")
    if config.state_dict is not None or config.file:
        return Pretrained(True, "as timm's configuration names them")
    if config.hf_hub_id:
        repository, _, revision = config.hf_hub_id.partition("@")
        return _on_hub(repository, revision or None, (config.hf_hub_filename,) if config.hf_hub_filename else FILES)
    return _at_url(str(config.url))


def weights_behind(name: str) -> Path | None:
    """Return the safetensors file of a folder or of the cache that is read for a name with a prefix, else None."""
    folder = Path(name.removeprefix(FOLDER)) if name.startswith(FOLDER) else None
    if name.startswith(HUGGINGFACE):
        folder = folder_of(name)
    if folder is not None:
        preferred = folder / FILES[0]
        return preferred if preferred.exists() else next(iter(sorted(folder.glob("*.safetensors"))), None)
    if name.startswith((HUB, HUGGINGFACE)):
        repository, _, revision = name.partition(":")[2].partition("@")
        return _cached(repository, revision or None, FILES[:1])
    return None


def _cached(repository: str, revision: str | None, files: tuple[str, ...]) -> Path | None:
    from huggingface_hub import try_to_load_from_cache

    found = (try_to_load_from_cache(repository, file, revision=revision) for file in files)
    return next((Path(path) for path in found if isinstance(path, str)), None)


def _on_hub(repository: str, revision: str | None, files: tuple[str, ...]) -> Pretrained:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, RepositoryNotFoundError

    if _cached(repository, revision, files):
        return Pretrained(True, "from the cache")
    host = urlparse(constants.ENDPOINT).netloc
    if constants.HF_HUB_OFFLINE:
        return Pretrained(False, f"they are not in the cache, and HF_HUB_OFFLINE keeps {host} out")

    def ask() -> Pretrained:
        try:
            found = get_hf_file_metadata(hf_hub_url(repository, files[0], revision=revision), timeout=WAIT)
        except EntryNotFoundError:  # the file may have another name, which timm will try
            return Pretrained(True, f"from {host}")
        except (GatedRepoError, RepositoryNotFoundError):
            return Pretrained(False, f"{host} has no {repository}, or not for you (hf auth login)")
        return Pretrained(True, f"from {host}{_size(found.size)}")

    return _within(ask, host)


def _at_url(url: str) -> Pretrained:
    from timm.models import _hub
    from torch.hub import get_dir

    file = Path(urlparse(url).path).name
    if any((Path(folder) / file).exists() for folder in (_hub.get_cache_dir(), Path(get_dir()) / "checkpoints")):
        return Pretrained(True, "from the cache")
    host = urlparse(url).netloc

    def ask() -> Pretrained:
        from urllib.request import Request, urlopen

        with urlopen(Request(url, method="HEAD"), timeout=WAIT) as answer:
            size = answer.headers.get("Content-Length")
        return Pretrained(True, f"from {host}{_size(int(size) if size else None)}")

    return _within(ask, host)


def _within(ask: Callable[[], Pretrained], host: str) -> Pretrained:
    """Wait at most `WAIT` seconds for `ask`, in a thread: name lookup and connecting have their own limits, or none."""
    answers: list[Any] = []

    def listen() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            why = " ".join(str(error).split())[:120] or type(error).__name__
            answers.append(Pretrained(False, f"{host} cannot be reached ({why})"))

    asking = threading.Thread(target=listen, daemon=True)
    asking.start()
    asking.join(WAIT)
    return answers[0] if answers else Pretrained(False, f"{host} has not answered within {WAIT:.0f} seconds")


def _size(size: int | None) -> str:
    return f", {size / 1e6:,.0f} MB" if size else ""
