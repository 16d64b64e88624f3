"""Start wellcond commands quickly in separate processes: everything is imported once, then forked.

The protocol is a line of JSON each way: {"start": [arguments], "env": {…}, "log": file, …} → {"pid": n}, likewise
{"program": text, …}; {"poll": n} → {"code": m or null}.
"""

import contextlib
import importlib.util
import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from typing import Any


def preload() -> None:
    """Import all that a training needs, so that a child spends its time on training."""
    import sklearn.datasets  # noqa: F401
    import timm.optim
    import timm.scheduler
    import timm.utils  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp
    import torch.distributed.launcher.api  # noqa: F401

    import wellcond.claims.runs
    import wellcond.cli
    import wellcond.cli.training
    import wellcond.train.loop

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        wellcond.cli.app(["train", "--settings"], standalone_mode=False)  # what parsing a command imports
    if importlib.util.find_spec("vl_convert"):
        import altair  # noqa: F401

        from wellcond.report import page

        # Not here: it starts threads, which do not survive a fork.
        made = "from wellcond.report import page; print(page._charting(), end='')"
        script = subprocess.run([sys.executable, "-c", made], capture_output=True, text=True, check=True).stdout
        page._charting = lambda: script


def start(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(request["env"])
        handle = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(handle, stream)
        os.dup2(os.open(request.get("input", os.devnull), os.O_RDONLY), 0)
        if "program" in request:
            run_program(request["program"], request["arguments"])
            raise SystemExit(0)
        if request["slow_disk"]:
            slow_down(request["slow_disk"])
        if request["again"]:
            save_again()
        if request["spoilt"]:
            spoil(request["spoilt"])
        if request["file_limit"]:
            limits = (request["file_limit"], resource.getrlimit(resource.RLIMIT_FSIZE)[1])
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        if request["elastic"]:
            run_elastic(request["start"], request["elastic"])
        else:
            run_command(request["start"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_command(arguments: list[str]) -> None:
    from wellcond.cli import main

    sys.argv = ["wellcond", *arguments]
    main()


def run_program(text: str, arguments: list[str]) -> None:
    """Do what `python -c text arguments` would do."""
    sys.argv = ["-c", *arguments]
    exec(compile(text, "<program>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


def worker(arguments: list[str]) -> int:
    """Run a command in a process of torchrun's agent, which treats any SystemExit as a failure."""
    try:
        run_command(arguments)
    except SystemExit as end:
        if end.code not in (0, None):
            raise
    return 0


def run_elastic(arguments: list[str], number: int) -> None:
    """Do what `torchrun --nproc-per-node N --max-restarts 1` does, with forked processes."""
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=number, max_restarts=1, start_method="fork", monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", run_id=str(os.getpid()),
    )  # fmt: skip
    elastic_launch(config, worker)(arguments)


def slow_down(seconds: float) -> None:
    """Make fsync slow, so that a test can catch the process while it writes."""
    fsync = os.fsync

    def slow(handle: int) -> None:
        time.sleep(seconds)
        fsync(handle)

    os.fsync = slow


def save_again() -> None:
    """Make a training save its state once more as soon as it is loaded."""
    from wellcond.train.states import States

    restore = States.restore

    def restored(self: States) -> int:
        step = restore(self)
        self.saved_step = -1
        self.save(step, must=True)
        return step

    States.restore = restored


def spoil(step: int) -> None:
    """Make the loss NaN at its `step`-th call."""
    from wellcond.train.tasks import Classify

    calls, loss = [0], Classify.loss

    def spoilt(*arguments: Any) -> Any:
        calls[0] += 1
        return loss(*arguments) * (float("nan") if calls[0] == step else 1)

    Classify.loss = spoilt


def poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C the tests end this process themselves
    preload()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = {"code": poll(request["poll"])}
        else:
            answer = {"pid": start(request)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
