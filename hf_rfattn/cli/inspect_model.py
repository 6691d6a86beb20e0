"""`hf-rfattn inspect MODEL`: which modules would be patched, and the cost of their attention."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .command_line import errors_without_traceback, parse_numbers
from .patch_model import Model, Options

if TYPE_CHECKING:
    import torch

    from ..integration.discovery import AttentionSite
    from ..mechanisms import Mechanism, MechanismConfig

MOST_TOKENS = 2048  # maximum length of the text, since exact softmax is quadratic
LENGTHS = "128,512,2048,8192"
SEES = {"causal": "the past", "bidirectional": "all", "cross": "the encoder"}
MEMORY = {"kv_cache_bytes": "softmax: KV cache", "state_bytes": "{}: state"}


def inspect_model(
    model: Model,
    options: Options = None,
    attention: Annotated[str, typer.Option(help="A mechanism; `hf-rfattn list` shows all.")] = "favor+",
    lengths: Annotated[str, typer.Option(help="Sequence lengths to compute costs for.")] = LENGTHS,
    text: Annotated[
        str | None, typer.Option(help="Also measure the error of the attention on this text; loads the weights.")
    ] = None,
    text_file: Annotated[Path | None, typer.Option(help="The same, with the text of a file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what patching would change in a model, and its cost.

    Lists the attention modules that would be patched, those that stay softmax and why, and multiply-adds and memory by
    sequence length. Without a text, only the config of the model is read.
    """
    with errors_without_traceback():
        from ..mechanisms import mechanism_names, parse_attention
        from ..mechanisms.registry import mechanism_aliases

        for word in options or []:
            if word in (*mechanism_names(), *mechanism_aliases()):
                raise ValueError(f"Unexpected argument {word!r}; write --attention {word}.")
        counted = parse_numbers("--lengths", lengths, LENGTHS)
        config = parse_attention(attention, options or [])
        if text is not None and text_file is not None:
            raise ValueError("Give --text or --text-file, not both.")
        text = text_file.read_text(encoding="utf-8") if text_file is not None else text
        if text is not None and not text.strip():
            raise ValueError("The text is empty; give some words to measure the error on.")
        report = _inspect(model, config, counted, text)
        if as_json:
            typer.echo(json.dumps(report, indent=2, default=lambda error: error.to_dict()))
        else:
            typer.echo("\n".join(_lines(report)))


def _inspect(name: str, config: "MechanismConfig", lengths: list[int], text: str | None) -> dict[str, Any]:
    """Return the report as a dict, in which only the error is not JSON."""
    import torch
    import transformers

    from .. import attention_error
    from ..bench.loading import patch_quietly
    from ..integration.cost import crossover_length, is_causal
    from ..integration.discovery import find_attention
    from ..integration.positions import learned_positions
    from ..integration.reading import first_tokens, load_config, model_class

    transformers.logging.set_verbosity_error()
    model_config = load_config(name)
    cls = model_class(model_config)
    with torch.device("meta"):
        model = cls.from_config(model_config) if hasattr(cls, "from_config") else cls(model_config)
    sites = find_attention(model)
    patch_quietly(model, config)  # patch_model's warnings are part of the report
    dtype = getattr(model_config.get_text_config(), "dtype", None) or getattr(model_config, "dtype", None)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype or torch.float32
    patched: list[tuple[Mechanism, bool]] = [(s.module.rf, is_causal(s)) for s in sites if s.module.rf is not None]  # type: ignore[misc]
    report = {
        "model": name,
        "model_type": model_config.model_type,
        "class": type(model).__name__,
        "dtype": str(dtype).removeprefix("torch."),
        "attention": config.to_dict(),
        "learned_positions": learned_positions(model),
        "modules": [_module(site) for site in sites],
        "costs": [_costs(patched, length, dtype) for length in lengths],
        "crossover_length": crossover_length(patched),
    }
    if text is not None:
        loaded = cls.from_pretrained(name, trust_remote_code=False).eval()
        batch = first_tokens(text, name, loaded, MOST_TOKENS)
        patch_quietly(loaded, config)
        report |= {"tokens": batch["input_ids"].numel(), "error": attention_error(loaded, batch)}
    return report


def _module(site: "AttentionSite") -> dict[str, Any]:
    from ..integration.cost import is_causal

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


def _costs(patched: "list[tuple[Mechanism, bool]]", length: int, dtype: "torch.dtype") -> dict[str, int]:
    """Multiply-adds of all patched modules for one sequence, and memory of their caches during generation."""
    from ..integration.cost import attention_cost

    cost: dict[str, int] = {"length": length, "multiply_adds": 0, "softmax_multiply_adds": 0}
    for mechanism, causal in patched:
        one = attention_cost(mechanism, length, causal=causal, dtype=dtype)
        counts = {"multiply_adds": one.multiply_adds, "softmax_multiply_adds": one.softmax_multiply_adds}
        if causal:
            counts |= {"state_bytes": one.memory, "kv_cache_bytes": one.softmax_memory}
        for key, value in counts.items():
            cost[key] = cost.get(key, 0) + value
    return cost


def _lines(report: dict[str, Any]) -> list[str]:
    """Format the report as lines of text."""
    from ..mechanisms.config import option_value

    name, *options = report["attention"].items()
    listed = ", ".join(f"{key}={option_value(value)}" for key, value in options)
    lines = [f"{report['model']}: {report['class']}, {report['dtype']}", f"{name[1]}: {listed or 'no options'}", ""]
    lines += [*_module_lines(report["modules"]), "", *_cost_lines(report)]
    if report["learned_positions"] is not None:
        lines.append(
            f"\nThe model has learned positions for {report['learned_positions']:,} tokens. For longer inputs: "
            "hf_rfattn.extend_positions, or `hf-rfattn patch ... --max-length`."
        )
    if "error" in report:
        lines.append(f"\nError on {report['tokens']} tokens of the text, without training:\n{report['error']}")
    return lines


def _module_lines(modules: list[dict[str, Any]]) -> list[str]:
    """Table with one row for all modules that differ only in their layer."""
    from ..integration.spec import format_layers
    from ..integration.text_table import text_table

    groups: dict[tuple[Any, ...], list[int]] = {}
    for module in modules:
        name, layer, *rest = module.values()
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        if numbers:
            parts[numbers[-1]] = "*"
        groups.setdefault((".".join(parts), *rest), []).append(layer)
    rows, reasons = [], []
    for (name, kind, *sizes, attention, features, reason), layers in groups.items():
        where = format_layers(layers).replace(",", ", ")
        rows.append((name, where, SEES[kind], *sizes, attention, "" if features is None else features))
        reasons += [f"{name} stays softmax: {reason}."] if reason else []
    titles = ("modules", "layers", "sees", "heads", "kv heads", "head size", "attention", "features")
    return [text_table(dict.fromkeys(titles, "<"), rows), *reasons]


def _cost_lines(report: dict[str, Any]) -> list[str]:
    from ..integration.text_table import text_table
    from ..results.report import in_bytes, si

    name, costs, even = report["attention"]["mechanism"], report["costs"], report["crossover_length"]
    memory = {key: title.format(name) for key, title in MEMORY.items() if key in costs[0]}
    rows = []
    for cost in costs:
        own, softmax = cost["multiply_adds"], cost["softmax_multiply_adds"]
        sizes = (in_bytes(cost[key]) for key in memory)
        rows.append((cost["length"], si(softmax), si(own), f"{own / softmax:.3g}", *sizes))
    titles = ("length", "softmax: mult-adds", f"{name}: mult-adds", "ratio", *memory.values())
    lines = ["All patched modules together, for one sequence:", text_table(dict.fromkeys(titles, ">"), rows)]
    if "state_bytes" in memory:
        lines.append("State: memory of generate() per sequence, in float32; the KV cache grows with every token.")
    lines.append(
        f"Break-even sequence length in multiply-adds: {f'{even:,}' if even else 'none'}. The break-even in time is "
        "longer; `hf-rfattn bench ops` and `bench model` measure it on this machine."
    )
    return lines
