import io

import pytest
from rich.console import Console

from wellcond.progress import steps


def told(console, *, lines=True):
    with steps(2, console, lines=lines) as begin:
        begin("first [of] two")
        begin.detail("half way")
        console.print("a result")
        begin("second")
    return console.file.getvalue()


def test_without_a_terminal_each_step_is_a_line():
    assert told(Console(file=io.StringIO(), width=80)) == "first [of] two\na result\nsecond\n"
    assert told(Console(file=io.StringIO(), width=80), lines=False) == "a result\n"


def test_in_a_terminal_a_bar_shows_them_and_leaves_only_what_was_printed():
    told_there = told(Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"}))
    assert "a result" in told_there
    assert "1/2" in told_there
    assert "second" in told_there
    assert told_there.endswith("\x1b[2K")  # the last line is erased


def test_a_step_that_fails_ends_the_bar_and_is_told():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm"})

    def fail():
        with steps(1, console) as begin:
            begin("first")
            raise ValueError("it is lost")

    with pytest.raises(ValueError, match="lost"):
        fail()
    with steps(1, console) as begin:  # no bar is left on the console
        begin("again")
