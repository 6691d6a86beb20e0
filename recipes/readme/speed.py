"""The speed part: one layer by length, other libraries, what was aimed at, whole models, generation."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from hf_rfattn.bench import decode_report, model_report, ops_report
from hf_rfattn.bench.bars import AT_LEAST, MET
from hf_rfattn.bench.peers import NAMES as PEERS
from hf_rfattn.results import SOFTMAX

from .markdown import Documents, Page, made_by, measured_on, of_kind, table, times

SHOWN_LENGTHS = (128, 512, 1024, 4096, 16384)  # of those measured; the files hold all
NOTHING = "Nothing has been measured yet."


def whole(documents: Documents, page: Page) -> str:
    """With every number of features, tables of peers and aims, and plots."""
    ops = of_kind(documents, "bench ops")
    alone = [each for each in ops if not each[1]["peers"]] or ops
    paragraphs: list[str] = []
    for name, document in alone:
        paragraphs += [_layer_intro(name, document, page), _layer_table(document)]
        paragraphs.append(
            page.image(
                name, "Time of one attention layer by length, log-log, with the lengths where mechanisms cross softmax"
            )
        )
        paragraphs += _softmax_is_better(document)
    for name, document in ops:
        if document["peers"]:
            shown = document in [each for _, each in alone]
            paragraphs += _peers(name, document, page, shown)
    paragraphs += _aims_table(ops)
    for name, document in of_kind(documents, "bench model"):
        plot = page.image(name, f"{document['model']['name']}: time and memory by length, log-log")
        paragraphs += [*_model(name, document, page), plot]
    for name, document in of_kind(documents, "bench decode"):
        plot = page.image(name, "Time of a token and bytes of cache by context")
        paragraphs += [*_decode(name, document, page), plot]
    for name, document in of_kind(documents, "bench compile"):
        paragraphs += _compile(name, document, page)
    return "\n\n".join(paragraphs or [NOTHING])


def short(documents: Documents, page: Page) -> str:
    """With the fewest features, and a sentence each on other libraries and aims."""
    ops = of_kind(documents, "bench ops")
    paragraphs: list[str] = []
    for name, document in ops[:1]:
        features = min((each["features"] for each in document["crossovers"] if each["features"]), default=None)
        paragraphs += [_layer_intro(name, document, page), _layer_table(document, features)]
    paragraphs += _said_of_peers(ops)
    paragraphs += _said_of_aims(ops, page)
    for name, document in of_kind(documents, "bench model"):
        paragraphs += _model(name, document, page)
    for name, document in of_kind(documents, "bench decode"):
        paragraphs += _decode(name, document, page)
    return "\n\n".join(paragraphs or [NOTHING])


# One layer ----------------------------------------------------------------------------------------------------------


def _passes(document: dict[str, Any]) -> list[tuple[bool, bool]]:
    return list(product(document["causal"], document["training"]))


def _shown(lengths: list[int]) -> list[int]:
    return [length for length in lengths if length in SHOWN_LENGTHS] or lengths


def _layer_intro(name: str, document: dict[str, Any], page: Page) -> str:
    shape = document["shape"]
    heads = f"{shape['batch'] * shape['heads']} heads of {shape['head_dim']}"
    return (
        f"**One attention layer**, {heads}, on {measured_on(document)}: speed over `scaled_dot_product_attention`, by "
        f"length ({page.link(name)} has all lengths, types, times and spreads; {made_by(document)})."
    )


def _layer_table(document: dict[str, Any], only: int | None = None) -> str:
    """`only`: with this number of features."""
    lengths = _shown(document["lengths"])
    rows = []
    for dtype, (causal, training) in product(document["dtypes"][:1], _passes(document)):
        cells = ops_report.cells_of(document, kind="mechanism", dtype=dtype, causal=causal, training=training)
        for _, attention, features in ops_report.variants(cells):
            if only and features != only:
                continue
            speeds = {
                cell["length"]: cell["speed_over_softmax"]
                for cell in cells
                if (cell["name"], cell["features"]) == (attention, features)
            }
            what = f"{attention}, M = {features}" if features else attention
            label = ops_report.name_of_round(causal, training, dtype)
            rows.append([label, what, *(times(speeds.get(length)) for length in lengths)])
    return table(["", "", *(f"{length:,} tokens" for length in lengths)], rows)


def _softmax_is_better(document: dict[str, Any]) -> Iterator[str]:
    """Said plainly, for each mechanism, in float32 (or the first type there is)."""
    dtype = document["dtypes"][0]
    for causal, training in _passes(document):
        found = [
            each
            for each in document["crossovers"]
            if (each["causal"], each["training"], each["dtype"]) == (causal, training, dtype)
        ]
        if not found:
            continue
        below = []
        for each in found:
            what = f"`{each['attention']}`" + (f" with M = {each['features']}" if each["features"] else "")
            if each["length"] is None:
                below.append(f"{what} at every length measured (up to {max(each['lengths']):,})")
            elif each["interpolated"] is None:
                below.append(f"{what} at no length measured (from {min(each['lengths']):,} on)")
            else:
                below.append(f"{what} below about {each['interpolated']:,} tokens")
        where = ops_report.name_of_round(causal, training, dtype)
        yield f"**Softmax is the better choice** ({where}) over {', over '.join(below)}."


# Other libraries, and what was aimed at -----------------------------------------------------------------------------


def _speeds_over(document: dict[str, Any]) -> Iterator[tuple[bool, bool, int, str, dict[int, float]]]:
    """Direction, pass, features, peer, and the speed of favor+ over it by length."""
    for causal, training in _passes(document):
        cells = ops_report.cells_of(document, kind="mechanism", name="favor+", causal=causal, training=training)
        for features, peer in product(dict.fromkeys(cell["features"] for cell in cells), PEERS):
            speeds = {
                cell["length"]: cell["speed_over_peers"][peer]
                for cell in cells
                if cell["features"] == features and peer in cell.get("speed_over_peers", {})
            }
            if speeds:
                yield causal, training, features, peer, speeds


def _peers(name: str, document: dict[str, Any], page: Page, shown: bool) -> Iterator[str]:
    """`shown`: whether its plot stands above already."""
    yield (
        f"**Other libraries**, float32, as many features as ours, in one run on {measured_on(document)}: speed of "
        f"`favor+` over theirs ({page.link(name)}; {made_by(document)} in the environment of `make peers`)."
    )
    lengths = _shown(document["lengths"])
    rows = [
        [
            f"{ops_report.name_of_round(causal, training)}, M = {features}",
            peer,
            *(times(speeds.get(length)) for length in lengths),
        ]
        for causal, training, features, peer, speeds in _speeds_over(document)
    ]
    yield table(["", "over", *(f"{length:,} tokens" for length in lengths)], rows)
    if not shown:
        yield page.image(name, "Time of one attention layer by length, this package and other libraries, log-log")
    checks = [check for check in document["checks"] if check["kind"] == "peer"]
    if checks:
        worst = max(checks, key=lambda check: check["deviation_at_magnitude_1"] or 0)
        failed = ", ".join(sorted({check["name"] for check in checks if not check["passed"]}))
        yield (
            f"Each was compared with the definition first, to within {checks[0]['tolerance']}, on queries and keys of "
            f"standard deviation {checks[0]['magnitude']}: {f'{failed} failed' if failed else 'all passed'}. "
            f"At standard deviation 1 their epsilons take over: there {worst['name']} is off by "
            f"{100 * (worst['deviation_at_magnitude_1'] or 0):.0f} %."
        )


def _said_of_peers(ops: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    for _, document in ops:
        found: dict[str, list[float]] = {}
        for _, _, _, peer, speeds in _speeds_over(document):
            found.setdefault(peer, []).extend(speeds.values())
        if found:
            spans = [f"{times(min(speeds))} to {times(max(speeds))} that of {peer}" for peer, speeds in found.items()]
            yield (
                "**Other libraries**, in the same run with as many features: the speed of `favor+` was "
                f"{' and '.join(spans)}, from the worst to the best of all lengths, directions, passes and numbers of "
                "features."
            )
            return


def _with_aims(ops: list[tuple[str, dict[str, Any]]]) -> dict[str, Any] | None:
    """The first run that has any, those with peers before others."""
    ordered = sorted((document for _, document in ops), key=lambda document: not document["peers"])
    return next((document for document in ordered if document["bars"]), None)


def _reached(document: dict[str, Any]) -> str:
    return f"{sum(bar['met'] is True for bar in document['bars'])} of {len(document['bars'])} met"


def _aims_table(ops: list[tuple[str, dict[str, Any]]]) -> Iterator[str]:
    document = _with_aims(ops)
    if document is None:
        return
    yield (
        f"**What was aimed at**, `favor+` in float32 on {measured_on(document)}: {_reached(document)}. Where one is "
        "not, its time is taken apart: products, exponentials and memory that is fetched anew were each run alone, on "
        "as many numbers, and so were all its calls, on a single token."
    )
    rows = []
    for bar in document["bars"]:
        sign = "≥" if bar["relation"] == AT_LEAST else "≤"
        value = "–" if bar["value"] is None else f"{bar['value']:,.4g} {bar['unit']}"
        rows.append([bar["what"], f"{sign} {bar['bound']:,} {bar['unit']}", value, bar["where"], MET[bar["met"]]])
    yield table(["", "aim", "measured", "where", ""], rows)


def _said_of_aims(ops: list[tuple[str, dict[str, Any]]], page: Page) -> Iterator[str]:
    document = _with_aims(ops)
    if document is not None:
        which = f"[which]({page.address('README.md#speed')})"
        yield f"**What was aimed at** in the speed of one layer: {_reached(document)} ({which})."


# Whole models, and generation ---------------------------------------------------------------------------------------


def _model(name: str, document: dict[str, Any], page: Page) -> Iterator[str]:
    model = document["model"]
    yield (
        f"**A whole model**: {model['name']} ({model['layers']} layers of {model['heads']} heads), {model['dtype']}, "
        f"on {measured_on(document)}: speed over softmax, and the memory of a step ({page.link(name)}; "
        f"{made_by(document)})."
    )
    rows = []
    for training, attention in product(document["training"], [SOFTMAX, *document["attention"]]):
        cells = model_report.rows_of(document, attention, training)
        row = []
        for cell in cells:
            size = "" if cell["step_bytes"] is None else f", {cell['step_bytes'] / 2**20:,.0f} MiB"
            first = f"{cell['tokens_per_second']:,.0f} tokens/s" if attention == SOFTMAX else None
            row.append((first or times(cell["speed_over_softmax"])) + size)
        rows.append([model_report.name_of_pass(training), attention, *row])
    yield table(["", "", *(f"{length:,} tokens" for length in document["lengths"])], rows)
    crossings = [
        f"{each['attention']}, {model_report.name_of_pass(each['training'])}: {ops_report.crossover_text(each)}"
        for each in document["crossovers"]
    ]
    yield f"Faster than softmax from (about where the two are equal): {'; '.join(crossings)}."


def _decode(name: str, document: dict[str, Any], page: Page) -> Iterator[str]:
    model, cells = document["model"], decode_report.measured(document)
    batch = document["batches"][0]
    yield (
        f"**Generating a token**: {model['name']}, batch {batch}, {model['dtype']}, on {measured_on(document)}: "
        f"milliseconds by tokens in the cache ({page.link(name)}; {made_by(document)})."
    )
    rows = []
    for attention in [SOFTMAX, *document["attention"]]:
        row = [cells.get((attention, batch, context)) for context in document["contexts"]]
        rows.append([attention, *("–" if cell is None else f"{cell['ms_per_token']['median']:.1f}" for cell in row)])
    yield table(["", *(f"{context:,} tokens" for context in document["contexts"])], rows)
    yield "Softmax is transformers' default cache, which copies all keys and values for every token."


def _compile(name: str, document: dict[str, Any], page: Page) -> Iterator[str]:
    yield (
        f"**torch.compile** ({document['backend']}): {document['model']['name']}, without gradients, on "
        f"{measured_on(document)}: seconds of the first call at each input length, in this order ({page.link(name)}; "
        f"{made_by(document)})."
    )
    rows = [
        [row["attention"], *(f"{seconds:.1f}" for seconds in row["seconds"]), str(row["programs"][-1])]
        for row in document["rows"]
    ]
    yield table(["", *(f"{length:,} tokens" for length in document["lengths"]), "programs"], rows)
    yield "The second program serves all lengths after the first."
