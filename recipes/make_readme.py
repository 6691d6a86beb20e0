"""The parts of README.md that hold numbers, made from the result files in recipes/results and from nothing else.

A part stands between `<!-- name:start -->` and `<!-- name:end -->`. To add one, write a function from all result
documents (by file name) to Markdown, add it to `SECTIONS`, and put its markers where it belongs. Plots that a part
shows and that do not lie beside their result file yet are drawn. Run it with `make readme`; again, and nothing changes.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.aims import aims
from comparison.blocks import Block, Heading, Image, Paragraph, as_markdown
from comparison.guide import guide
from comparison.plots import pareto
from comparison.report import DROPOUT, budget_of, overview_table, speed_of, stages, title_of
from comparison.summary import KIND as COMPARISON
from comparison.summary import summarise

from hf_rfattn.bench import decode_report, model_report, ops_report
from hf_rfattn.bench.bars import AT_LEAST, MET
from hf_rfattn.bench.peers import NAMES as PEERS
from hf_rfattn.bench.plotting import SOFTMAX
from hf_rfattn.bench.results import machine
from hf_rfattn.hub.documents import TaskResult, parse_result

ROOT = Path(__file__).resolve().parents[1]
SHOWN_LENGTHS = (128, 512, 1024, 4096, 16384)  # of those measured; the files hold all

# the folders of comparisons' results, and the commands that make them
COMPARISONS = {
    "accuracy": "make compare DATA=... MODELS=...",
    "transfer": "make compare CONFIG=transfer DATA=... MODELS=... ARGS='--set larger=...'",
    "language": "make compare CONFIG=language DATA=...",
    "stories": "make compare CONFIG=stories DATA=stories MODELS=...",
}
TAUGHT = ("transfer", "language", "stories")  # with attention transfer: what was aimed at is judged by these

Results = dict[str, dict[str, Any]]


def main(
    readme: Annotated[Path, typer.Option(help="The file to fill.")] = ROOT / "README.md",
    results: Annotated[Path, typer.Option(help="Folder of the result files.")] = ROOT / "recipes" / "results",
) -> None:
    """Fill the marked parts of README.md from result files."""
    documents = read_documents(results)
    draw_missing_plots(documents, results)
    before = readme.read_text(encoding="utf-8")
    after = fill(before, documents)
    if after != before:
        readme.write_text(after, encoding="utf-8")
    print(f"{readme}: {'as it was' if after == before else 'filled anew'}, from {len(documents)} result files")


def read_documents(folder: Path) -> Results:
    """By file name; those of comparisons lie in folders of their own."""
    folders = [folder, *(folder / name for name in COMPARISONS)]
    paths = [path for each in folders for path in sorted(each.glob("*.json"))]
    return {str(path.relative_to(folder)): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def fill(text: str, documents: Results) -> str:
    """The same text with every marked part made anew."""
    for name, make in SECTIONS:
        pattern = re.compile(rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"README.md must have <!-- {name}:start --> and <!-- {name}:end --> once each.")
        made = make(documents).rstrip("\n")
        text = pattern.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    return text


def draw_missing_plots(documents: Results, folder: Path) -> None:
    """Beside result files whose plots the text shows."""
    draw: dict[str, Callable[[Any], Any]] = {
        "bench ops": lambda document: ops_report.plot(document, document["dtypes"][0]),
        "bench model": model_report.plot,
        "bench decode": decode_report.plot,
    }
    for name, document in documents.items():
        path = (folder / name).with_suffix(".png")
        if document["kind"] in draw and not path.exists():
            draw[document["kind"]](document).savefig(path, dpi=150)
    for name in COMPARISONS:
        for block in _comparison(name, documents):
            if isinstance(block, Image) and not (folder / name / block.name).exists():
                block.figure.savefig(folder / name / block.name, dpi=150)


def of_kind(documents: Results, kind: str) -> list[tuple[str, dict[str, Any]]]:
    return [(name, document) for name, document in documents.items() if document["kind"] == kind]


# The speed part -----------------------------------------------------------------------------------------------------


def speed(documents: Results) -> str:
    """One layer by length, peers, what was aimed at, whole models, generation."""
    ops, models = of_kind(documents, "bench ops"), of_kind(documents, "bench model")
    decode = of_kind(documents, "bench decode")
    alone = [each for each in ops if not each[1]["peers"]] or ops
    paragraphs = [
        *(paragraph for name, document in alone for paragraph in _ops(name, document)),
        *(
            paragraph
            for name, document in ops
            if document["peers"]
            for paragraph in _peers(name, document, shown=document in [each for _, each in alone])
        ),
        *_bars([document for _, document in sorted(ops, key=lambda each: not each[1]["peers"])]),
        *(paragraph for name, document in models for paragraph in _model(name, document)),
        *(paragraph for name, document in decode for paragraph in _decode(name, document)),
    ]
    return "\n\n".join(paragraphs or ["Nothing has been measured yet."])


def _machine(document: dict[str, Any]) -> str:
    return f"{machine(document['hardware'])}, torch {document['versions']['torch']}"


def _link(name: str) -> str:
    return f"[{name}](recipes/results/{name})"


def _made_by(document: dict[str, Any]) -> str:
    return f"`{document.get('command') or 'hf-rfattn ' + document['kind']}`"


def _image(name: str, what: str) -> str:
    return f"![{what}](recipes/results/{Path(name).with_suffix('.png')})"


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *map(list, rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _times(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f} ×" if value < 10 else f"{value:.1f} ×"


def _passes(document: dict[str, Any]) -> list[tuple[bool, bool]]:
    return list(product(document["causal"], document["training"]))


def _shown(lengths: list[int]) -> list[int]:
    return [length for length in lengths if length in SHOWN_LENGTHS] or lengths


def _ops(name: str, document: dict[str, Any]) -> Iterator[str]:
    shape, lengths = document["shape"], _shown(document["lengths"])
    heads = f"{shape['batch'] * shape['heads']} heads of {shape['head_dim']}"
    yield (
        f"**One attention layer**, {heads}, on {_machine(document)}: speed over `scaled_dot_product_attention`, by "
        f"length ({_link(name)} has all lengths, types, times and spreads; {_made_by(document)})."
    )
    rows = []
    for dtype, (causal, training) in product(document["dtypes"][:1], _passes(document)):
        cells = ops_report.cells_of(document, kind="mechanism", dtype=dtype, causal=causal, training=training)
        for _, attention, features in ops_report.variants(cells):
            speeds = {
                cell["length"]: cell["speed_over_softmax"]
                for cell in cells
                if (cell["name"], cell["features"]) == (attention, features)
            }
            what = f"{attention}, M = {features}" if features else attention
            label = ops_report.name_of_round(causal, training, dtype)
            rows.append([label, what, *(_times(speeds.get(length)) for length in lengths)])
    yield _table(["", "", *(f"{length:,} tokens" for length in lengths)], rows)
    yield _image(
        name, "Time of one attention layer by length, log-log, with the lengths where mechanisms cross softmax"
    )
    yield from _softmax_is_better(document)


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


def _peers(name: str, document: dict[str, Any], shown: bool) -> Iterator[str]:
    """`shown`: whether its plot stands above already."""
    yield (
        f"**Other libraries**, float32, as many features as ours, in one run on {_machine(document)}: speed of "
        f"`favor+` over theirs ({_link(name)}; {_made_by(document)} in the environment of `make peers`)."
    )
    rows = []
    lengths = _shown(document["lengths"])
    for causal, training in _passes(document):
        cells = ops_report.cells_of(document, kind="mechanism", name="favor+", causal=causal, training=training)
        for features, peer in product(dict.fromkeys(cell["features"] for cell in cells), PEERS):
            speeds = {
                cell["length"]: cell["speed_over_peers"][peer]
                for cell in cells
                if cell["features"] == features and peer in cell.get("speed_over_peers", {})
            }
            if speeds:
                label = f"{ops_report.name_of_round(causal, training)}, M = {features}"
                rows.append([label, peer, *(_times(speeds.get(length)) for length in lengths)])
    yield _table(["", "over", *(f"{length:,} tokens" for length in lengths)], rows)
    if not shown:
        yield _image(name, "Time of one attention layer by length, this package and other libraries, log-log")
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


def _bars(documents: list[dict[str, Any]]) -> Iterator[str]:
    """Out of the first run that has any."""
    for document in documents:
        if document["bars"]:
            met = f"{sum(bar['met'] is True for bar in document['bars'])} of {len(document['bars'])} met"
            yield (
                f"**What was aimed at**, `favor+` in float32 on {_machine(document)}: {met}. Where one is not, its "
                "time is taken apart: products, exponentials and memory that is fetched anew were each run alone, on "
                "as many numbers, and so were all its calls, on a single token."
            )
            rows = []
            for bar in document["bars"]:
                sign = "≥" if bar["relation"] == AT_LEAST else "≤"
                value = "–" if bar["value"] is None else f"{bar['value']:,.4g} {bar['unit']}"
                rows.append(
                    [bar["what"], f"{sign} {bar['bound']:,} {bar['unit']}", value, bar["where"], MET[bar["met"]]]
                )
            yield _table(["", "aim", "measured", "where", ""], rows)
            return


def _model(name: str, document: dict[str, Any]) -> Iterator[str]:
    model = document["model"]
    yield (
        f"**A whole model**: {model['name']} ({model['layers']} layers of {model['heads']} heads), {model['dtype']}, "
        f"on {_machine(document)}: speed over softmax, and the memory of a step ({_link(name)}; "
        f"{_made_by(document)})."
    )
    rows = []
    for training, attention in product(document["training"], [SOFTMAX, *document["attention"]]):
        cells = model_report.rows_of(document, attention, training)
        row = []
        for cell in cells:
            size = "" if cell["step_bytes"] is None else f", {cell['step_bytes'] / 2**20:,.0f} MiB"
            first = f"{cell['tokens_per_second']:,.0f} tokens/s" if attention == SOFTMAX else None
            row.append((first or _times(cell["speed_over_softmax"])) + size)
        rows.append([model_report.name_of_pass(training), attention, *row])
    yield _table(["", "", *(f"{length:,} tokens" for length in document["lengths"])], rows)
    crossings = [
        f"{each['attention']}, {model_report.name_of_pass(each['training'])}: {ops_report.crossover_text(each)}"
        for each in document["crossovers"]
    ]
    yield f"Faster than softmax from (about where the two are equal): {'; '.join(crossings)}."
    yield _image(name, f"{model['name']}: time and memory by length, log-log")


def _decode(name: str, document: dict[str, Any]) -> Iterator[str]:
    model, cells = document["model"], decode_report.measured(document)
    batch = document["batches"][0]
    yield (
        f"**Generating a token**: {model['name']}, batch {batch}, {model['dtype']}, on {_machine(document)}: "
        f"milliseconds by tokens in the cache ({_link(name)}; {_made_by(document)})."
    )
    rows = []
    for attention in [SOFTMAX, *document["attention"]]:
        row = [cells.get((attention, batch, context)) for context in document["contexts"]]
        rows.append([attention, *("–" if cell is None else f"{cell['ms_per_token']['median']:.1f}" for cell in row)])
    yield _table(["", *(f"{context:,} tokens" for context in document["contexts"])], rows)
    yield "Softmax is transformers' default cache, which copies all keys and values for every token."
    yield _image(name, "Time of a token and bytes of cache by context")


# The accuracy part --------------------------------------------------------------------------------------------------


def accuracy(documents: Results) -> str:
    """Of each comparison: all tasks at a glance, what each step buys, accuracy against speed, speed alone."""
    found = [
        as_markdown(blocks, lambda image, name=name: _address(f"{name}/{image}"))
        for name in COMPARISONS
        if (blocks := [block for block in _comparison(name, documents) if not isinstance(block, Image)])
    ]
    if reached := list(aims([summary for name in TAUGHT if (summary := _summary(name, documents))])):
        found.append(as_markdown(reached))
    return "\n".join(found) or "Nothing has been compared yet."


def pictures(documents: Results) -> str:
    """From which length on it pays, and what it costs in accuracy."""
    summary = _summary("accuracy", documents)
    images = [block for block in _comparison("accuracy", documents) if isinstance(block, Image)]
    if summary is None or not images:
        return "Nothing has been compared yet."
    judged = [table["model"] for table in summary["accuracy"]]
    crossing = {each["part"] for each in summary["crossovers"]}
    timed = [f"{each['model']}, {each['machine']}" for each in summary["speed"] if each["part"] in crossing]
    titles = {"crossover.png": "from which length on it pays", "pareto.png": "what it costs in accuracy"}
    shown = sorted(images, key=lambda image: list(titles).index(image.name))
    return "\n".join(
        [
            _table(
                [titles[image.name] for image in shown],
                [[f"![{image.what}]({_address(f'accuracy/{image.name}')})" for image in shown]],
            ),
            "",
            f"Left: {' and '.join(dict.fromkeys(timed))}, in training. Right: {' and '.join(dict.fromkeys(judged))}, "
            f"fine-tuned without attention transfer ([accuracy](#accuracy) has both). {DROPOUT} [Speed](#speed) has "
            "larger models, without dropout.",
        ]
    )


def _summary(name: str, documents: Results) -> dict[str, Any] | None:
    parsed = [
        parse_result(document, file)
        for file, document in documents.items()
        if COMPARISON in document and file.startswith(f"{name}/")
    ]
    results = [result for result in parsed if isinstance(result, TaskResult)]
    return summarise(results) if results else None


def _comparison(name: str, documents: Results) -> Iterator[Block]:
    summary = _summary(name, documents)
    if summary is None:
        return
    tables = summary["accuracy"]
    yield Heading(summary["title"], 3)
    yield Paragraph(
        f"Fine-tuned with each attention on {' and '.join(summary['machines'])} a process, every row with the budget "
        "of its softmax row; scores in %, mean ± standard deviation over seeds. `average` (no attention) and `band` (a "
        f"window alone) are controls. [All of it]({_address(name)}), made by `{COMPARISONS[name]}`. {DROPOUT}"
    )
    yield overview_table(summary)
    yield from stages(summary)
    yield Paragraph("\n".join(f"- {title_of(table, tables)}: {budget_of(table)}" for table in tables))
    judged = {table["part"] for table in tables}
    timed = {**summary, "speed": [entry for entry in summary["speed"] if entry["part"] not in judged]}
    if not timed["speed"]:
        return
    if figure := pareto(summary):
        yield Image("pareto.png", "Accuracy against training speed, a panel a task", figure)
    yield from (block for block in speed_of(timed) if not isinstance(block, Heading))


def _address(name: str) -> str:
    return f"recipes/results/{name}"


# The guide ----------------------------------------------------------------------------------------------------------


def which_when(documents: Results) -> str:
    return guide(_summary("transfer", documents), list(documents.values()))


SECTIONS: list[tuple[str, Callable[[Results], str]]] = [
    ("pictures", pictures),
    ("guide", which_when),
    ("accuracy", accuracy),
    ("speed", speed),
]


if __name__ == "__main__":
    typer.run(main)
