"""Classes of two parts, compared.

compare_classes(["cat", "dog"], ["cat"], where="pets")       # ValueError: 'dog' has no validation images
"""

from collections.abc import Iterable

__all__ = ["compare_classes", "sort_names"]


def compare_classes(train: Iterable[str], val: Iterable[str], *, where: str) -> None:
    """Raises ValueError unless both parts have the same classes: labels would mean different things otherwise."""
    trained, seen = set(train), set(val)
    for only, having, lacking in ((trained - seen, "train", "val"), (seen - trained, "val", "train")):
        if only:
            names = sorted(only)
            named = ", ".join(repr(name) for name in names[:5]) + (", …" if len(names) > 5 else "")
            raise ValueError(f"in {where} the classes {named} are in {having} but not in {lacking}; both need the same")


def sort_names(names: Iterable[str]) -> list[str]:
    """By number if all are whole numbers, else by name."""
    found = set(names)
    return sorted(found, key=int) if all(name.isdecimal() for name in found) else sorted(found)
