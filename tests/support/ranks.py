"""Processes of a gloo group that run functions of tests, all the same one at a time."""

import contextlib
import datetime
import multiprocessing
import tempfile
import traceback

import torch
import torch.distributed as dist

CONTEXT = multiprocessing.get_context("forkserver")  # forks of a process that has imported everything
CONTEXT.set_forkserver_preload(["torch", "transformers", "hf_rfattn.integration", "support.models", "support.ranks"])


class Ranks:
    """`ranks(function, *arguments)` calls it in each process and returns what each gives, or raises what one raises.

    A process that fails leaves the others waiting, so all are started anew after that.
    """

    def __init__(self, size, seconds=300):
        self.size, self.seconds, self.running = size, seconds, []

    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        for rank in range(self.size):
            mine, theirs = CONTEXT.Pipe()
            arguments = rank, self.size, f"{self.folder.name}/store", theirs, self.seconds
            process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self.running.append((process, mine))

    def __call__(self, function, *arguments):
        if not self.running:
            self.start()
        for _, pipe in self.running:
            pipe.send((function, arguments))
        answers = []
        for _, pipe in self.running:
            try:
                answers.append(pipe.recv() if pipe.poll(2 * self.seconds) else (False, "no answer"))
            except EOFError:
                answers.append((False, "it has ended"))
        failures = [f"rank {rank}: {answer}" for rank, (good, answer) in enumerate(answers) if not good]
        if failures:
            self.close()
            raise AssertionError("\n".join(failures))
        return [answer for _, answer in answers]

    def close(self):
        for process, pipe in self.running:
            pipe.close()
            process.kill()
            process.join()
        if self.running:
            self.folder.cleanup()
        self.running = []


def _serve(rank, size, store, pipe, seconds):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timeout)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments = pipe.recv()
            try:
                pipe.send((True, function(*arguments)))
            except Exception:
                pipe.send((False, traceback.format_exc()))
