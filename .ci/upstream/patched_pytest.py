"""pytest for transformers' own tests, with every model patched that a test makes.

    python patched_pytest.py ATTENTION OUTCOMES PYTEST_ARGUMENT...

ATTENTION is a mechanism, or "softmax" to leave all models alone. OUTCOMES is the JSON file to write: the outcome of
each test, how many models were patched in it, and why others were not. Run it in the folder of a transformers checkout.

Processes spawned by a test import this file first, because it is the main module, so models are patched there too.
"""

import contextlib
import functools
import inspect
import json
import multiprocessing
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from hf_rfattn import patch_model

SOFTMAX = "softmax"
SECONDS = 600  # for one test: spawned processes may wait for each other
ATTENTION, OUTCOMES = sys.argv[1], Path(sys.argv[2])
PATCHED = OUTCOMES.with_suffix(".patched")  # one byte for each patched model, of all processes

refusals: Counter[str] = Counter()
_depth = 0  # constructors that are running: a model builds its parts, which are models too


def patch(model: PreTrainedModel) -> None:
    """Patch a model unless it is patched already; one that cannot be patched keeps softmax."""
    if not any(hasattr(module, "rf") for module in model.modules()):
        try:
            patch_model(model, ATTENTION)
        except (ValueError, NotImplementedError) as refusal:
            refusals[f"{type(model).__name__}: {refusal}"] += 1
            return
    with PATCHED.open("ab") as file:
        file.write(b".")


@contextlib.contextmanager
def outermost() -> Iterator[Callable[[PreTrainedModel], None]]:
    """Yield `patch` to the constructor of a whole model, and a function that does nothing to those of its parts."""
    global _depth
    _depth += 1
    try:
        yield patch if _depth == 1 else lambda model: None
    finally:
        _depth -= 1


def patch_every_model() -> None:
    """Wrap `from_pretrained` and the constructor of each model class that is defined from now on."""
    load = PreTrainedModel.from_pretrained.__func__
    define = PreTrainedModel.__init_subclass__.__func__

    @functools.wraps(load)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        with outermost() as finish:
            loaded = load(cls, *args, **kwargs)
            finish(loaded[0] if isinstance(loaded, tuple) else loaded)
            return loaded

    def patch_after(init: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(init)
        def __init__(self: PreTrainedModel, *args: Any, **kwargs: Any) -> None:
            with outermost() as finish:
                init(self, *args, **kwargs)
                finish(self)

        return __init__

    def __init_subclass__(cls: type, **kwargs: Any) -> None:
        define(cls, **kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = patch_after(cls.__init__)  # type: ignore[misc]

    PreTrainedModel.from_pretrained = classmethod(from_pretrained)
    PreTrainedModel.__init_subclass__ = classmethod(__init_subclass__)


def asks_if_it_may_see_attention(test: Callable[..., Any]) -> bool:
    """Whether a test asks for attention matrices only if `has_attentions` says that the architecture has them.

    Some others skip architectures without; these are not told.
    """
    test = inspect.unwrap(getattr(test, "place_as", test))  # parameterized keeps there what it wraps
    source = inspect.getsource(test) if inspect.isfunction(test) else ""
    return "self.has_attentions" in source and "not self.has_attentions" not in source


class Recorder:
    """A pytest plugin that writes OUTCOMES and shows progress."""

    def __init__(self) -> None:
        self.tests: dict[str, dict[str, Any]] = {}
        self.total = 0

    def pytest_sessionstart(self) -> None:
        source = str(Path("src").resolve())  # added by the conftest of the checkout; test the installed package instead
        sys.path[:] = [path for path in sys.path if path != source]
        PATCHED.write_bytes(b"")
        signal.signal(signal.SIGALRM, _time_out)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = len(session.items)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.tests[nodeid] = {"outcome": "passed", "patched": -PATCHED.stat().st_size}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: Any) -> Iterator[None]:
        if ATTENTION != SOFTMAX and asks_if_it_may_see_attention(item.function):
            item.instance.has_attentions = False
        signal.alarm(SECONDS)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        test = self.tests[report.nodeid]
        if report.failed:
            test |= {"outcome": "failed", "message": str(getattr(report.longrepr, "reprcrash", report.longrepr))}
        elif report.skipped and not hasattr(report, "context"):  # a subtest has a context
            test |= {"outcome": "skipped", "message": str(report.longrepr)}

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.tests[nodeid]["patched"] += PATCHED.stat().st_size
        for process in multiprocessing.active_children():  # of a test that timed out
            process.kill()
        if sys.__stderr__.isatty():
            print(f"{ATTENTION}: {len(self.tests)} of {self.total} tests", end="\r", file=sys.__stderr__, flush=True)

    def pytest_sessionfinish(self) -> None:
        document = {"tests": self.tests, "refusals": refusals}
        OUTCOMES.write_text(json.dumps(document, indent=2), encoding="utf-8")


def _time_out(*args: Any) -> None:
    raise TimeoutError(f"The test took more than {SECONDS} seconds.")


if ATTENTION != SOFTMAX:
    patch_every_model()

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[3:], plugins=[Recorder()]))
