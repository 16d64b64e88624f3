"""Whether the weights of a name can be had is known within seconds, with a network or without one."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

from wellcond.models import pretrained
from wellcond.models.build import build_model
from wellcond.models.pretrained import find_pretrained

NAME = "vit_tiny_patch16_224"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A hub that answers as it is told: by a size, or by raising."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)

    def answers(with_: Any) -> None:
        def metadata(url: str, timeout: float) -> Any:
            assert f"timm/{NAME}" in url
            assert timeout <= pretrained.WAIT
            if isinstance(with_, Exception):
                raise with_
            return SimpleNamespace(size=with_() if callable(with_) else with_)

        monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", metadata)

    return answers


def test_a_hub_that_answers(hub: Any) -> None:
    hub(23_000_000)
    assert find_pretrained(NAME) == (True, "from huggingface.co, 23 MB")


def answer(error: type[Exception]) -> Exception:
    made = error.__new__(error)  # they want the answer of a server
    Exception.__init__(made, "no")
    return made


@pytest.mark.parametrize(
    ("error", "there", "why"),
    [
        (OSError("Name or service not known"), False, r"huggingface.co cannot be reached \(Name or service"),
        (answer(RepositoryNotFoundError), False, "huggingface.co has no timm/vit_tiny.*hf auth login"),
        (answer(EntryNotFoundError), True, "from huggingface.co"),  # timm tries other names of the file
    ],
)
def test_a_hub_that_does_not(hub: Any, error: Exception, there: bool, why: str) -> None:
    hub(error)
    found = find_pretrained(NAME)
    assert found.there is there
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.why)


def test_a_missing_folder_is_said_to_be_missing(hub: Any) -> None:
    hub(OSError("Name or service not known"))
    assert find_pretrained("hf:my/model").why.startswith("there is no folder my/model, and huggingface.co cannot be")


def test_silence_is_not_waited_for(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pretrained, "WAIT", 0.05)
    hub(lambda: time.sleep(2))
    before = time.perf_counter()
    found = find_pretrained(NAME)
    assert time.perf_counter() - before < 1
    assert (found.there, "has not answered" in found.why) == (False, True)


def test_what_needs_no_hub(hub: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub(AssertionError("asked"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert find_pretrained(NAME) == (
        False,
        "they are not in the cache, and HF_HUB_OFFLINE keeps huggingface.co out",
    )
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: "model.safetensors")
    assert find_pretrained(NAME) == (True, "from the cache")
    assert find_pretrained("hf-hub:timm/anything@v1").there
    assert not find_pretrained(f"local-dir:{tmp_path}").there
    (tmp_path / "weights.pth").touch()
    assert find_pretrained(f"local-dir:{tmp_path}").there
    without = find_pretrained("vit_small_patch8_224.nobody")
    assert without.there  # the tag is wrong, and timm says so


def test_weights_at_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr(pretrained, "_within", lambda ask, host: (False, f"{host} asked"))
    found = find_pretrained("gcvit_xxtiny")
    assert found == (False, "github.com asked")
    (tmp_path / "checkpoints").mkdir()
    import timm

    config = timm.get_pretrained_cfg("gcvit_xxtiny")
    assert config is not None
    (tmp_path / "checkpoints" / str(config.url).rpartition("/")[2]).touch()
    assert find_pretrained("gcvit_xxtiny") == (True, "from the cache")


def test_pretrained_weights_that_cannot_be_had_are_an_error_at_once(hub: Any) -> None:
    hub(OSError("Name or service not known"))
    before = time.perf_counter()
    with pytest.raises(ValueError, match=r"with its pretrained weights: huggingface.co cannot be reached.*checkpoint"):
        build_model(NAME, pretrained=True)
    assert time.perf_counter() - before < 5  # the hub's own library tries for a minute
