"""The command line: `hf-rfattn list`, `inspect`, `patch`, `unpatch`, `bench`, `study`, `card` and `publish`.

torch and transformers are imported inside the commands, by what they call.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .bench.cli import app as bench
from .commands import errors_without_traceback, in_bytes, load_config, parse_numbers, si
from .hub.cli import add_commands as add_hub_commands
from .study.cli import app as study

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from transformers import PreTrainedModel

    from .integration.discovery import AttentionSite
    from .mechanisms import Mechanism, MechanismConfig

app = typer.Typer(
    name="hf-rfattn",
    help="Linear-time attention for pretrained Hugging Face models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(bench)
app.add_typer(study)
add_hub_commands(app)

MOST_TOKENS = 2048  # of a text: the exact softmax it is compared with is quadratic
LENGTHS = "128,512,2048,8192"


@app.command("list")
def list_mechanisms() -> None:
    """Every mechanism, its aliases, and its options with their defaults."""
    from .mechanisms import mechanism_names, resolve_config
    from .mechanisms.registry import mechanism_aliases

    console = Console()
    for name in mechanism_names():
        config = resolve_config(name)
        title, descriptions = _describe(type(config))
        console.print(f"[bold]{name}[/bold]  {title}", highlight=False)
        aliases = [
            alias + (f" ({_assignments(options)})" if options else "")
            for alias, (target, options) in mechanism_aliases().items()
            if target == name
        ]
        if aliases:
            console.print(f"  also called: {', '.join(aliases)}", highlight=False, markup=False)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
        for option, (default, choices) in _options(config).items():
            table.add_row(f"  {option}", f"= {default}", " ".join(filter(None, [choices, descriptions.get(option)])))
        if table.row_count:
            console.print(table, markup=False)
        console.print()


def _describe(config: "type[MechanismConfig]") -> tuple[str, dict[str, str]]:
    """First line of the file that holds a mechanism, and what the docstring of its config says of each `option`: …"""
    import inspect
    import re

    module = inspect.getdoc(inspect.getmodule(config)) or ""
    text = " ".join((inspect.getdoc(config) or "").split())
    headings = list(re.finditer(r"((?:`\w+`(?:, | and )?)+): ", text))
    ends = [*(heading.start() for heading in headings[1:]), len(text)]
    descriptions = {
        option: text[heading.end() : end].strip()
        for heading, end in zip(headings, ends, strict=False)  # without headings there is one end too many
        for option in re.findall(r"`(\w+)`", heading[1])
    }
    return module.partition("\n")[0], descriptions


def _options(config: "MechanismConfig") -> dict[str, tuple[str, str]]:
    """Default and choices of each option."""
    import dataclasses
    import typing

    hints = typing.get_type_hints(type(config))
    found = {}
    for field in dataclasses.fields(config):
        literals = [hints[field.name], *typing.get_args(hints[field.name])]
        choices = [c for hint in literals if typing.get_origin(hint) is typing.Literal for c in typing.get_args(hint)]
        found[field.name] = (
            _json(getattr(config, field.name)),
            f"({' | '.join(map(str, choices))})" if choices else "",
        )
    return found


def _assignments(options: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_json(value)}" for name, value in options.items())


def _json(value: Any) -> str:
    """A value as `--options` takes it."""
    return value if isinstance(value, str) else json.dumps(value, default=str)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a model's name on the Hub.")],
    more: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", help="The same as --options.")] = None,
    attention: Annotated[str, typer.Option(help="A mechanism of `hf-rfattn list`.")] = "favor+",
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--options", metavar="NAME=VALUE ...", help="Options of the mechanism; values are JSON or plain text."
        ),
    ] = None,
    lengths: Annotated[str, typer.Option(help="Sequence lengths to count for.")] = LENGTHS,
    text: Annotated[str | None, typer.Option(help="Measure the error on this text; loads the weights.")] = None,
    text_file: Annotated[Path | None, typer.Option(help="The same, on the text of a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """What patch_model would do to MODEL: what is patched, what stays softmax and why, and what it costs by length.

    Without a text only the model's config is read.
    """
    with errors_without_traceback():
        counted = parse_numbers("--lengths", lengths, LENGTHS)
        config = _parse_attention(attention, [*(options or []), *(more or [])])
        text = _read_text(text, text_file)
        report = _inspect(model, config, counted, text)
    if as_json:
        print(json.dumps(report, indent=2, default=lambda error: error.to_dict()))
    else:
        _print_report(report, Console())


Output = Annotated[Path, typer.Option("-o", "--output", help="The new folder; it must not exist, or be empty.")]


@app.command()
def patch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a model's name on the Hub.")],
    attention: Annotated[str, typer.Argument(help="A mechanism of `hf-rfattn list`.")],
    output: Output,
    options: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", help="Options of the mechanism.")] = None,
    layers: Annotated[str | None, typer.Option(help="Which layers, such as 0-5,11; all by default.")] = None,
    cross_attention: Annotated[bool, typer.Option(help="Patch cross-attention too.")] = False,
    seed: Annotated[int, typer.Option(help="Of all random draws.")] = 0,
) -> None:
    """Patch MODEL and save it with its tokenizer; `from_pretrained` of the folder gives it back patched."""

    def change(loaded: "PreTrainedModel") -> None:
        from . import patch_model

        patch_model(loaded, config, layers=layers, cross_attention=cross_attention, seed=seed)

    with errors_without_traceback():
        config = _parse_attention(attention, options or [])
        _convert(model, output, change)
    typer.echo(f"{output}: {model} with {attention}. Load it after `import hf_rfattn`. It needs training.")


@app.command()
def unpatch(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A patched folder, or its name on the Hub.")],
    output: Output,
) -> None:
    """Save a patched MODEL with softmax again, without its mechanisms."""

    def change(loaded: "PreTrainedModel") -> None:
        from . import unpatch_model
        from .mechanisms import Mechanism

        if not any(isinstance(module, Mechanism) for module in loaded.modules()):
            raise ValueError(f"{model} is not patched.")
        unpatch_model(loaded)

    with errors_without_traceback():
        _convert(model, output, change)
    typer.echo(f"{output}: {model} with softmax.")


def _convert(name: str, output: Path, change: "Callable[[PreTrainedModel], None]") -> None:
    """Load a model, change it, and save it with its tokenizer into a new folder."""
    import transformers

    import hf_rfattn  # noqa: F401  # lets patched checkpoints load

    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already and is not an empty folder; choose another one.")
    transformers.logging.set_verbosity_error()
    loaded = _model_class(load_config(name)).from_pretrained(name)
    change(loaded)
    loaded.save_pretrained(output)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError, KeyError):
        typer.echo(f"{name} has no tokenizer that could be copied.", err=True)
    else:
        tokenizer.save_pretrained(output)


def _parse_attention(attention: str, assignments: list[str]) -> "MechanismConfig":
    from .mechanisms import resolve_config

    document: dict[str, Any] = {"mechanism": attention}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not name:
            raise ValueError(f"{assignment!r} is not an option; write NAME=VALUE, for example num_features=128.")
        if name in document:
            raise ValueError(f"{name!r} is given twice.")
        try:
            document[name] = json.loads(value)
        except json.JSONDecodeError:
            document[name] = value
    return resolve_config(document)


def _read_text(text: str | None, file: Path | None) -> str | None:
    if text is not None and file is not None:
        raise ValueError("Give --text or --text-file, not both.")
    if file is not None:
        text = file.read_text(encoding="utf-8")
    if text is not None and not text.strip():
        raise ValueError("The text is empty.")
    return text


def _inspect(name: str, config: "MechanismConfig", lengths: list[int], text: str | None) -> dict[str, Any]:
    """The report as a JSON document, but for the error, which stays an object."""
    import torch
    import transformers

    from .integration.cost import attention_cost, crossover_length, is_causal
    from .integration.discovery import find_attention

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model_config = load_config(name)
    model_class = _model_class(model_config)
    with torch.device("meta"):
        model = (
            model_class.from_config(model_config) if hasattr(model_class, "from_config") else model_class(model_config)
        )
    sites = find_attention(model)
    _patch(model, config)
    dtype = _dtype(model_config)
    patched: list[tuple[Mechanism, bool]] = [(s.module.rf, is_causal(s)) for s in sites if s.module.rf is not None]  # type: ignore[misc]

    costs = []
    for length in lengths:
        cost: dict[str, int] = {"length": length, "multiply_adds": 0, "softmax_multiply_adds": 0}
        for mechanism, causal in patched:
            one = attention_cost(mechanism, length, causal=causal, dtype=dtype)
            keys = ("state_bytes", "kv_cache_bytes") if causal else ("feature_bytes", "score_matrix_bytes")
            counts = (one.multiply_adds, one.softmax_multiply_adds, one.memory, one.softmax_memory)
            for key, value in zip(("multiply_adds", "softmax_multiply_adds", *keys), counts, strict=True):
                cost[key] = cost.get(key, 0) + value
        costs.append(cost)
    return {
        "model": name,
        "model_type": model_config.model_type,
        "class": type(model).__name__,
        "dtype": str(dtype).removeprefix("torch."),
        "attention": config.to_dict(),
        "modules": [_site_document(site) for site in sites],
        "costs": costs,
        "crossover_length": crossover_length(patched),
        **({} if text is None else _measure(name, model_class, config, text)),
    }


def _model_class(config: Any) -> Any:
    """The class the checkpoint was saved from, or AutoModel."""
    import transformers

    known = [getattr(transformers, name) for name in config.architectures or () if hasattr(transformers, name)]
    return known[0] if known else transformers.AutoModel


def _dtype(config: Any) -> "torch.dtype":
    import torch

    dtype = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None) or torch.float32
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype


def _patch(model: "PreTrainedModel", config: "MechanismConfig") -> None:
    """patch_model itself, so that what is shown is what it does; its warnings are part of the report."""
    import warnings

    from . import patch_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        patch_model(model, config)


def _site_document(site: "AttentionSite") -> dict[str, Any]:
    from .integration.cost import is_causal

    mechanism = getattr(site.module, "rf", None)
    reason = site.refusal or ("cross-attention stays softmax unless cross_attention=True" if site.cross else None)
    return {
        "name": site.name,
        "layer": site.index,
        "kind": "cross" if site.cross else "causal" if is_causal(site) else "bidirectional",
        "num_heads": site.num_heads,
        "num_kv_heads": site.num_kv_heads,
        "head_dim": site.head_dim,
        "attention": "softmax" if mechanism is None else mechanism.config.name,
        "num_features": None if mechanism is None else mechanism.num_features,
        "reason": reason if mechanism is None else None,
    }


def _measure(name: str, model_class: Any, config: "MechanismConfig", text: str) -> dict[str, Any]:
    """Number of tokens of the text that were used, and the error on them."""
    from transformers import AutoTokenizer

    from . import attention_error

    tokenizer = AutoTokenizer.from_pretrained(name)
    model = model_class.from_pretrained(name).eval()
    limits = (tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", None), MOST_TOKENS)
    batch = tokenizer(text, return_tensors="pt", truncation=True, max_length=min(limit for limit in limits if limit))
    _patch(model, config)
    return {"tokens": batch["input_ids"].numel(), "error": attention_error(model, batch)}


def _print_report(report: dict[str, Any], console: Console) -> None:
    name = report["attention"]["mechanism"]
    options = {k: v for k, v in report["attention"].items() if k != "mechanism"}
    console.print(f"{report['model']}: {report['class']}, {report['dtype']}", highlight=False, markup=False)
    console.print(f"{name}: {_assignments(options) or 'no options'}\n", highlight=False, markup=False)
    _print_modules(report["modules"], console)
    _print_costs(report, console)
    if "error" in report:
        console.print(
            f"\nError on {report['tokens']} tokens of the text, weights as they are:\n{report['error']}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )


def _print_modules(modules: list[dict[str, Any]], console: Console) -> None:
    """One row for all modules that differ in their layer alone."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for module in modules:
        parts = module["name"].split(".")
        last = max((i for i, part in enumerate(parts) if part.isdecimal()), default=None)
        if last is not None:
            parts[last] = "*"
        rest = {k: v for k, v in module.items() if k not in ("name", "layer")}
        groups.setdefault((".".join(parts), *rest.values()), []).append(module["layer"])
    table = Table(box=None, pad_edge=False)
    table.add_column("modules", overflow="fold")
    for title in ("layers", "sees", "heads", "kv heads", "head size", "attention", "features"):
        table.add_column(title)
    reasons = []
    for (name, kind, heads, kv_heads, head_dim, attention, features, reason), layers in groups.items():
        sees = {"causal": "the past", "bidirectional": "all", "cross": "the encoder"}[kind]
        table.add_row(
            name,
            _ranges(layers),
            sees,
            *map(str, (heads, kv_heads, head_dim, attention)),
            "" if features is None else str(features),
        )
        if reason:
            reasons.append(f"{name} stays softmax: {reason}.")
    console.print(table, markup=False)
    for reason in reasons:
        console.print(reason, highlight=False, markup=False)


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2, 5"."""
    from itertools import groupby

    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _print_costs(report: dict[str, Any], console: Console) -> None:
    """Multiply-adds and memory of all patched modules, one sequence."""
    name = report["attention"]["mechanism"]
    memory = {
        "kv_cache_bytes": "softmax: KV cache",
        "state_bytes": f"{name}: state",
        "score_matrix_bytes": "softmax: scores",
        "feature_bytes": f"{name}: features",
    }
    memory = {key: title for key, title in memory.items() if key in report["costs"][0]}
    console.print("\nAll patched modules together, one sequence:", highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("length", "softmax: mult-adds", f"{name}: mult-adds", "ratio", *memory.values()):
        table.add_column(title, justify="right")
    for cost in report["costs"]:
        table.add_row(
            str(cost["length"]),
            si(cost["softmax_multiply_adds"]),
            si(cost["multiply_adds"]),
            f"{cost['multiply_adds'] / cost['softmax_multiply_adds']:.3g}",
            *(in_bytes(cost[key]) for key in memory),
        )
    console.print(table, markup=False)
    crossover = report["crossover_length"]
    lines = [
        "Never fewer multiply-adds than softmax."
        if crossover is None
        else f"Fewer multiply-adds than softmax from length {crossover} on.",
        "These are counts, not times: where it becomes faster depends on the hardware.",
    ]
    if "state_bytes" in memory:
        lines.append(
            "State: all that generate() keeps of a sequence, in float32; the KV cache of softmax grows by every token."
        )
    if "feature_bytes" in memory:
        lines.append("Scores: if stored as a matrix, as eager attention does; fused kernels do not store them.")
    for line in lines:
        console.print(line, highlight=False, markup=False)
