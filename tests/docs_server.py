"""
A process that has imported the libraries once and forks for every command of the documentation, since importing them
takes most of a command's time. What a command does is not touched: its own entry point runs, in a process of its own,
with the caller's folder, environment and streams. Linux only.

    python tests/docs_server.py serve SOCKET     # until it is terminated
    python tests/docs_server.py page PAGE.json   # the blocks of a page, in order: see `run_page`

`CLIENT` is the text of the executables `looped`, `lm_eval` and `python` that hand their call to the server.
"""

import atexit
import doctest
import gc
import json
import linecache
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path


CLIENT = """\
#!{python} -IS
import json, os, socket, sys
name, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
if name == "python" and arguments[:1] not in (["-m"], ["-c"], [{server!r}]):
    os.execv({python!r}, [{python!r}, *arguments])
call = {{"argv": [name, *arguments], "cwd": os.getcwd(), "env": dict(os.environ)}}
server = socket.socket(socket.AF_UNIX)
server.connect({socket!r})
socket.send_fds(server, [b"+"], [0, 1, 2])
server.sendall(json.dumps(call).encode() + b"\\n")
status = server.makefile().readline()
sys.exit(int(status) if status else 1)
"""


def serve(path: str) -> dict:
    """Never returns in the server; in a fork, the call that it is to run."""
    # What commands import, before the fork.
    import accelerate  # noqa: F401
    import lm_eval.evaluator  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    import pandas  # noqa: F401
    import peft  # noqa: F401
    import transformers

    import modeling_looped.eval.run
    import modeling_looped.recipes.launch  # noqa: F401

    for name in ("LlamaForCausalLM", "Trainer", "AutoModelForCausalLM", "AutoTokenizer"):
        getattr(transformers, name)

    gc.collect()
    gc.freeze()  # what is here stays in memory that all forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path + ".new")
    listener.listen()
    os.rename(path + ".new", path)  # whoever sees it can connect
    while True:
        connection, _ = listener.accept()
        if os.fork():
            connection.close()
            continue
        listener.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _, streams, _, _ = socket.recv_fds(connection, 1, 3)
        call = json.loads(connection.makefile().readline())
        worker = os.fork()
        if worker:
            _report(connection, worker)
            os._exit(0)
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        return call


def _report(connection: socket.socket, worker: int) -> None:
    """Waits for the command, and ends it where its caller has gone."""
    ended = os.pidfd_open(worker)
    ready, _, _ = select.select([ended, connection], [], [])
    if ended not in ready:
        os.kill(worker, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1])
    connection.sendall(f"{status if status >= 0 else 128 - status}\n".encode())


def run_call(argv: list[str], cwd: str, env: dict[str, str]) -> None:
    """The command, as its own executable would begin it."""
    import runpy

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    name, *arguments = argv
    here = "" if name == "python" else str(Path(sys.executable).parent)
    sys.path[0] = here
    if name == "python" and arguments[0] == "-m":
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif name == "python" and arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    elif name == "python":
        sys.argv = arguments
        main(arguments[1:])
    elif name == "lm_eval":
        from lm_eval.__main__ import cli_evaluate

        sys.argv = argv
        sys.exit(cli_evaluate())
    else:
        import looped_cli

        sys.argv = argv
        sys.exit(looped_cli.main())


def run_page(page: str, blocks: list[dict]) -> None:
    """
    Runs the blocks of a page in the order in which they stand: Python in one namespace, interactive sessions against
    what they show, shell blocks in a bash each. The first one that fails ends it with the page, its line and the block.
    """
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    lines = [""] * (max(block["line"] + len(block["code"].splitlines()) for block in blocks) + 1)
    for block in blocks:
        for number, text in enumerate(block["code"].splitlines()):
            lines[block["line"] - 1 + number] = text
    linecache.cache[page] = (0, None, [text + "\n" for text in lines], page)  # tracebacks show the page's lines
    linecache.checkcache = lambda filename=None: None
    namespace = {"__name__": "__main__"}
    for block in blocks:
        began = time.perf_counter()
        kind, line, code = block["language"], block["line"], block["code"]
        try:
            if kind == "python":
                exec(compile("\n" * (line - 1) + code, page, "exec"), namespace)
            elif kind == "pycon":
                example = doctest.DocTestParser().get_doctest(code, namespace, page, page, line - 1)
                if doctest.DocTestRunner(optionflags=options).run(example, clear_globs=False).failed:
                    raise SystemExit(f"{page}:{line}: this session gives something else")
            else:
                trap = f"trap 'echo \"{page}:$((LINENO + {line - 1})): exit status $?\" >&2' ERR; "
                subprocess.run(["bash", "-euo", "pipefail", "-c", trap + code], check=True)
        except BaseException as error:
            sys.stdout.flush()
            if isinstance(error, Exception) and not isinstance(error, subprocess.CalledProcessError):
                traceback.print_exc()
            if isinstance(error, SystemExit) and isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            print(f"\n{page}:{line}: this block failed ({type(error).__name__}):\n{code}", file=sys.stderr)
            raise SystemExit(1) from None
        sys.stdout.flush()
        print(f"{page}:{line}: {kind} block, {time.perf_counter() - began:.1f} s", flush=True)


def ended(function, **arguments) -> int:
    """
    Calls it and does what Python does at its end, except to take apart every module, which takes seconds. Returns the
    exit status.
    """
    status = 0
    try:
        function(**arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    return status


def main(arguments: list[str]) -> None:
    action, path = arguments
    if action == "serve":
        call = serve(path)
        os._exit(ended(run_call, **call))
    else:
        run_page(**json.loads(Path(path).read_text()))


if __name__ == "__main__":
    main(sys.argv[1:])
