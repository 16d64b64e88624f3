"""`wellcond info`: versions, device, and which fast paths are taken."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = ["info"]


def info(as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False) -> None:
    """Show versions and devices, which fast paths are available, which will be taken, and why."""
    from wellcond.environment import environment
    from wellcond.numerics.fastpaths import fast_paths
    from wellcond.plugins import find_plugins

    facts = {**environment(), "plugins": [f"{point.name} ({point.module})" for point in find_plugins()]}
    paths = [{"name": p.name, "available": p.available, "taken": p.taken, "why": p.why} for p in fast_paths()]
    if as_json:
        typer.echo(json.dumps({**facts, "fast_paths": paths}, indent=2, ensure_ascii=False))
    else:
        Console().print(_facts_table(facts), _paths_table(paths))


def _facts_table(facts: dict[str, Any]) -> Table:
    cpu = f"{facts['cpu']['name']}, {facts['cpu']['cores']} cores, {facts.get('threads', '?')} threads used"
    commit = f"{facts['commit']}{', with changes' if facts['dirty'] else ''}" if facts["commit"] else None
    rows = facts["versions"] | {"torch's CUDA": facts.get("cuda"), "platform": facts["platform"], "CPU": cpu}
    rows |= {"device": ", ".join(facts["devices"]) or "CPU only", "commit": commit}
    rows["plug-ins"] = ", ".join(facts["plugins"]) or None
    table = Table(show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, Text(str(value)))
    return table


def _paths_table(paths: list[dict[str, Any]]) -> Table:
    table = Table("fast path", "available", "taken", "why", title="Fast paths", title_justify="left", pad_edge=False)
    for path in paths:
        marks = [Text("yes", style="green") if path[key] else Text("no") for key in ("available", "taken")]
        table.add_row(Text(path["name"]), *marks, Text(path["why"]))
    return table
