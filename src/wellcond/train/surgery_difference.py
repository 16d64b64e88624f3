"""Where a file's weights were trained with other surgery than the model has: graying, removed skips, attention.

    surgery_differences(model, metadata, "mae.safetensors")
    # ["mae.safetensors was trained with graying (dct, epsilon 0.95), and this run has no graying; to take over what the
    #   file had: --set gray=dct"]

No weight's name tells, and a run's surgery is its configuration's, so that config.json repeats it: hence words.
"""

import json
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from wellcond.models.sites import find_blocks
from wellcond.models.weights import FORMAT, METADATA_KEY, surgery_metadata

__all__ = ["surgery_differences"]

USUAL_EPSILON = 0.95  # the configuration's, which need not be set


def surgery_differences(model: nn.Module, metadata: Mapping[str, str], path: str) -> list[str]:
    """A sentence for each kind of surgery that the file's weights had and the model has not, or the other way round."""
    mine = _entries(surgery_metadata(model)[METADATA_KEY], path)
    if METADATA_KEY not in metadata:
        return [
            f"{path} does not say how its weights were trained; this run has {words(mine[kind])}"
            for kind, (words, _) in KINDS.items()
            if mine[kind]
        ]
    theirs = _entries(metadata[METADATA_KEY], path)
    notes = []
    for kind, (words, settings) in KINDS.items():
        if theirs[kind] != mine[kind]:
            notes.append(
                f"{path} was trained with {words(theirs[kind])}, and this run has {words(mine[kind])}; to take over "
                f"what the file had: {settings(theirs[kind], model)}"
            )
    return notes


def _entries(text: str, path: str) -> dict[str, Any]:
    """Of one file, by kind; the blocks as an encoder by itself names them."""
    try:
        found = dict(json.loads(text))
        if found.pop("format") != FORMAT or found.keys() - KINDS.keys():
            raise ValueError(f"entries {sorted(found)}")
        for kind in ("skips", "attention"):
            found[kind] = {name.removeprefix("encoder."): how for name, how in found.get(kind, {}).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path}: its wellcond metadata are damaged, or newer than this version ({error}); upgrade wellcond"
        ) from None
    return found


def _graying_words(how: Mapping[str, Any] | None) -> str:
    if not how:
        return "no graying"
    unscaled = "" if how["restore_scale"] else ", its scale not restored"
    return f"graying ({how['method']}, epsilon {how['epsilon']:g}{unscaled})"


def _graying_settings(how: Mapping[str, Any] | None, model: nn.Module) -> str:
    del model
    if not how:
        return "--set gray="
    text = f"--set gray={how['method']}"
    if how["epsilon"] != USUAL_EPSILON:
        text += f" --set epsilon={how['epsilon']!r}"
    return text if how["restore_scale"] else f"{text}, though no setting leaves the scale as it falls"


def _skips_words(skips: Mapping[str, list[str]]) -> str:
    return f"removed skips ({_by_block(skips, ' and '.join)})" if skips else "all skips"


def _skips_settings(skips: Mapping[str, list[str]], model: nn.Module) -> str:
    removed = sorted({skip for names in skips.values() for skip in names}, reverse=True)
    return f"--set remove_skips={','.join(removed)}{_unless_everywhere(skips, model)}"


def _attention_words(attention: Mapping[str, Mapping[str, Any]]) -> str:
    if not attention:
        return "the model's own attention"
    return f"another attention ({_by_block(attention, lambda how: how['name'])})"


def _attention_settings(attention: Mapping[str, Mapping[str, Any]], model: nn.Module) -> str:
    if not attention:
        return "--set attention= --set attention_kwargs="
    how = next(iter(attention.values()))
    text = f"--set attention={how['name']}"
    if how["settings"]:
        text += " --set " + shlex.quote(f"attention_kwargs={how['settings']}")
    return text + _unless_everywhere(attention, model)


KINDS: dict[str, tuple[Callable[[Any], str], Callable[[Any, nn.Module], str]]] = {
    "graying": (_graying_words, _graying_settings),
    "skips": (_skips_words, _skips_settings),
    "attention": (_attention_words, _attention_settings),
}
"""What stands in a file's metadata: in words, and as settings of a configuration."""


def _by_block(what: Mapping[str, Any], words: Callable[[Any], str]) -> str:
    """`sa in 12 blocks, sa and mlp in blocks.3`."""
    blocks: dict[str, list[str]] = {}
    for name, how in what.items():
        blocks.setdefault(words(how), []).append(name)
    return ", ".join(f"{w} in {b[0] if len(b) == 1 else f'{len(b)} blocks'}" for w, b in blocks.items())


def _unless_everywhere(what: Mapping[str, Any], model: nn.Module) -> str:
    """A configuration changes all blocks alike."""
    alike = len({json.dumps(how, sort_keys=True) for how in what.values()}) <= 1
    everywhere = not what or what.keys() >= {block.name.removeprefix("encoder.") for block in find_blocks(model)}
    return "" if alike and everywhere else " (in all blocks alike, which the file's are not)"
