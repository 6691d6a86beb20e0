"""A process that has imported everything and forks children that run recipes, so that a start takes no time.

Tests that kill a run many times could not be afforded otherwise. As a script it serves requests, one JSON object a
line; `Zygote` is the other end.
"""

import contextlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"


class Zygote:
    """Starts recipes. Close it when done."""

    def __init__(self, logs: Path, environment):
        self.logs = logs
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.count = 0

    def ask(self, **request):
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def start(self, script, *arguments, processes=1, environment=None):
        """A run on so many processes, as torchrun would start it."""
        self.count += 1
        log = self.logs / f"run-{self.count}.log"
        port = free_port()
        pids = []
        for rank in range(processes):
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            variables = {**(environment or {}), **(place if processes > 1 else {})}
            pids.append(
                self.ask(
                    script=str(script), arguments=list(map(str, arguments)), log=str(log),
                    environment={k: str(v) for k, v in variables.items()},
                )
            )  # fmt: skip
        return Run(self, pids, log)

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)


class Run:
    def __init__(self, zygote, pids, log):
        self.zygote, self.pids, self.log = zygote, pids, log

    def kill(self):
        """-9, all processes of the run, as a power cut would."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return self.wait()

    def alive(self):
        return any(self.zygote.ask(alive=pid) for pid in self.pids)

    def wait(self, check=False, seconds=150):
        """Exit codes; raises with the log if `check` and one is not 0."""
        deadline = time.monotonic() + seconds
        while self.alive():
            if time.monotonic() > deadline:
                self.kill()
                raise TimeoutError(self.log.read_text()[-4000:])
            time.sleep(0.02)
        codes = [self.zygote.ask(code=pid) for pid in self.pids]
        if check and any(codes):
            raise RuntimeError(f"exit codes {codes}\n{self.log.read_text()[-4000:]}")
        return codes


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve():
    """Imports, but never trains by itself: autograd's threads would not survive a fork."""
    sys.path[:0] = [str(RECIPES), str(ROOT / "tests")]
    import finetune_glue  # noqa: F401
    import finetune_lm  # noqa: F401
    import finetune_squad  # noqa: F401
    import matplotlib.backends.backend_agg
    import matplotlib.figure  # noqa: F401
    import torch
    import transformers

    import hf_rfattn

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    tiny = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    hf_rfattn.patch_model(transformers.BertForSequenceClassification(tiny), "favor+")  # reads sources, which takes time
    codes = {}
    for line in sys.stdin:
        request = json.loads(line)
        if "script" in request:
            pid = os.fork()
            if pid == 0:
                _child(request)
            codes[pid] = None
            answer = pid
        elif "alive" in request:
            pid = request["alive"]
            if codes[pid] is None:
                ended, status = os.waitpid(pid, os.WNOHANG)
                codes[pid] = os.waitstatus_to_exitcode(status) if ended else None
            answer = codes[pid] is None
        else:
            answer = codes[request["code"]]
        print(json.dumps(answer), flush=True)


def _child(request):
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(0)
    os.environ.update(request["environment"])
    sys.argv = [request["script"], *request["arguments"]]
    code = 1
    try:
        runpy.run_path(request["script"], run_name="__main__")
        code = 0
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code, file=sys.stderr)
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
