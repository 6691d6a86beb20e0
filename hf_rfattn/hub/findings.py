"""Which results stand beside which, and what they say in plain words. Every number here comes from result documents."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..mechanisms.naming import mechanism_names_in
from ..results import SOFTMAX, Metric, Result, SpeedResult, TaskResult, measured_crossover, number
from ..results.controls import FAR, NEAR, NO_ATTENTION, control_of
from .folder import CheckpointFolder

THIS, SAME_BUDGET, OTHER_SEED = "this model", "softmax, same budget", "the same, another run"
OTHER = "another mechanism"
ORDER = [THIS, OTHER_SEED, SAME_BUDGET, FAR, NEAR, NO_ATTENTION, OTHER]


@dataclass(frozen=True)
class Row:
    role: str
    result: TaskResult


@dataclass(frozen=True)
class Comparison:
    """Results of one task on the same data with the same budget; the first row is the checkpoint's own."""

    rows: tuple[Row, ...]

    @property
    def own(self) -> TaskResult:
        return self.rows[0].result

    def with_role(self, role: str) -> list[TaskResult]:
        return [row.result for row in self.rows if row.role == role]

    @property
    def missing(self) -> list[str]:
        """Rows that every accuracy table should have, and this one has not."""
        wanted = [SAME_BUDGET, NEAR, FAR, NO_ATTENTION]
        own = mechanism_names_in(self.own.attention)
        if "fmm" not in own:  # it has no near and far field to tell apart
            wanted.remove(FAR)
        if own == ["band"]:
            wanted.remove(NEAR)
        if own == ["average"]:
            wanted.remove(NO_ATTENTION)
        return [role for role in wanted if not self.with_role(role)]


def compare(folder: CheckpointFolder, results: Sequence[Result]) -> list[Comparison]:
    """One comparison for each task that this checkpoint was measured on."""
    tasks = [result for result in results if isinstance(result, TaskResult)]
    groups: dict[str, list[TaskResult]] = {}
    for result in tasks:
        groups.setdefault(result.measured_on, []).append(result)
    found = []
    for group in groups.values():
        same = [result for result in group if folder.holds(result.attention)]
        own = _of_this_checkpoint(folder, same)
        if own is not None:
            rows = [Row(_role(result, own, same), result) for result in group]
            found.append(Comparison(tuple(sorted(rows, key=lambda row: (ORDER.index(row.role), row.result.seed)))))
    return found


def speeds(folder: CheckpointFolder, results: Sequence[Result]) -> list[SpeedResult]:
    """Timings of this checkpoint's attention."""
    return [
        result
        for result in results
        if isinstance(result, SpeedResult) and folder.holds(result.attention) and _may_be(folder, result)
    ]


def _may_be(folder: CheckpointFolder, result: Result) -> bool:
    return result.checkpoint is None or result.checkpoint == folder.fingerprint


def _of_this_checkpoint(folder: CheckpointFolder, same: Sequence[TaskResult]) -> TaskResult | None:
    """The run that saved this folder: the one that names its fingerprint, or the only one that names none."""
    named = [result for result in same if result.checkpoint == folder.fingerprint]
    possible = named or [result for result in same if result.checkpoint is None]
    if len(possible) > 1:
        raise ValueError(
            f"{', '.join(result.file for result in possible)}: any of these runs may have made {folder.path}. Give the "
            f'one that did "checkpoint": "{folder.fingerprint}", or leave one file.'
        )
    return possible[0] if possible else None


def _role(result: TaskResult, own: TaskResult, same: Sequence[TaskResult]) -> str:
    if result is own:
        return THIS
    if result in same:
        return OTHER_SEED
    if result.attention == SOFTMAX:
        return SAME_BUDGET
    return control_of(_names(result.attention), [_names(own.attention)]) or OTHER


def _names(attention: Any) -> list[str]:
    """Of a row whose layers are alike."""
    return [] if isinstance(attention, Mapping) and "layers" in attention else mechanism_names_in(attention)


def crossover(speed: SpeedResult) -> int | None:
    """The measured length from which on the model is faster than softmax, if there is one."""
    return measured_crossover([t.length for t in speed.lengths], [t.speed for t in speed.lengths])[0]


def limitations(comparisons: Sequence[Comparison], timings: Sequence[SpeedResult]) -> list[str]:
    """What a user should know before using the model, a sentence or two each."""
    said = [sentence for comparison in comparisons for sentence in _accuracy(comparison)]
    said += [sentence for speed in timings for sentence in _speed(speed)]
    if not comparisons:
        said.append("No accuracy was measured: what the replacement costs is not known.")
    if not timings:
        said.append("No speed was measured: whether and from which length on it is faster is not known.")
    return said


def _accuracy(comparison: Comparison) -> Iterator[str]:
    own = comparison.own
    for name, metric in own.metrics.items():
        if not metric.beats_chance():
            values = f"{number(metric.value)} against {number(metric.chance or 0)}"
            yield f"It did not learn {own.task}: its {name} is no better than the best constant answer, {values}."
        for other in comparison.with_role(SAME_BUDGET):
            if name in other.metrics:
                yield _against(
                    own, name, metric, other.metrics[name], f"softmax of the same budget (seed {other.seed})"
                )
        for role, what in (
            (NO_ATTENTION, "plain averaging, which is no attention at all"),
            (NEAR, "its near field alone" if "fmm" in mechanism_names_in(own.attention) else "a window alone"),
            (FAR, "its far field alone"),
        ):
            for other in comparison.with_role(role):
                if name in other.metrics and not metric.clearly_better(other.metrics[name]):
                    values = f"{name} {number(metric.value)} against {number(other.metrics[name].value)}"
                    yield f"On {own.task} it is not shown to be better than {what}: {values} (seed {other.seed})."
    if missing := comparison.missing:
        yield f"Not measured on {own.task} with this budget: {'; '.join(missing)}."
    if not comparison.with_role(OTHER_SEED):
        yield f"The result on {own.task} is that of one run (seed {own.seed}): how much runs differ is not known."


def _against(own: TaskResult, name: str, metric: Metric, other: Metric, whom: str) -> str:
    difference = metric.value - other.value
    values = f"{number(metric.value)} against {number(other.value)}, on {metric.n:,} examples"
    if difference == 0:
        return f"On {own.task} it has the {name} of {whom}: {values}."
    worse = (difference < 0) != metric.lower_is_better
    if metric.scale:
        amount = f"{number(abs(difference) * 100 / metric.scale, 3)} points of {name}"
        text = f"On {own.task} it {'loses' if worse else 'gains'} {amount} against {whom}: {values}."
    else:
        text = f"On {own.task} its {name} is {'worse' if worse else 'better'} than that of {whom}: {values}."
    if not (metric.clearly_better(other) or other.clearly_better(metric)):
        text += " The difference is within the noise of so few examples."
    return text


def _speed(speed: SpeedResult) -> Iterator[str]:
    where = f"batch {speed.batch}, {speed.dtype}, {speed.document['hardware'].get('device', 'device not recorded')}"
    for timing in speed.lengths:
        if timing.speed <= 1:
            ratio = number(timing.speed, 3)
            yield f"At {timing.length:,} tokens this model is slower than softmax: {ratio} × its speed ({where})."
    start = crossover(speed)
    if start is None:
        longest = f"{speed.lengths[-1].length:,} tokens"
        yield f"It was not faster than softmax at the longest length measured, {longest} ({where})."
    for timing in speed.lengths:
        own, softmax = timing.patched_peak_bytes, timing.softmax_peak_bytes
        if own and softmax and own > softmax:
            ratio = number(own / softmax, 3)
            yield f"At {timing.length:,} tokens it takes more memory than softmax: {ratio} × ({where})."
    yield (
        f"Nothing is known of lengths beyond {speed.lengths[-1].length:,} tokens or of other hardware than "
        f"{speed.machine}."
    )
