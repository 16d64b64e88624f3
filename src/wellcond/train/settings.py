"""Settings as a command line or JSON has them, turned into the types of a configuration's fields.

assignment("lr=3e-4")                   # ("lr", "3e-4")
as_type("lr", "3e-4", float)            # 0.0003; ValueError says what is expected
nearest("lrr", ["lr", "sched"])         # "; did you mean 'lr'?"
as_seconds("1h30m")                     # 5400.0
"""

import ast
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal, get_args

__all__ = ["as_seconds", "as_type", "assignment", "nearest"]


def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"a setting is written name=value, got {text!r}")
    return name.strip().replace("-", "_"), value.strip()


def nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(sorted(known))}"


def as_seconds(text: str) -> float:
    """A duration: 90s, 9m, 1h30m, 2d, or plain seconds. ValueError for anything else, and for none at all."""
    number = r"(\d+(?:\.\d+)?)"
    found = re.fullmatch(f"(?:{number}d)?(?:{number}h)?(?:{number}m)?(?:{number}s?)?", text.strip().lower())
    parts = [float(part or 0) for part in found.groups()] if found else []
    seconds = sum(part * unit for part, unit in zip(parts, (86400, 3600, 60, 1), strict=False))
    if not 0 < seconds < math.inf:
        raise ValueError(f"is a time such as 90s, 9m or 1h30m, or a number of seconds; got {text!r}")
    return seconds


def as_type(name: str, value: Any, hint: Any) -> Any:
    """`value`, a string of a command line or what JSON gives, as the field's type."""
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and (value is None or value in ("none", "None", "")):
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    if kinds == [int, str]:  # a number, or a word
        return int(value) if str(value).lstrip("-").isdigit() else str(value)
    kind = kinds[0]
    origin = typing.get_origin(kind)
    try:
        if origin is Literal or kind is str:
            return str(value)
        if kind is bool:
            return _boolean(value)
        if origin is tuple:
            items = value if isinstance(value, list | tuple) else [part for part in str(value).split(",") if part]
            return tuple(float(item) if get_args(kind)[0] is float else str(item).strip() for item in items)
        if origin is dict:
            return dict(value) if isinstance(value, Mapping) else _mapping(str(value))
        if kind is int and isinstance(value, str):
            return int(value)
        if kind is int and (isinstance(value, bool) or value != int(value)):
            raise ValueError
        return kind(value)
    except (ValueError, TypeError, SyntaxError):
        words = {int: "a whole number", float: "a number", bool: "true or false", tuple: "numbers such as 0.9,0.95"}
        word = words.get(origin or kind, "key=value pairs such as a=1,b='x'")
        raise ValueError(f"{name} must be {word}, got {value!r}") from None


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    word = str(value).lower()
    if word not in ("true", "false", "1", "0", "yes", "no"):
        raise ValueError(word)
    return word in ("true", "1", "yes")


def _mapping(text: str) -> dict[str, Any]:
    if text.startswith("{"):
        found = ast.literal_eval(text)
        if not isinstance(found, dict):
            raise ValueError(text)
        return found
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    if any(not equals for _, equals, _ in pairs):
        raise ValueError(text)
    return {key.strip(): _literal(value.strip()) for key, _, value in pairs}


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
