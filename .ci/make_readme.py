"""Generate the parts of README.md, recipes/results/README.md and pages of docs that show measurements, from the result
files in recipes/results.

A generated part is between `<!-- name:start -->` and `<!-- name:end -->`. To add one, write a function that yields its
blocks from all result documents (by file name) and the path from its page to the results, and add it to `PAGES`. Plots
are redrawn only if their data has changed, so a second `make readme` changes nothing.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import gpu_prediction as predicted
import measure_sharding
import PIL.Image
import typer
from comparison.report import PLACE, comparison_tables, options_of
from evaluate_lm import table as context_table

from hf_rfattn import attention_label, mechanism_names_in
from hf_rfattn.bench.report import report as benchmark_report
from hf_rfattn.bench.report import speed_table
from hf_rfattn.hub.scores import Row, ScoreTable, details, make_tables, overview, percent, run_speed, score_and_speed
from hf_rfattn.results.documents import machine, read_result, without_folders
from hf_rfattn.results.report import DASH, Block, Image, Table, as_markdown, in_bytes, number, times
from hf_rfattn.results.schema import SOFTMAX, STAGES, Result, parse_result
from hf_rfattn.study import study_class

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("recipes/results")
MARK = "Data"  # PNG metadata: digest of the data of the plot
SHOWN_LENGTHS = (128, 512, 1024, 4096, 16384)  # in the table of one layer in the README
BENCHMARKS = {
    "bench ops": ("Time of one attention layer", benchmark_report),
    "bench model": ("Time and memory of a whole model", benchmark_report),
    "bench decode": ("Time of a new token and memory of the cache", benchmark_report),
    "bench sharding": ("One sequence split over several processes: bytes sent and memory", measure_sharding.report),
}
STUDIES = {
    "gram": "Kernel matrices of random features",
    "heads": "Error by layer and head",
    "mrf": "Markov random fields",
    "mse": "Attention matrices of random features",
    "rank": "Rank of attention outside a band",
}
COMMAND_WIDTH = 100

Documents = dict[str, dict[str, Any]]  # result files by their path below recipes/results
Part = Callable[[Documents, str], Iterator[Block]]


def measured_on(document: dict[str, Any]) -> str:
    return f"{machine(document['hardware'])}, torch {document['versions']['torch']}"


def origin(document: dict[str, Any], link: str) -> str:
    """The machine, the result file, and the command that measured it, as a block with continued lines."""
    lines = [""]
    for part in re.split(r" (?=--)", document.get("command") or f"hf-rfattn {document['kind']} --full"):
        if lines[-1] and len(f"{lines[-1]} {part}") > COMMAND_WIDTH:
            lines.append(f"  {part}")
        else:
            lines[-1] = f"{lines[-1]} {part}" if lines[-1] else part
    command = " \\\n".join(lines)
    return f"Measured on {measured_on(document)} ({link}) by\n```\n{command}\n```"


def was_idle(document: dict[str, Any]) -> bool:
    """Whether the load average at the start was below the number of cores; otherwise speeds are not shown."""
    load = document["load_average"]
    return load is None or load[0] < document["hardware"]["cores"]


def compared(documents: Documents) -> Iterator[tuple[str, str, list[ScoreTable]]]:
    """Folder, title and tables of each comparison."""
    folders: dict[str, list[Result]] = {}
    for name, document in documents.items():
        if PLACE in document:
            folders.setdefault(name.rpartition("/")[0], []).append(parse_result(document, name))
    for folder, found in folders.items():
        yield folder, found[0].document[PLACE]["title"], comparison_tables(found)


def comparisons(documents: Documents, results: str) -> Iterator[Block]:
    """The tables of each comparison."""
    for folder, title, tables in compared(documents):
        yield f"### {title}"
        yield f"From [{folder}]({results}{folder}). {options_of(tables)}"
        if len({table.first.task for table in tables}) > 1:
            yield overview(tables)
        yield from score_tables(tables, documents)


def scores(documents: Documents, results: str) -> Iterator[Block]:
    """Overview of tasks with long inputs: one column per model and task, one row per mechanism."""
    reviews = [table for folder, _, found in compared(documents) if folder == "long_reviews" for table in found]
    tables = [*retrieval_tables(documents), *(table for table in reviews if table.first.budget["max_length"] == 2048)]
    brief = [replace(table, rows=[replace(row, label=in_brief(row)) for row in table.rows]) for table in tables]
    if brief:
        yield overview(brief)


def in_brief(row: Row) -> str:
    """The mechanism of a row without options, whether it has exact heads, and whether it went through transfer."""
    names = mechanism_names_in(row.runs[0].attention) or [SOFTMAX]
    name = next(name for name in names if name != "exact_heads") + ", exact heads" * ("exact_heads" in names)
    return f"{name}, after attention transfer" if row.runs[0].document.get("transfer") else name


def evaluations(documents: Documents, results: str) -> Iterator[Block]:
    """Results that do not belong to a comparison: one table per model, task and budget."""
    tasks = {name: each for name, each in documents.items() if each["kind"] == "task" and PLACE not in each}
    found = [parse_result(document, name) for name, document in tasks.items()]
    yield from score_tables(make_tables(found, lambda result: result.task), documents)


def model_benchmarks(documents: Documents) -> dict[tuple[str, int, str], dict[bool, dict[str, Any]]]:
    """Cells of `hf-rfattn bench model` by model, length and attention, then by pass (training or not)."""
    found: dict[tuple[str, int, str], dict[bool, dict[str, Any]]] = {}
    for document in documents.values():
        for cell in document["cells"] if document["kind"] == "bench model" else ():
            label = labels(document).get(cell["attention"], SOFTMAX)
            key = document["model"]["name"], cell["length"], label
            found.setdefault(key, {}).setdefault(cell["training"], cell)
    return found


def score_tables(tables: list[ScoreTable], documents: Documents) -> Iterator[Block]:
    """Budget and table of scores, speed and memory of each comparison, with one row per attention.

    Speed and memory come from `hf-rfattn bench model` at the same length if it has measured the model, since it times
    mechanisms alternately on an idle machine. Otherwise they come from the runs, without speed if the machine was busy.
    Models that were trained before are named BASE, HOW: such a model has the speed of its base.
    """
    benched = model_benchmarks(documents)

    def speed(table: ScoreTable, row: Row) -> dict[str, str]:
        model, length = table.first.model.partition(", ")[0], table.first.budget.get("max_length")
        if (model, length, SOFTMAX) not in benched:
            idle = all(was_idle(run.document) for run in [*row.runs, *table.rows[0].runs])
            return run_speed(table, row) | ({} if idle else {"samples/s": DASH, "over softmax": DASH})
        passes = benched.get((model, length, row.attention), {})
        cells = [passes.get(training) for training in ((False, True) if "steps" in table.first.budget else (False,))]
        over = (times(cell and cell["speed_over_softmax"]) for cell in cells)
        memory = cells[-1] and cells[-1]["step_bytes"]
        return {
            "samples/s": number(cells[0]["samples_per_second"], 3) if cells[0] else DASH,
            **dict(zip(("over softmax", "training over softmax"), over, strict=False)),
            f"{'training ' * (len(cells) > 1)}memory": in_bytes(memory) if memory else DASH,
        }

    for table in tables:
        yield f"**{table.title}**: {table.budget}."
        yield details(table, speed)


def gpu_prediction(documents: Documents, results: str) -> Iterator[Block]:
    """Predicted costs on GPUs."""
    sources = "; ".join(f"{device.name}: {device.source}" for device in predicted.DEVICES)
    yield (
        "**Predicted, not measured**: no GPU was available. Counted from shapes by "
        "`.ci/gpu_prediction.py`, which states what is counted: a "
        f"forward pass in bfloat16, {predicted.HEADS} heads of 64 (batch times heads), at peak rates. Peak figures: "
        f'{sources}. "Never": each causal query chooses its blocks itself, which moves more bytes than softmax saves.'
    )
    yield predicted.table()


def retrieval_tables(documents: Documents) -> list[ScoreTable]:
    """Embedding models on long documents."""
    found = [parse_result(each, name) for name, each in documents.items() if re.match(r"embeddings/\w+_2048_", name)]
    return make_tables(found, lambda result: f"retrieval, {result.model.partition('/')[2]}")


def tradeoff(documents: Documents, results: str) -> Iterator[Block]:
    """Plot of the share of softmax's score against speed-up, for embedding models on long documents."""
    benched, drawn = model_benchmarks(documents), []
    for table in retrieval_tables(documents):
        rows = []
        for row in table.rows:
            cell = benched.get((table.first.model, 2048, row.attention), {}).get(False)
            if cell and (row.over_softmax or 0) > 0.9:  # others would stretch the axis
                speed = {"speed": (cell["samples_per_second"], None), "speed_over_softmax": cell["speed_over_softmax"]}
                rows.append(replace(row, label=in_brief(row), **speed))
        title = f"{table.first.model.partition('/')[2]}, 2,048 tokens"
        drawn += [replace(table, title=title, rows=rows)] if rows else []
    if drawn:
        yield Image("embeddings/tradeoff.png", "Score and speed-up", lambda: score_and_speed(drawn, relative=True))


def context_cells(documents: Documents) -> Iterator[tuple[dict[str, Any], Documents, list[dict[str, Any]]]]:
    """Results of decoders by context length: for each model, dataset, dtype and number of tokens, its description, its
    files and their cells.

    Trained models are named BASE, HOW. All speeds at a length come from the run with the most repetitions that includes
    softmax.
    """
    tables: dict[tuple[str, str, str], Documents] = {}
    for name, document in documents.items():
        if document["kind"] == "bench lm":
            key = document["model"].partition(", ")[0], document["dataset"]["name"], document.get("dtype", "float32")
            tables.setdefault(key, {})[name] = document
    for (base, data, dtype), found in tables.items():
        speeds: dict[int, dict[str, dict[str, Any]]] = {}
        for document in sorted(found.values(), key=lambda each: each["repetitions"]):
            timed = [(labels(document)[cell["attention"]], cell) for cell in document["cells"] if "cache_bytes" in cell]
            for length in {cell["length"] for label, cell in timed if label == SOFTMAX}:
                speeds[length] = {label: cell for label, cell in timed if cell["length"] == length}
        for tokens in sorted({document["tokens"] for document in found.values()} - {0}):
            cells = []
            for document in found.values():
                trained = document["model"].removeprefix(f"{base}, ") if document["model"] != base else None
                for cell in document["cells"] if document["tokens"] == tokens else ():
                    label, length = labels(document)[cell["attention"]], cell["length"]
                    score = {"stage": trained or cell["stage"], "metrics": cell["metrics"]}
                    cells.append(
                        {**speeds.get(length, {}).get(label, {}), "attention": label, "length": length, **score}
                    )
            cells.sort(key=lambda cell: (cell["length"], cell["attention"] != SOFTMAX))
            about = measured_on(next(iter(found.values())))
            yield {"model": base, "data": data, "dtype": dtype, "tokens": tokens, "machine": about}, found, cells


def contexts(documents: Documents, results: str) -> Iterator[Block]:
    """Decoders by context length: one table per model, dataset, dtype and number of tokens."""
    for about, found, cells in context_cells(documents):
        yield (
            f"**{about['model']}** in {about['dtype']}, {about['machine']}: perplexity on {about['tokens']:,} tokens "
            f"of {about['data']} by stage, speed and cache. "
            "In brackets: perplexity divided by that of softmax before training / with the same training, and speed "
            "over softmax."
        )
        yield context_table(cells, "")
        yield f"From {', '.join(f'[{Path(name).stem}]({results}{name})' for name in found)}."


def labels(document: dict[str, Any]) -> dict[str, str]:
    """Labels in tables for the attentions of a benchmark. The same mechanism in all layers has its own label."""
    found = {}
    for name, kind in document["attention"].items():
        layers = list(kind["layers"].values()) if "layers" in kind else []
        found[name] = attention_label(layers[0] if len(layers) == 1 else kind)
    return found


def benchmarks(documents: Documents, results: str) -> Iterator[Block]:
    """The report of each benchmark."""
    for kind, (title, report_of) in BENCHMARKS.items():
        for name, document in documents.items():
            if document["kind"] == kind:
                model = document.get("model", {}).get("name", "").rpartition("/")[2]
                yield f"### {title}{': ' * bool(model)}{model} ({Path(name).stem})"
                yield origin(without_folders(document), f"[{name}]({results}{name})")
                yield from report_of(document, name.removesuffix(".json"))


def speed(documents: Documents, results: str) -> Iterator[Block]:
    """Speed of one attention layer by length."""
    for name, document in documents.items():
        if document["kind"] == "bench ops" and "/" not in name:
            yield f"Speed over softmax of one attention layer at inference, on {measured_on(document)}:"
            table = speed_table(document, SHOWN_LENGTHS)
            rows = [[row[0].removesuffix(", inference"), *row[1:]] for row in table.rows if row[1] != "average"]
            yield replace(table, title="", headings=["direction", "attention", *table.headings[2:]], rows=rows)


def studies(documents: Documents, results: str) -> Iterator[Block]:
    """The main numbers of each study, with its figures."""
    for name, document in documents.items():
        if document["kind"].startswith("study "):
            path, study = name.removesuffix(".json"), document["kind"].removeprefix("study ")
            yield f"### {STUDIES.get(study, study)} ({Path(path).name})"
            yield f"`hf-rfattn study {study}`, on {measured_on(document)}; [{name}]({results}{name})."
            yield study_class(study).table(document)
            for figure in sorted((ROOT / RESULTS).glob(f"{path}*.png")):
                yield f"![{figure.stem.replace('_', ' ')}]({results}{figure.relative_to(ROOT / RESULTS)})"


def encoder_cost(documents: Documents, results: str, attention: str, transfer: bool, task: bool) -> Iterator[Block]:
    """Score and speed of an attention (a regular expression) relative to softmax in encoders, by length and model, with
    or without attention `transfer` and training on the `task`.
    """
    benched, rows = model_benchmarks(documents), []
    found = [parse_result(document, name) for name, document in documents.items() if document["kind"] == "task"]
    found = [result for result in found if ("steps" in result.budget) == task]
    for table in make_tables(found, lambda result: result.task.rpartition("/")[2]):
        model, length = table.first.model.partition(", ")[0], table.first.budget.get("max_length", 0)
        for row in table.rows:
            cell = benched.get((model, length, row.attention), {}).get(False)
            transferred = bool(row.runs[0].document.get("transfer"))
            if re.fullmatch(attention, row.attention) and transferred == transfer and cell:
                about = [f"{table.title}, {model.partition('/')[2].partition(' ')[0]}", percent(row.over_softmax)]
                rows.append((length, [f"{length:,}", *about, times(cell["speed_over_softmax"])]))
    if rows:
        headings = ["tokens", "task and model", "share of softmax's score", "speed over softmax"]
        yield Table("", headings, [row for _, row in sorted(rows)])


def decoder_cost(documents: Documents, results: str, kinds: tuple[str, ...], trained: bool) -> Iterator[Block]:
    """Perplexity, speed and cache of decoders by context length, relative to softmax with the same training."""
    measures = "prefill_tokens_per_second", "ms_per_token", "cache_bytes"
    for about, _, cells in context_cells(documents):
        softmax = {(cell["length"], cell["stage"]): cell for cell in cells if cell["attention"] == SOFTMAX}
        rows = []
        for cell in cells:
            base = softmax.get((cell["length"], cell["stage"]))
            if base and cell["attention"] in kinds and (cell["stage"] not in STAGES) == trained:
                perplexity = cell["metrics"]["perplexity"]["value"] / base["metrics"]["perplexity"]["value"]
                prefill, step, cache = (cell[name] / base[name] if name in cell else None for name in measures)
                ratios = perplexity, prefill, step and 1 / step, cache
                name = cell["attention"].partition(",")[0]
                rows.append([f"{cell['length']:,}", name, *map(times, ratios)])
        if rows:
            yield f"{about['model'].partition('/')[2]}, in multiples of softmax:"
            headings = ["tokens", "attention", "perplexity", "speed of the prompt", "speed of a new token", "cache"]
            yield Table("", headings, rows)


def gpu_break_even(documents: Documents, results: str) -> Iterator[Block]:
    """Predicted break-even lengths."""
    rows = [[f"{row[1]}, {row[0]}", *row[4:]] for row in predicted.table().rows if not row[1].startswith(SOFTMAX)]
    yield Table("", ["attention", *(f"{device.name} (predicted)" for device in predicted.DEVICES)], rows)


def figure(documents: Documents, results: str, plot: str, about: str) -> Iterator[Block]:
    """A plot with its data, machine and command, and the break-even lengths of a benchmark. The data of a study has the
    name of the plot up to the last underscore.
    """
    source = next((name for name in (f"{plot}.json", f"{plot.rpartition('_')[0]}.json") if name in documents), None)
    if source is None:
        return
    document = documents[source]
    yield f"![{about}]({results}{plot}.png)"
    yield origin(document, f"[data]({results}{source})")
    if document["kind"].startswith("bench "):
        rows = [[row[1], row[0], row[-1]] for row in speed_table(document).rows if row[-1]]
        yield Table("", ["attention", "pass", "faster than softmax from (break-even)"], rows, aligned=False)


def upstream(documents: Documents, results: str) -> Iterator[Block]:
    """Results of transformers' own tests with patched models: number of passed tests, and reasons for failures."""
    for document in (each for each in documents.values() if each["kind"] == "upstream"):
        rows, versions = document["rows"], document["versions"]
        kinds = list(dict.fromkeys(row["attention"] for row in rows))
        yield (
            f"`{document['command']}` with transformers {versions['transformers']}, torch {versions['torch']}, tests "
            f"of commit {(document['checkout']['commit'] or 'unknown')[:10]}:"
        )
        passed = []
        for model in [*dict.fromkeys(row["model"] for row in rows), "all"]:
            own = [[row for row in rows if row["attention"] == a and model in (row["model"], "all")] for a in kinds]
            counts = [(sum(row["passed"] for row in each), sum(row["counted"] for row in each)) for each in own]
            passed.append([model, *(f"{good:,} of {counted:,}" for good, counted in counts)])
        yield Table("", ["tests that pass", *kinds], passed, aligned=False)
        failed = Counter((why, row["attention"]) for row in rows for why in row["failed"].values())
        reasons = dict.fromkeys(why for (why, _), _ in failed.most_common())
        counts = [[why, *(str(failed[why, attention]) for attention in kinds)] for why in reasons]
        yield Table("", ["tests that fail", *kinds], counts, aligned=False)


COSTS: dict[str, Part] = {
    "encoder": partial(encoder_cost, attention="multipole", transfer=False, task=False),
    "encoder-exact": partial(encoder_cost, attention=r"hedgehog, \d+ exact heads", transfer=True, task=False),
    "encoder-transfer": partial(encoder_cost, attention="hedgehog", transfer=True, task=False),
    "encoder-task": partial(encoder_cost, attention="hedgehog", transfer=True, task=True),
    "decoder": partial(decoder_cost, kinds=("multipole, exact_keys=440",), trained=False),
    "decoder-trained": partial(decoder_cost, kinds=("fmm, bandwidth=512", "band, bandwidth=512"), trained=True),
    "gpu": gpu_break_even,
}
PLOTS = {  # of the gallery: name and description
    "ops": ("ops_cpu", "Time of one attention layer by sequence length"),
    "bge": ("embeddings/speed_bge", "Time and memory of bge-small by sequence length"),
    "minilm": ("embeddings/speed_minilm", "Time and memory of all-MiniLM-L6 by sequence length"),
    "reviews": ("long_reviews/speed", "Time and memory of a review classifier by sequence length"),
    "decode": ("decode_cpu", "Time of a new token and memory of the cache by prompt length"),
    "heads": ("studies/heads_error", "Error of the attention output by layer and head"),
    "kinds": (
        "studies/heads_kinds",
        "Kinds of heads: attention to near tokens, to the first and last token, entropy and norms",
    ),
    "rank": ("studies/rank", "Rank of attention matrices outside a band"),
    "mse": ("studies/mse_normal", "Error of random features on normal inputs by number of features"),
    "sparse": ("studies/mse_sparse", "Error of random features on sparse inputs by number of features"),
    "norms": ("studies/mse_norms", "Error of random features by norm of the inputs"),
    "gram": ("studies/gram_error", "Error of kernel matrices by number of features"),
    "mrf": ("studies/mrf_error", "Error of the log partition function of Markov random fields"),
}
PAGES: dict[Path, tuple[str, dict[str, Part]]] = {  # path to the results, and parts
    Path("README.md"): (f"{RESULTS}/", {"picture": tradeoff, "accuracy": scores, "speed": speed}),
    RESULTS / "README.md": ("", {
        "accuracy": comparisons, "evaluations": evaluations, "contexts": contexts, "speed": benchmarks,
        "gpu": gpu_prediction, "studies": studies,
    }),
    Path("docs/reference/upstream.md"): (f"../../{RESULTS}/", {"upstream": upstream}),
    Path("docs/guides/choose.md"): (f"../../{RESULTS}/", COSTS),
    Path("docs/gallery.md"): (
        f"../{RESULTS}/",
        {"tradeoff": tradeoff}
        | {name: partial(figure, plot=plot, about=text) for name, (plot, text) in PLOTS.items()},
    ),
}  # fmt: skip


def main(root: Annotated[Path, typer.Option(help="Root of the repository.")] = ROOT) -> None:
    """Generate the marked parts of all pages from the result files."""
    paths = sorted((root / RESULTS).rglob("*.json"))
    documents = {str(path.relative_to(root / RESULTS)): read_result(path) for path in paths}
    for name, (results, parts) in PAGES.items():
        before = (root / name).read_text(encoding="utf-8")
        after, images = fill(before, documents, results, parts)
        if after != before:
            (root / name).write_text(after, encoding="utf-8")
        for image in images:
            draw(image, documents, root / RESULTS)
        print(f"{name}: {'unchanged' if after == before else 'updated'}, from {len(documents)} result files")


def fill(text: str, documents: Documents, results: str, parts: dict[str, Part]) -> tuple[str, list[Image]]:
    """Return the text with all marked parts generated again, and the plots in them."""
    images: list[Image] = []
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"The page must have <!-- {name}:start --> and <!-- {name}:end --> once each.")
        blocks = list(make(documents, results)) or ["Nothing has been measured yet."]
        images += [block for block in blocks if isinstance(block, Image)]
        made = as_markdown(blocks, lambda image: f"{results}{image}").rstrip("\n")
        text = pattern.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    return text, images


def draw(image: Image, documents: Documents, folder: Path) -> bool:
    """Draw a plot unless it exists with the same data: the result file of the same name, or all files of its folder."""
    path, own = folder / image.name, image.name.removesuffix(".png") + ".json"
    parent = Path(own).parent
    data = documents.get(own) or [each for name, each in documents.items() if Path(name).parent == parent]
    mark = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
    if path.exists():
        with PIL.Image.open(path) as there:
            if there.info.get(MARK) == mark:
                return False
    image.draw().savefig(path, dpi=150, metadata={MARK: mark, "Software": None})
    return True


if __name__ == "__main__":
    typer.run(main)
