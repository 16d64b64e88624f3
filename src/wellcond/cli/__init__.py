"""The commands, one file each: read the options, call one function, print what it says.

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
Everything heavy is imported inside its command, so that `--help` and typing mistakes are answered at once. Commands
that take names import the plug-ins of other packages first (plugins.py).
`wellcond --install-completion` completes commands, recipes, claims and models in your shell.
"""

import os
import signal
import sys
from functools import partial
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from wellcond.cli.bench import bench
from wellcond.cli.demo import demo
from wellcond.cli.info import info
from wellcond.cli.ledger import ledger
from wellcond.cli.measure import measure
from wellcond.cli.plugins import with_plugins
from wellcond.cli.report import report
from wellcond.cli.reproduce import reproduce
from wellcond.cli.theory import theory
from wellcond.cli.train import train

__all__ = ["app", "main"]

app: typer.Typer = typer.Typer(
    name="wellcond",
    help="Measure and improve the conditioning of transformers.",
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

    Torch and timm take seconds to import, and swallow exceptions meanwhile; there is nothing to clean up yet.
    """
    if os.getpid() != main_process:  # forked by a command: it ends as any process does
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"Aborted.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _one_line(error: Exception) -> str:
    """A ValueError is our own and its message is enough; anything else also gets its type, and how to see more."""
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
def _common(
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Measure and improve the conditioning of transformers."""


app.command()(with_plugins(measure))
app.command()(with_plugins(train))
app.command()(report)
app.command()(demo)
app.command()(with_plugins(reproduce))
app.command()(theory)
app.command()(with_plugins(ledger))
app.command()(info)
app.add_typer(bench, name="bench")
