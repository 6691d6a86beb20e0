"""A process of its own for the real client: HF_ENDPOINT and HF_HUB_OFFLINE are read when huggingface_hub is imported.

Reads a JSON object a line: {"environment": changes to it, "words": of an `hf-rfattn` command} is answered by exit code
and output, {"environment": ..., "load": {"name": ...}} by the logits of a model.
"""

import json
import os
import sys
import traceback

import torch
import transformers
from typer.testing import CliRunner

import hf_rfattn  # noqa: F401
from hf_rfattn.cli import app

torch.set_num_threads(1)
transformers.logging.disable_progress_bar()


def wait_less():
    """The client's pauses between attempts, a hundredth as long."""
    import time

    from huggingface_hub.utils import _http

    class Clock:
        def __getattr__(self, name):
            return getattr(time, name)

        def sleep(self, seconds):
            time.sleep(seconds / 100)

    _http.time = Clock()


def run(words):
    result = CliRunner().invoke(app, words)
    error = "".join(traceback.format_exception(result.exception)) if result.exception else ""
    return {"code": result.exit_code, "output": result.output, "traceback": error}


def change(environment):
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def load(name, revision=None):
    model = transformers.AutoModelForSequenceClassification.from_pretrained(name, revision=revision).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(name, revision=revision)
    with torch.no_grad():
        logits = model(torch.arange(2, 42).reshape(2, 20)).logits
    return {"logits": logits.tolist(), "ids": tokenizer("a b c").input_ids}


if __name__ == "__main__":
    wait_less()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # nothing else may write where the answers go
    for line in sys.stdin:
        request = json.loads(line)
        before = {name: os.environ.get(name) for name in request["environment"]}
        change(request["environment"])
        try:
            answer = load(**request["load"]) if "load" in request else run(request["words"])
        except Exception:
            answer = {"error": traceback.format_exc()}
        change(before)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
