"""What was aimed at in accuracy, beside what was reached."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from comparison.blocks import Block, Paragraph, Table
from comparison.report import SOFTMAX, kind, percent, score

Summary = Mapping[str, Any]
MET = "met"

# mean share of softmax's score: of which rows the best (None: of all), and how much it should be
SHARES = (
    ("the best mechanism", None, 0.99),
    ("hedgehog", ("hedgehog", "hedgehog 256"), 0.975),
    ("favor+", ("favor+",), 0.95),
)
HALVES = ("band", "favor+")  # of fmm
WHOLE = "fmm"
HALVES_JUDGED_ON = ("SNLI", "SQuAD")
# perplexity over that of softmax: of which rows the best, and how much it should be
TIMES = (("fmm", ("fmm",), 1.06), ("a far field alone", ("favor+", "hedgehog"), 1.15))


def aims(summaries: Sequence[Summary]) -> Iterator[Block]:
    """A table of them, if any was measured."""
    if rows := _rows(summaries):
        yield Paragraph("**What was aimed at**, and what was reached:")
        yield Table("", ["aim", "reached", ""], rows, [""] * len(rows))


def said_of_aims(summaries: Sequence[Summary]) -> Iterator[str]:
    """How many were reached, and all that were not."""
    if rows := _rows(summaries):
        missed = [f"{aim}: {reached}" for aim, reached, met in rows if met != MET]
        said = f"**What was aimed at** in accuracy: {len(rows) - len(missed)} of {len(rows)} met"
        yield f"{said}; not met: {'; '.join(missed)}." if missed else f"{said}."


def _rows(summaries: Sequence[Summary]) -> list[list[str]]:
    return [row for summary in summaries for row in (*_shares(summary), *_wholes(summary), *_times(summary))]


def _row(aim: str, reached: str, met: bool) -> list[str]:
    return [aim, reached, MET if met else f"not {MET}"]


def _shares(summary: Summary) -> Iterator[list[str]]:
    tasks = len([table for table in summary["accuracy"] if table["learnt"] and not table["lower_is_better"]])
    found = {
        each["row"]: each["mean_share_of_softmax"]
        for each in summary["overview"]
        if each["mean_share_of_softmax"] is not None and not kind(each["attention"], each["control"])
    }
    for what, names, aim in SHARES if tasks > 1 else ():
        of_it = {name: share for name, share in found.items() if names is None or name in names}
        if of_it:
            best = max(of_it, key=lambda name: of_it[name])
            reached = f"{percent(of_it[best])} ({best}, {tasks} tasks)"
            yield _row(
                f"{what}: at least {percent(aim)} of softmax's score, mean over tasks", reached, of_it[best] >= aim
            )


def _wholes(summary: Summary) -> Iterator[list[str]]:
    for table in summary["accuracy"]:
        found = {row["row"]: row["metric"] for row in table["rows"]}
        if table["part"] not in HALVES_JUDGED_ON or not {WHOLE, *HALVES} <= found.keys():
            continue
        whole, better = found[WHOLE], max((found[half] for half in HALVES), key=lambda metric: metric["mean"])
        spread = max(whole["spread"] or 0.0, better["spread"] or 0.0)
        told = [f"{name} {score(found[name], table['scale'])}" for name in (WHOLE, *HALVES)]
        aim = f"{WHOLE} above both of its halves by more than the spread over seeds, {table['part']}"
        yield _row(aim, ", ".join(told), whole["mean"] - better["mean"] > spread)


def _times(summary: Summary) -> Iterator[list[str]]:
    for table in summary["accuracy"]:
        if not table["lower_is_better"]:
            continue
        found = {row["row"]: row["over_softmax"] for row in table["rows"] if row["attention"] != SOFTMAX}
        for what, names, aim in TIMES:
            of_it = {name: found[name] for name in names if found.get(name) is not None}
            if of_it:
                best = min(of_it, key=lambda name: of_it[name])
                reached = f"{of_it[best]:.3f} × ({best})"
                text = f"{what}: perplexity at most {aim} × that of softmax, {table['part']}"
                yield _row(text, reached, of_it[best] <= aim)
