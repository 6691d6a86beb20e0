"""Which mechanism, and when: a line for each thing that was measured, with its numbers; none where nothing was."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from comparison.tables import percent

from hf_rfattn.results import Block, Bullets, Paragraph

Document = Mapping[str, Any]

# what a line says, and the rows that show it
COMPARED = {
    "More features:": ["hedgehog", "hedgehog 256"],
    "Softmax kept in one layer of three:": ["favor+", "favor+ and softmax"],
    "A window and a far field, beside each alone:": ["fmm", "band", "favor+"],
    "Random and fixed features, beside no attention:": ["rff", "linear", "average"],
}


def guide(summary: Mapping[str, Any] | None, benchmarks: Sequence[Document]) -> list[Block]:
    """`summary`: of the comparison with attention transfer. `benchmarks`: documents of `hf-rfattn bench`."""
    by_kind = {kind: [b for b in benchmarks if b["kind"] == f"bench {kind}"] for kind in ("ops", "model", "decode")}
    lines = [
        *(line for document in by_kind["ops"][:1] for line in _layer(document)),
        *(line for document in by_kind["model"] for line in _model(document)),
        *(_accuracy(summary) if summary else ()),
        *(line for document in by_kind["decode"][:1] for line in _decode(document)),
    ]
    return [Bullets(lines) if lines else Paragraph("Nothing has been measured yet.")]


def _layer(document: Document) -> Iterator[str]:
    crossings = {
        (each["causal"], each["training"], each["features"]): each["interpolated"]
        for each in document["crossovers"]
        if each["attention"] == "favor+" and each["dtype"] == "float32"
    }
    for causal in (False, True):
        found = [
            f"{tokens:,} tokens to infer and {train:,} to train with M = {features}"
            for features in sorted({key[2] for key in crossings})
            if (tokens := crossings.get((causal, False, features)))
            and (train := crossings.get((causal, True, features)))
        ]
        if found:
            direction = "causal" if causal else "bidirectional"
            yield f"**Length**, one {direction} layer: below about {'; '.join(found)}, stay with softmax."


def _model(document: Document) -> Iterator[str]:
    longest = max(document["lengths"])
    found = [
        f"{cell['attention']} {'trains' if cell['training'] else 'infers'} {cell['speed_over_softmax']:.1f} × as fast"
        for cell in document["cells"]
        if cell["length"] == longest and cell["speed_over_softmax"] is not None and cell["attention"] != "softmax"
    ]
    if found:
        yield f"**A whole model**, {document['model']['name']}, {longest:,} tokens: {', '.join(found)} as softmax."


def _accuracy(summary: Mapping[str, Any]) -> Iterator[str]:
    steps = []
    for each in summary["overview"]:
        shares = [*each["mean_share_by_stage"].values(), each["mean_share_of_softmax"]]
        if None not in shares:
            steps.append(f"{each['row']} {' → '.join(map(percent, shares))}")
    if steps:
        tasks = sum(table["learnt"] for table in summary["accuracy"])
        yield (
            f"**Convert first**, share of softmax's score, mean over {tasks} tasks, patched → after "
            f"attention transfer → fine-tuned: {'; '.join(steps)}."
        )
    by_task = {
        table["part"]: {row["row"]: row["over_softmax"] for row in table["rows"]} for table in summary["accuracy"]
    }
    for label, names in COMPARED.items():
        shares = {part: rows for part, rows in by_task.items() if all(rows.get(name) is not None for name in names)}
        if shares:
            means = [f"{name} {percent(fmean(rows[name] for rows in shares.values()))}" for name in names]
            yield f"**{label}** {', '.join(means)} of softmax's score, mean over {', '.join(shares)}."


def _decode(document: Document) -> Iterator[str]:
    context, batch = max(document["contexts"]), document["batches"][0]
    times = {
        cell["attention"]: cell["ms_per_token"]["median"]
        for cell in document["cells"]
        if cell["context"] == context and cell["batch"] == batch and cell.get("ms_per_token")
    }
    if "softmax" in times and len(times) > 1:
        told = ", ".join(f"{name} {time:.0f}" for name, time in times.items())
        yield f"**Generation** after {context:,} tokens, milliseconds a token: {told}."
