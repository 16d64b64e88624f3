"""The commands, each a few lines: read the options, call one function, print what it says.

    wellcond info              # versions, device, which fast paths are taken and why
    wellcond demo              # a report page in demo/
    wellcond measure vit_tiny_patch16_224 --checkpoint last.pth.tar --data-dir photos --untrained
    wellcond train digits --output runs/a --set gray=dct --set probe_every=50
    wellcond report runs/a runs/b
    wellcond reproduce asa-fig1c --scale smoke
    wellcond ledger --check    # is docs/claims.md what evidence/ says?
    wellcond theory asa-prop41 # bound, measured value, margin and verdict of a paper's statement
    wellcond bench graying     # ratios, and a JSON file with its environment

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 training diverged, 130 interrupted. A failure is one line; with
WELLCOND_DEBUG=1, a traceback.
Everything heavy is imported inside its command, so that `--help` and a typing mistake are answered at once.
"""

import json
import os
import signal
import sys
from functools import partial
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from wellcond.cli.bench import bench
from wellcond.cli.looking import measure, report
from wellcond.cli.running import demo, ledger, reproduce, theory, train

__all__ = ["app", "main"]

app = typer.Typer(
    name="wellcond",
    help="Measure and improve the conditioning of transformer training.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command line; whatever goes wrong ends as one line and an exit code."""
    interrupt = partial(_interrupt, os.getpid())
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        app(prog_name="wellcond")
    except Exception as error:
        if os.environ.get("WELLCOND_DEBUG", "0") not in ("", "0"):
            raise
        Console(stderr=True).print(Text(f"error: {_one_line(error)}", style="red"), soft_wrap=True)
        sys.exit(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(main_process: int, number: int, frame: FrameType | None) -> None:
    """SIGTERM ends a command as Ctrl-C does, unless the command says otherwise, as training does: with 130.

    Torch and timm take seconds to import, and pass over exceptions meanwhile; then there is nothing to clean up.
    """
    if os.getpid() != main_process:  # forked by a command: it ends as any process
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"Aborted.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _one_line(error: Exception) -> str:
    """A ValueError is our own and speaks for itself; anything else also gets its kind, and the way to see more."""
    message = " ".join(str(error).split())
    if isinstance(error, ValueError):
        return message
    return f"{type(error).__name__}: {message} (WELLCOND_DEBUG=1 shows where)"


def _print_version(wanted: bool) -> None:
    if wanted:
        from wellcond.environment import own_version

        typer.echo(f"wellcond {own_version()}")
        raise typer.Exit


@app.callback()
def options(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Measure and improve the conditioning of transformer training."""


def info(as_json: Annotated[bool, typer.Option("--json", help="JSON instead of tables.")] = False) -> None:
    """Show versions, devices, and which fast paths are available, which will be taken, and why."""
    from wellcond.environment import environment
    from wellcond.numerics.fastpaths import fast_paths

    facts = environment()
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


for command in (info, demo, report, measure, theory, train, reproduce, ledger):
    app.command()(command)
app.add_typer(bench, name="bench")
