import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from wellcond import cli

PATHS = [
    SimpleNamespace(name="fused dct", available=False, taken=False, why="no CUDA device [here]"),
    SimpleNamespace(name="gram", available=True, taken=True, why="two extreme values are enough"),
]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch):
    for name in ("FORCE_COLOR", "NO_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "WELLCOND_DEBUG"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")


@pytest.fixture
def wellcond(monkeypatch, capsys):
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["wellcond", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        captured = capsys.readouterr()
        return exit_.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def stand_in(monkeypatch):
    """Put a module in the place of one of ours, so that a command's wiring is tested without its work."""

    def put(name: str, **attributes) -> None:
        module = ModuleType(name)
        vars(module).update(attributes)
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent not in sys.modules:
            put(parent, __path__=[])
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)

    return put


def test_letters_that_the_output_lacks_do_not_end_a_command():
    """Such as ≥ and κ in a file on Windows, whose encoding is not UTF-8."""
    program = [sys.executable, "-c", "from wellcond.cli import main; main()", "info"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "epsilon ?" in done.stdout


def fail(error: BaseException):
    def run(*args, **kwargs):
        raise error

    return run


def test_version(wellcond):
    code, out, _ = wellcond("--version")
    assert (code, out.split()[0]) == (0, "wellcond")


def test_no_arguments_show_the_help(wellcond):
    _, out, err = wellcond()
    for command in ("info", "demo", "bench"):
        assert command in out + err


@pytest.mark.parametrize(
    "arguments", [["nope"], ["bench", "nope"], ["info", "--nope"], ["bench", "kappa", "--batch-size", "0"]]
)
def test_wrong_usage_exits_2_and_writes_to_stderr(wellcond, arguments):
    code, out, err = wellcond(*arguments)
    assert (code, out) == (2, "")
    assert "Usage: wellcond" in err


def test_info_prints_versions_device_and_paths(wellcond, stand_in):
    stand_in("wellcond.numerics.fastpaths", fast_paths=lambda: PATHS)
    code, out, _ = wellcond("info")
    assert code == 0
    for word in ("wellcond", "torch", "CPU", "device", "threads", "fused dct", "no CUDA device [here]", "two extreme"):
        assert word in out


def test_info_as_json(wellcond, stand_in):
    stand_in("wellcond.numerics.fastpaths", fast_paths=lambda: PATHS)
    code, out, _ = wellcond("info", "--json")
    facts = json.loads(out)
    assert code == 0
    assert facts["fast_paths"] == [vars(path) for path in PATHS]
    assert facts["versions"]["python"].startswith("3.")
    assert facts["threads"] >= 1


def test_info_of_this_machine(wellcond):
    code, out, err = wellcond("info", "--json")
    assert code == 0, err
    for path in json.loads(out)["fast_paths"]:
        assert path["why"]
        assert path["available"] or not path["taken"]


def test_demo_passes_its_folder_on(wellcond, stand_in):
    calls = []
    stand_in("wellcond.demo.demo", run=calls.append)
    assert wellcond("demo")[0] == 0
    assert wellcond("demo", "--output", "elsewhere")[0] == 0
    assert calls == [Path("demo"), Path("elsewhere")]


@pytest.mark.parametrize("name", ["graying", "kappa"])
def test_bench_passes_its_options_on(wellcond, stand_in, name, monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    stand_in(f"wellcond.bench.{name}", run=lambda **options: calls.append(options))
    assert wellcond("bench", name)[0] == 0
    options = ["--output", "a.json", "--device", "cuda:1", "--batch-size", "8", "--quick"]
    assert wellcond("bench", name, *options)[0] == 0
    assert calls == [
        {"output": None, "device": None, "batch_size": None, "quick": False},
        {"output": Path("a.json"), "device": "cuda:1", "batch_size": 8, "quick": True},
    ]


@pytest.mark.parametrize("name", ["graying", "kappa", "probe", "attention", "train"])
@pytest.mark.parametrize(("device", "gpus"), [("cuda", 0), ("cuda:1", 1), ("gpu", 1)])
def test_bench_on_a_device_that_is_not_there_is_wrong_usage(wellcond, stand_in, monkeypatch, name, device, gpus):
    module = "training" if name == "train" else name
    stand_in(f"wellcond.bench.{module}", run=fail(AssertionError("something was measured")))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    code, _, err = wellcond("bench", name, "--device", device)
    assert code == 2
    assert "use cpu, cuda or cuda:1" in err if device == "gpu" else "torch sees" in err


def test_a_value_error_is_one_line(wellcond, stand_in):
    stand_in("wellcond.demo.demo", run=fail(ValueError("epsilon is 2;\n  choose one in (0, 1], [bold] " + "x" * 300)))
    code, out, err = wellcond("demo")
    assert (code, out) == (1, "")
    assert err == "error: epsilon is 2; choose one in (0, 1], [bold] " + "x" * 300 + "\n"


def test_another_error_also_names_its_kind(wellcond, stand_in):
    stand_in("wellcond.demo.demo", run=fail(RuntimeError("out of memory")))
    code, _, err = wellcond("demo")
    assert code == 1
    assert err == "error: RuntimeError: out of memory (WELLCOND_DEBUG=1 shows where)\n"


def test_debug_shows_the_traceback(stand_in, monkeypatch):
    stand_in("wellcond.demo.demo", run=fail(ValueError("epsilon is 2")))
    monkeypatch.setenv("WELLCOND_DEBUG", "1")
    monkeypatch.setattr(sys, "argv", ["wellcond", "demo"])
    with pytest.raises(ValueError, match="epsilon is 2"):
        cli.main()


def test_an_interruption_exits_130(wellcond, stand_in):
    stand_in("wellcond.demo.demo", run=fail(KeyboardInterrupt()))
    assert wellcond("demo")[0] == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_torch_is_imported_exits_130(tmp_path, number):
    command = [
        sys.executable,
        "-m",
        "wellcond",
        "train",
        "digits",
        "--scale",
        "smoke",
        "--output",
        str(tmp_path / "run"),
    ]
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    maps, end = Path(f"/proc/{started.pid}/maps"), time.monotonic() + 300
    while "libtorch" not in maps.read_text() and time.monotonic() < end:
        time.sleep(0.001)
    started.send_signal(number)
    said = started.communicate(timeout=300)[1]
    assert (started.returncode, said) == (130, "Aborted.\n")
    assert not (tmp_path / "run").exists()


def test_sigterm_ends_a_command_as_ctrl_c_does(stand_in, monkeypatch):
    """With its clean-up, and the handlers of before are back."""
    cleaned = []

    def run(*args, **kwargs):
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            cleaned.append(True)

    stand_in("wellcond.demo.demo", run=run)
    monkeypatch.setattr(sys, "argv", ["wellcond", "demo"])
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the old command would end pytest
    try:
        with pytest.raises(SystemExit) as exit_:
            cli.main()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (exit_.value.code, cleaned) == (130, [True])


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_is_for_those_who_want_it(wellcond, stand_in, monkeypatch, no_color):
    stand_in("wellcond.demo.demo", run=fail(ValueError("no")))
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    err = wellcond("demo")[2]
    assert ("\x1b[31m" in err) is not no_color


def test_python_m_wellcond():
    done = subprocess.run([sys.executable, "-m", "wellcond", "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "wellcond")


def test_reproduce_passes_its_options_on(wellcond, stand_in):
    calls = []

    def run(ids, **options):
        calls.append((ids, options))
        return 130

    stand_in("wellcond.claims.reproduce", reproduce=run)
    given = [
        "--scale",
        "lab",
        "--seeds",
        "5",
        "--data-dir",
        "cifar10=a",
        "--data-dir",
        "cifar100=b",
        "--set",
        "epochs=7",
        "lr=0.1",
        "--jobs",
        "4",
        "--arm",
        "both",
        "--arm",
        "no-sa",
        "--time-limit",
        "9m",
    ]
    assert (
        wellcond(
            "reproduce", "asa-fig1c", "asa-fig2", *given, "--grid-epochs", "3", "--output", "o", "--evidence", "e"
        )[0]
        == 130
    )
    options = {"scale": "lab", "seeds": 5, "data_dirs": ["cifar10=a", "cifar100=b"], "settings": ["epochs=7", "lr=0.1"]}
    options |= {"grid_epochs": 3, "output": Path("o"), "evidence": Path("e"), "jobs": 4, "device": None}
    options |= {"time_limit": "9m", "whole_queue": False, "training": True, "arms": ["both", "no-sa"]}
    assert calls == [(["asa-fig1c", "asa-fig2"], options)]


def test_reproduce_wants_claims_or_all(wellcond):
    code, _, error = wellcond("reproduce", "--scale", "smoke")
    assert code == 2
    assert "--all" in error


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["sky-lr"], "there is no claim 'sky-lr'"),
        (["sky-lra", "--arm", "softmx"], "did you mean softmax?"),
        (["asa-fig1c", "--scale", "lab"], "--data-dir cifar10=FOLDER"),
        (["asa-fig1c", "--time-limit", "soon"], "90s, 9m or 1h30m"),
        (["asa-fig1c", "--scale", "smok"], "did you mean smoke"),
        (["sky-lra", "--scale", "smoke", "--data-dir", "lra_listops"], "--data-dir is for --scale lab"),
        (["sky-lra", "--scale", "lab", "--data-dir", "digits"], "--data-dir digits: nothing"),
    ],
)
def test_reproduce_ends_with_2_for_what_it_cannot_do(wellcond, wrong, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, error = wellcond("reproduce", *wrong)
    assert code == 2
    assert said in error
    assert not list(tmp_path.iterdir())


def test_a_ledger_of_no_evidence_is_not_written(wellcond, tmp_path):
    page = tmp_path / "claims.md"
    code, _, error = wellcond("ledger", "--evidence", str(tmp_path / "evidnce"), "--page", str(page))
    assert code == 2
    assert "does not exist" in error
    assert not list(tmp_path.iterdir())


def test_the_ledger_is_checked_by_its_exit_code(wellcond, tmp_path):
    page, evidence = tmp_path / "claims.md", tmp_path / "evidence"
    evidence.mkdir()
    places = ["--evidence", str(evidence), "--page", str(page)]
    assert wellcond("ledger", "--check", *places)[0] == 1
    assert wellcond("ledger", *places)[0] == 0
    assert wellcond("ledger", "--check", *places)[0] == 0
    page.write_text(page.read_text(encoding="utf-8").replace("| no evidence yet |", "| holds |", 1), encoding="utf-8")
    code, _, err = wellcond("ledger", "--check", *places)
    assert code == 1
    assert "holds |" in err


@pytest.mark.parametrize("command", [["train", "digits"], ["reproduce", "asa-fig1c", "--scale", "smoke"]])
def test_one_set_takes_several_settings(wellcond, command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for settings, wrong in ((["lr=0.1", "nonsense=1"], "nonsense"), (["nonsense=1", "lr=0.1"], "nonsense")):
        code, _, error = wellcond(*command, "--set", *settings)
        assert code in (1, 2)
        assert f"there is no setting '{wrong}'" in error
    code, _, error = wellcond(*command, "--set", "lr=0.1", "epochs")
    assert code in (1, 2)
    assert "a setting is written name=value, got 'epochs'" in error
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "found"),
    [
        ("wellcond re", {"report", "reproduce"}),
        ("wellcond train vit_t", {"vit_tiny"}),
        ("wellcond train digits --scale sm", {"smoke"}),
        ("wellcond train digits --model vit_tiny_patch16_22", {"vit_tiny_patch16_224"}),
        ("wellcond reproduce asa-fig1", {"asa-fig1b", "asa-fig1c"}),
        ("wellcond theory sky-lemmaC", {"sky-lemmaC1", "sky-lemmaC2"}),
        ("wellcond measure swin_base_patch4_window12", {"swin_base_patch4_window12_384"}),
        ("wellcond measure vit_tiny_patch16_224 --sites sa,+m", {"sa,+mlp"}),
        ("wellcond measure vit_tiny_patch16_224 --gray d", {"dct"}),
        ("wellcond train digits --set attention=sk", {"attention=skyformer"}),
        ("wellcond train digits --data-dir cifar10", {"cifar10:", "cifar100:"}),
    ],
)
def test_the_shell_completes_commands_recipes_claims_and_models(wellcond, monkeypatch, words, found):
    monkeypatch.setenv("_WELLCOND_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert set(wellcond()[1].split()) == found


def test_the_completed_names_are_all_there_are():
    """They are read without what they belong to, which takes seconds to import."""
    import timm

    from wellcond.attention import ATTENTIONS
    from wellcond.claims.catalogue import CLAIMS
    from wellcond.cli.options import (
        complete_attentions,
        complete_claims,
        complete_data,
        complete_models,
        complete_statements,
    )
    from wellcond.data.sources import SOURCES
    from wellcond.theory.registry import STATEMENTS

    ours = [name for name in timm.list_models() if timm.model_entrypoint(name).__module__.startswith("timm.")]
    assert complete_models("") == sorted(ours)  # other tests register models of their own
    assert set(complete_statements("")) == set(STATEMENTS)
    assert set(complete_claims("")) == set(CLAIMS)
    assert set(complete_attentions("")) == set(ATTENTIONS)
    assert set(complete_data("")) == {
        name if source.may_stand_alone else f"{name}:" for name, source in SOURCES.items()
    }


def test_completion_needs_no_torch():
    code = "import sys, wellcond.cli.options as o; o.complete_models('a'); o.complete_recipes(''); "
    code += "o.complete_claims(''); o.complete_statements(''); o.complete_attentions(''); o.complete_data(''); "
    code += "o.complete_sites(''); o.complete_settings('attention='); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_every_option_says_what_it_does():
    import typer.main

    def walk(command, name):
        for parameter in command.params:
            if not getattr(parameter, "hidden", False):
                assert getattr(parameter, "help", None), f"{name} {parameter.name}"
        for child, one in getattr(command, "commands", {}).items():
            assert one.help
            walk(one, f"{name} {child}")

    walk(typer.main.get_command(cli.app), "wellcond")
