"""Progress: a bar with loss, speed and time left on a terminal, a line now and then elsewhere."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

SECONDS_BETWEEN_LINES = 20.0


class Progress:
    """Tells the user on the main process; silent on the others."""

    def __init__(self, speaks: bool):
        self.speaks = speaks
        self.console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._bar: Bar | None = None
        self._last_line = 0.0

    def say(self, text: str) -> None:
        if self.speaks:
            (self._bar.console if self._bar else self.console).print(text)

    @contextmanager
    def phase(self, name: str, total: int, done: int = 0) -> Iterator[Callable[..., None]]:
        """Within it, call what it gives once a step, with a note such as "loss 0.42" if there is one."""
        if not self.speaks:
            yield lambda note="": None
            return
        if self.console.is_terminal:
            yield from self._with_bar(name, total, done)
        else:
            yield from self._with_lines(name, total, done)

    def _with_bar(self, name: str, total: int, done: int) -> Iterator[Callable[..., None]]:
        outer = self._bar
        columns = (
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
        )  # fmt: skip
        bar = outer or Bar(*columns, console=self.console, transient=False)
        if outer is None:
            bar.start()
            self._bar = bar
        row = bar.add_task(name, total=total, completed=done, note="")

        def advance(note: str = "") -> None:
            bar.update(row, advance=1)
            if note:
                bar.update(row, note=note)

        try:
            yield advance
        finally:
            if outer is None:
                bar.stop()
                self._bar = None
            else:
                bar.remove_task(row)

    def _with_lines(self, name: str, total: int, done: int) -> Iterator[Callable[..., None]]:
        started, first, last_note = time.monotonic(), done, ""

        def advance(note: str = "") -> None:
            nonlocal done, last_note
            done += 1
            last_note = note or last_note
            now = time.monotonic()
            if now - max(started, self._last_line) >= SECONDS_BETWEEN_LINES:
                self._last_line = now
                left = (now - started) / (done - first) * (total - done)
                self.console.print(f"{name} {done}/{total}  {last_note}  {clock(now - started)}, {clock(left)} left")

        yield advance


def clock(seconds: float) -> str:
    """
    >>> clock(75), clock(4000)
    ('1:15', '1:06:40')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
