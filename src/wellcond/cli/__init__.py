"""The commands, one file each: read the options, call one function, print its result.

    wellcond info              # versions, device, which fast paths are taken and why
    wellcond demo              # a report page in demo/
    wellcond measure vit_tiny_patch16_224 --checkpoint last.pth.tar --data-dir photos --untrained
    wellcond train digits --output runs/a --set gray=dct --set probe_every=50
    wellcond report runs/a runs/b
    wellcond reproduce asa-fig1c --scale smoke
    wellcond ledger --check    # does docs/claims.md match evidence/?
    wellcond theory asa-prop41 # bound, measured value, margin and verdict of a paper's statement
    wellcond bench graying     # ratios, and a JSON file with its environment

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 training diverged, 130 interrupted. A failure prints
one line, or a traceback with WELLCOND_DEBUG=1.
Heavy imports happen inside each command, so that `--help` and usage errors respond at once. Commands that take names
import the plug-ins of other packages first (plugins.py).
`wellcond --install-completion` sets up your shell to complete commands, recipes, claims and models.
"""

import contextlib
import io
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from wellcond.cli.bench import bench
from wellcond.cli.demo import demo
from wellcond.cli.info import info
from wellcond.cli.ledger import ledger
from wellcond.cli.measure import measure
from wellcond.cli.options import with_plugins
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
    """Run the command line; any failure ends as one line and an exit code."""
    interrupt = partial(_interrupt, os.getpid())
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")  # where there is no κ, a ? is better than no result
    try:
        with _plain_warnings():
            app(prog_name="wellcond")
    except Exception as error:
        if os.environ.get("WELLCOND_DEBUG", "0") not in ("", "0"):
            raise
        Console(stderr=True).print(Text(f"error: {_one_line(error)}", style="red"), soft_wrap=True)
        sys.exit(1)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show our own warnings as one line each, for people who read a log and not our code; others as usual."""
    ours, others = Path(__file__).parents[1], warnings.showwarning

    def show(message: Warning | str, category: type[Warning], filename: str, *args: Any, **kwargs: Any) -> None:
        if Path(filename).is_relative_to(ours):
            Console(stderr=True).print(Text(f"warning: {message}", style="yellow"), soft_wrap=True)
        else:
            others(message, category, filename, *args, **kwargs)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _interrupt(main_process: int, number: int, frame: FrameType | None) -> None:
    """End a command on SIGTERM as on Ctrl-C, with code 130, unless it installs its own handler, as training does.

    During imports, exit at once: torch and timm take seconds to import and swallow exceptions meanwhile, and there is
    nothing to clean up yet.
    """
    if os.getpid() != main_process:  # forked by a command: end like any other process
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"Aborted.\n")
            os._exit(130)
        frame = frame.f_back
    raise KeyboardInterrupt


def _one_line(error: Exception) -> str:
    """Format an error: a ValueError is our own, and its message suffices; others get their type and a hint for more."""
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
