"""The table of architectures: `PYTHONPATH=tests python -m support.reach_table --page docs/reference/models.md`.

None of it is written by hand: every model is built, patched and run, and the table says what its attention modules did.
"""

import argparse
import logging
import re
import sys
import warnings
from pathlib import Path

import torch

from hf_rfattn import patch_model
from hf_rfattn.integration.discovery import find_attention
from support.architectures import REFUSED, SUPPORTED, build, make_inputs, mechanism_calls, outputs

START, END = "<!-- reach:start -->", "<!-- reach:end -->"


def _reach(name: str) -> tuple[str, str, str]:
    """(inputs, what was patched, what stayed softmax), seen by patching and running the model."""
    model = build(name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch_model(model, "favor+")
    with torch.no_grad(), mechanism_calls(model) as calls:
        outputs(model, make_inputs(name))
    causal = {flag for flags in calls.values() for flag in flags}
    patched = " and ".join(word for word, flag in (("bidirectional", False), ("causal", True)) if flag in causal)
    sites = [site for site in find_attention(model) if site.name not in calls]
    kept = ["cross-attention"] if any(site.cross for site in sites) else []
    if any(not site.cross for site in sites):
        kept.append("sliding-window layers")
    where = " of the global layers" if "sliding-window layers" in kept else ""
    return SUPPORTED[name].inputs, f"{patched} self-attention{where}", ", ".join(kept) or "–"


def _refusal(name: str) -> str:
    """The reason that `patch_model` gives."""
    try:
        patch_model(build(name), "favor+")
    except ValueError as error:
        if "only cross-attention" in str(error):
            return "it has only cross-attention, which `cross_attention=True` patches"
        reason = str(error).partition("cannot be patched: ")[2].partition(". Nothing")[0].partition(" (")[0]
        return re.sub(r"a window of \d+ tokens", "a window", reason)  # the size is that of the tiny model
    raise RuntimeError(f"{name} was patched, but stands among those that are refused.")


def _rows(groups: dict[tuple[str, ...], list[str]]) -> list[str]:
    return [f"| {' | '.join(key)} | {', '.join(names)} |" for key, names in groups.items()]


def reach_table() -> str:
    """Two Markdown tables: what of which architecture is patched, and what is refused and why."""
    supported: dict[tuple[str, ...], list[str]] = {}
    refused: dict[tuple[str, ...], list[str]] = {}
    for name in SUPPORTED:
        supported.setdefault(_reach(name), []).append(name)
    for name in REFUSED:
        refused.setdefault((_refusal(name),), []).append(name)
    return "\n".join(
        [
            "| input | patched | stays softmax | architectures |",
            "|---|---|---|---|",
            *_rows(supported),
            "",
            "| refused, because | architectures |",
            "|---|---|",
            *_rows(refused),
        ]
    )


def with_table(page: str, table: str) -> str:
    """The page with the table between its markers."""
    before, start, rest = page.partition(START)
    _, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"There is no place for the table; put {START} and {END} on lines of their own.")
    return f"{before}{START}\n{table}\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the table of supported architectures, or write it to a page.")
    parser.add_argument("--page", type=Path, help="file with the markers")
    path = parser.parse_args().page
    logging.disable(logging.WARNING)  # of transformers, on tiny configs
    torch.set_num_threads(1)
    table = reach_table()
    if path is None:
        sys.stdout.write(table + "\n")
    else:
        path.write_text(with_table(path.read_text(encoding="utf-8"), table), encoding="utf-8")


if __name__ == "__main__":
    main()
