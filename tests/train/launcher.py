"""Starts commands of wellcond as processes of their own, quickly: everything is imported once, then forked.

A line of JSON each way: {"start": [arguments], "env": {…}, "log": file} → {"pid": n}; {"poll": n} → {"code": m | null}.
"""

import json
import os
import signal
import sys


def preload() -> None:
    """All that a training imports, so that a child spends its time on training."""
    import sklearn.datasets  # noqa: F401
    import timm.optim
    import timm.scheduler
    import timm.utils  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp  # noqa: F401

    import wellcond.cli
    import wellcond.experiments.training
    import wellcond.train.loop  # noqa: F401


def start(arguments: list[str], environment: dict[str, str], log: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(environment)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(handle, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.argv = ["wellcond", *arguments]
        from wellcond.cli import main

        main()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def poll(pid: int) -> int | None:
    found, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if found else None


def serve() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a keyboard that stops the tests: they end this process
    preload()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            answer = {"code": poll(request["poll"])}
        else:
            answer = {"pid": start(request["start"], request["env"], request["log"])}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
