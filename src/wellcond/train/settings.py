"""Settings in groups: typed fields, each with its rule, that are changed by name and record which of them were given.

    @dataclass(frozen=True, kw_only=True)
    class Tea(Settings):
        \"\"\"How tea is made\"\"\"                          # the group's title

        minutes: float = setting(3.0, above=0)
        \"\"\"How long it draws.\"\"\"                       # the field's line in `wellcond train --settings`
        kind: Literal["green", "black"] = "black"

        @staticmethod
        def problems(config: Any, world: int) -> Iterator[str]:     # checks across fields
            if config.kind == "green" and config.minutes > 5:
                yield "green tea is bitter after 5 minutes"

    class All(Tea, Cup): ...                            # all groups in one: All(minutes=4).changed(["kind=green"])

A rule says what a field's values may be: a Literal's words, `choices`, or a range (`at_least`, `above`, `at_most`,
`below`). `check` goes through the rules of all fields and the `problems` of all groups, and raises the first it finds.
"""

import ast
import dataclasses
import functools
import inspect
import json
import math
import textwrap
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, get_args

from wellcond.words import meant, our_word

__all__ = ["Field", "Settings", "about", "fields_of", "groups", "ignored", "nearest", "setting", "title"]


def setting(
    default: Any, *, choices: Collection[str] = (), at_least: float | None = None, above: float | None = None,
    at_most: float | None = None, below: float | None = None, hint: str = "",
) -> Any:  # fmt: skip
    """Return a field with its rule. None is always allowed if the type allows it. `hint` is added to error messages.

    Words added to `choices` later are allowed, too."""
    rule = {"at_least": at_least, "above": above, "at_most": at_most, "below": below}
    rule = {name: bound for name, bound in rule.items() if bound is not None}
    return dataclasses.field(default=default, metadata={"choices": choices, "range": rule, "hint": hint})


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A group of settings, or all groups of a training."""

    tasks: ClassVar[tuple[str, ...]] = ()
    """The kinds of task that use a group's fields; empty for all. Giving one of them for another task is an error."""

    added_to: ClassVar[tuple[str, ...]] = ()
    """Fields of key=value pairs in which a change leaves the other keys as they are; None removes a key."""

    takes_the_place_of: ClassVar[Mapping[str, str]] = {}
    """Pairs of fields for one thing in two units: giving the first resets a recipe's value of the second to 0."""

    def __new__(cls, **given: Any) -> Self:
        self = super().__new__(cls)
        everything = len(given) == len(dataclasses.fields(cls))  # dataclasses.replace passes all fields, changed or not
        object.__setattr__(self, "_given", frozenset() if everything else frozenset(given))
        return self

    @property
    def given(self) -> frozenset[str]:
        """The fields that a user set: in the constructor, by `changed`, or on the command line.

        This distinguishes what the user asked for from what a recipe or a default chose. It is not part of comparisons
        and not written to config.json."""
        return self.__dict__["_given"]

    def changed(self, settings: Iterable[str] | Mapping[str, Any], *, given: bool = True) -> Self:
        """Return a copy with these fields changed: `["lr=3e-4", …]` as on a command line, or a mapping.

        `given=False` is for what no user asked for: the choice of a recipe, or an adaptation to the device.
        """
        if not isinstance(settings, Mapping):
            settings = dict(assignment(text) for text in settings)
        hints, rules = _types_of(type(self)), {rule.name: rule for rule in fields_of(type(self))}
        changes = {}
        for name, value in settings.items():
            if name not in hints:
                raise ValueError(f"there is no setting {name!r}{nearest(name, hints)}")
            changes[name] = as_type(name, value, hints[name])
            if rules[name].choices and isinstance(changes[name], tuple):  # e.g. attention means sa
                changes[name] = tuple(our_word(word) for word in changes[name])
            if name in self.added_to:
                both = {**getattr(self, name), **changes[name]}
                changes[name] = {key: one for key, one in both.items() if one is not None}
        if not given:
            return self._with(changes, given=self.given)
        asked = self.given | changes.keys()
        for name, other in self.takes_the_place_of.items():
            if name in changes and other not in asked:
                changes[other] = 0
        return self._with(changes, given=asked)

    def as_defaults(self) -> Self:
        """Return a copy with the same values, none of which counts as given."""
        return self._with({}, given=frozenset())

    def _with(self, changes: Mapping[str, Any], *, given: frozenset[str]) -> Self:
        changed = dataclasses.replace(self, **changes)
        object.__setattr__(changed, "_given", given)
        return changed

    def as_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        return json.loads(json.dumps({field.name: values[field.name] for field in fields_of(type(self))}))

    @classmethod
    def from_json(cls, payload: Mapping[str, Any]) -> Self:
        """Restore what `as_json` returned. A file does not record which fields were given: none counts as given."""
        return cls().changed(payload, given=False)

    def differences(self, other: "Settings") -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, as name → (mine, theirs)."""
        mine, theirs = self.as_json(), other.as_json()
        return {name: (mine[name], theirs[name]) for name in mine if mine[name] != theirs[name]}

    def check(self, *, world: int = 1) -> None:
        """Raise ValueError, before anything is built, for what `world` processes cannot train or what would be ignored.

        A recipe's setting that another setting makes idle is accepted: the user did not ask for it.
        """
        for problem in self._all_problems(world):
            raise ValueError(problem)

    @staticmethod
    def problems(config: Any, world: int) -> Iterator[str]:
        """Yield what is wrong with a group's fields beyond their rules: one sentence each, with a way to fix it."""
        del config, world
        yield from ()

    def _all_problems(self, world: int) -> Iterator[str]:
        for rule in fields_of(type(self)):
            yield from rule.broken_by(getattr(self, rule.name))
        task, kind = getattr(self, "task", ""), getattr(self, "kind", "")
        idle = [group for group in groups(type(self)) if kind not in vars(group).get("tasks", (kind,))]
        for group in idle:
            why = f"is a setting of task={' or '.join(group.tasks)}, and the task is {task}"
            yield from ignored(self, own_fields(group), why)
        for group in groups(type(self)):
            if group not in idle and "problems" in vars(group):
                yield from group.problems(self, world)


def ignored(config: Settings, names: Iterable[str], why: str) -> Iterator[str]:
    """Yield a sentence for each of these fields that was given although nothing uses it."""
    for name in names:
        if name in config.given:
            yield f"{name} {why}; leave {name} out"


# ---- the fields of a group


def groups(cls: type[Settings]) -> list[type[Settings]]:
    """Return `cls` and the groups it is made of, in order, without those that have no fields of their own."""
    return [group for group in cls.__mro__ if issubclass(group, Settings) and own_fields(group)]


def own_fields(group: type[Settings]) -> list[str]:
    """Return the names of the fields that the class itself defines."""
    known = {field.name for field in dataclasses.fields(group)}
    return [name for name in inspect.get_annotations(group) if name in known]


@dataclass(frozen=True, kw_only=True)
class Field:
    """A setting and its rule."""

    name: str
    default: Any
    choices: Collection[str]
    range: Mapping[str, float]
    hint: str

    def broken_by(self, value: Any) -> Iterator[str]:
        """Yield what is wrong with this value."""
        hint = f" ({self.hint})" if self.hint else ""
        for word in (value,) if isinstance(value, str) else value if isinstance(value, tuple) else ():
            if isinstance(word, str) and word.encode(errors="ignore").decode() != word:
                from wellcond.data.files import printable

                yield (
                    f"{self.name}={printable(word)} is not UTF-8, as config.json has to be; rename it, or name a link "
                    "to it"
                )
            if self.choices and word not in self.choices:
                near = meant(word, self.choices)
                yield f"{self.name} can be {', '.join(map(repr, self.choices))}, not {word!r}{hint}{near}"
        if isinstance(value, int | float) and not self._in_range(value):
            must = "not be negative" if self.range == {"at_least": 0} else f"be {self.in_words()}"
            yield f"{self.name} must {must if math.isfinite(value) else 'be finite'}, got {value}{hint}"

    def _in_range(self, value: float) -> bool:
        rule = self.range
        return not rule or (
            math.isfinite(value)
            and rule.get("at_least", value) <= value <= rule.get("at_most", value)
            and rule.get("above", -math.inf) < value < rule.get("below", math.inf)
        )

    def as_text(self) -> str:
        """Return the default as it is written on a command line."""
        if isinstance(self.default, bool | None):
            return str(self.default).lower()
        return ",".join(map(str, self.default)) if isinstance(self.default, tuple | dict) else f"{self.default}"

    def in_words(self) -> str:
        """Return the range in words: "at least 0 and below 1"."""
        return " and ".join(f"{name.replace('_', ' ')} {bound:g}" for name, bound in self.range.items())


@functools.cache
def fields_of(cls: type[Settings]) -> tuple[Field, ...]:
    """Return every field, group by group."""
    by_name, hints, found = {field.name: field for field in dataclasses.fields(cls)}, _types_of(cls), []
    for name in (name for group in groups(cls) for name in own_fields(group)):
        one = by_name[name]
        default = one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default
        rule = {"choices": (), "range": {}, "hint": "", **one.metadata}
        rule["choices"] = rule["choices"] or (get_args(hints[name]) if _is_literal(hints[name]) else ())
        found.append(Field(name=name, default=default, **rule))
    return tuple(found)


@functools.cache
def _types_of(cls: type[Settings]) -> dict[str, Any]:
    hints, names = typing.get_type_hints(cls), {field.name for field in dataclasses.fields(cls)}
    return {name: hints[name] for name in sorted(names)}


def title(group: type[Settings]) -> str:
    return inspect.cleandoc(group.__doc__ or group.__name__).partition("\n")[0].rstrip(".")


def about(group: type[Settings]) -> dict[str, str]:
    """Return, by field, the text under it in the source, on one line; {} if there is no source."""
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(group))).body[0].body  # type: ignore[attr-defined]
    except OSError:
        return {}
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


# ---- settings from a command line or JSON


def assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise ValueError(f"a setting is written name=value, got {text!r}")
    return name.strip().replace("-", "_"), value.strip()


USUAL = {
    "learning_rate": "lr", "optimizer": "opt", "optimiser": "opt", "betas": "opt_betas", "eps": "opt_eps",
    "wd": "weight_decay", "grad_clip": "clip_grad", "max_grad_norm": "clip_grad", "warmup": "warmup_epochs",
    "scheduler": "sched", "lr_scheduler": "sched", "amp": "amp_dtype", "precision": "amp_dtype", "batch": "batch_size",
    "num_epochs": "epochs", "max_steps": "steps", "smoothing": "label_smoothing", "ema": "ema_decay",
}  # fmt: skip
"""What other programs call some settings."""
OPTIONS = ("device", "output", "data_dir")
"""Options of the command, which are no settings."""


def nearest(name: str, known: Iterable[str]) -> str:
    known = list(known)
    if name in OPTIONS:
        return f"; that is the option --{name.replace('_', '-')}"
    if USUAL.get(name) in known:
        return f"; did you mean {USUAL[name]}?"
    return meant(name, known) or f"; there are {', '.join(sorted(known))}"


def as_type(name: str, value: Any, hint: Any) -> Any:
    """Convert `value`, a string from a command line or a value from JSON, to the field's type."""
    kinds = get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if type(None) in kinds and (value is None or value in ("none", "None", "")):
        return None
    kinds = [kind for kind in kinds if kind is not type(None)]
    if kinds == [int, str]:  # a number, or a word
        return int(value) if str(value).lstrip("-").isdigit() else str(value)
    kind = kinds[0]
    origin = typing.get_origin(kind)
    try:
        if kind is str or _is_literal(kind):
            return str(value)
        if kind is bool:
            return _boolean(value)
        if origin is tuple:
            items = value if isinstance(value, list | tuple) else [part for part in str(value).split(",") if part]
            return tuple(
                as_type(name, item.strip() if isinstance(item, str) else item, get_args(kind)[0]) for item in items
            )
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


def _is_literal(hint: Any) -> bool:
    return typing.get_origin(hint) is Literal


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
