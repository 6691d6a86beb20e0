"""Measure a pretrained decoder by context length with several kinds of attention: perplexity, speed and cache size.

python recipes/evaluate_lm.py --model ./my-llama --attention softmax,fmm --lengths 512 1024 --transfer-steps 200
"""

import training.messages  # noqa: F401  # isort: skip

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from training.data import find_source
from training.evaluation import as_document
from training.language import load_text, perplexity, split_blocks, split_windows, tokens_of, window_losses
from training.models import (
    Collator,
    attention_of,
    choose_length,
    load_tokenizer,
    mechanism_parameters,
    read,
    set_attention,
)
from training.options import CommonOptions, described
from training.session import RESULT, Session, run_recipe
from training.teaching import model_inputs, shared_batches, transfer, transfer_document
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_rfattn
from hf_rfattn.bench.decode import cache_bytes
from hf_rfattn.bench.timing import synchroniser
from hf_rfattn.results import SOFTMAX, STAGES, Table, in_bytes, print_blocks, rounded, write_result

REPETITIONS = 3  # of the prefill, after one that is not counted
MEASURED_ON = 2  # blocks on which errors of attention transfer are measured


@dataclass(kw_only=True)
class EvaluateOptions(CommonOptions):
    attention: str | None = described(
        "'softmax' or mechanisms, several with commas: softmax,fmm. By default the model stays as it is."
    )
    lengths: list[int] = field(
        default_factory=lambda: [512, 1024, 2048], metadata={"help": "Context lengths in tokens."}
    )
    data_config: str = described("Which WikiText on the Hub.", "wikitext-2-raw-v1")
    text_column: str = described("Column of the text.", "text")
    split: str = described("The split to evaluate on.", "test")
    max_tokens: int | None = described("Evaluate on so many tokens, from the beginning.")
    new_tokens: int = described("Tokens to generate at the end of each context, for their time.", 16)

    transfer_steps: int = described("Also measure after so many steps of attention transfer.", 0)
    transfer_split: str = described("The split to learn from.", "train")
    transfer_length: int | None = described("Length of the blocks to learn from. Default: the smallest of --lengths.")
    transfer_learning_rate: float | None = described("Peak learning rate of attention transfer.")
    batch_size: int = described("Blocks per step of attention transfer.", 4)

    def __post_init__(self) -> None:
        self.lengths = sorted(set(self.lengths))
        super().__post_init__()
        if self.save_every:
            raise ValueError("This recipe saves no states: leave out --save-every.")
        if self.lengths[0] <= self.new_tokens + 1:
            raise ValueError(f"--lengths must be above --new-tokens {self.new_tokens} + 1.")
        if self.max_length not in (None, self.lengths[-1]):
            raise ValueError("--max-length is the largest of --lengths; leave it out.")
        self.max_length = self.lengths[-1]
        mechanisms = [name for name in self.kinds if name not in (None, SOFTMAX)]
        if (self.attention_options or self.layers) and len(mechanisms) != 1:
            raise ValueError("--attention-options and --layers need exactly one mechanism in --attention.")
        for name in mechanisms:
            hf_rfattn.resolve_config(str(name))  # raises if it is unknown

    @property
    def kinds(self) -> list[str | None]:
        """Each kind of attention once, in the order given; None: as the model is."""
        return [None] if self.attention is None else list(dict.fromkeys(self.attention.split(",")))


def evaluate(session: Session) -> None:
    options = session.options
    if session.accelerator.num_processes > 1:
        raise ValueError("evaluate_lm.py measures speed and runs in one process; start it with python.")
    tokenizer = load_tokenizer(options)
    model = read("--model", AutoModelForCausalLM, options.model, dtype=torch.float32)
    model.to(session.accelerator.device).eval()
    choose_length(model, options, options.lengths[-1], tokenizer)
    source = find_source(options.data, "Salesforce/wikitext", options.data_config, options.data_name)
    splits = [options.split, *([options.transfer_split] if options.transfer_steps else [])]
    texts = {split: load_text(source, split, column=options.text_column) for split in splits}
    tokens = tokens_of(texts[options.split], tokenizer)[: options.max_tokens]
    if len(tokens) < options.lengths[-1]:
        raise ValueError(f"{len(tokens)} tokens to evaluate on are less than a context of {options.lengths[-1]}.")
    train, measured_on = None, {}
    if options.transfer_steps:  # the last blocks are kept for the errors that are reported
        stream, collate = tokens_of(texts[options.transfer_split], tokenizer), Collator(tokenizer)
        blocks = split_blocks(stream, options.transfer_length or options.lengths[0]).select_columns(["input_ids"])
        count = len(blocks) - MEASURED_ON
        if count < options.batch_size:
            raise ValueError(f"{len(blocks)} blocks to learn from are too few; give a smaller --batch-size or length.")
        train, measured_on = blocks.select(range(count)), model_inputs(blocks, collate, [*range(count, len(blocks))])
    session.open_output()
    cells: list[dict[str, Any]] = []
    kinds: dict[str, Any] = {}
    transfers: dict[str, Any] = {}
    for kind in options.kinds:
        if kind is not None:
            hf_rfattn.unpatch_model(model)
            if kind != SOFTMAX:
                set_attention(model, dataclasses.replace(options, attention=kind))
        name = kind or hf_rfattn.attention_label(attention_of(model))
        kinds[name] = attention_of(model)
        cells += measure_lengths(session, model, tokens, name, STAGES[0])
        if train is not None and mechanism_parameters(model):
            done = transfer(session, model, shared_batches(session, train, collate), measured_on)
            transfers[name] = transfer_document(done, options.batch_size)
            model.eval()
            cells += measure_lengths(session, model, tokens, name, STAGES[1])
    found = {
        "attention": kinds,
        "dataset": source.document(", ".join(texts), texts),
        "lengths": options.lengths,
        "tokens": len(tokens),
        "new_tokens": options.new_tokens,
        "repetitions": REPETITIONS,
        "threads": torch.get_num_threads(),
        "transfer": transfers or None,
        "cells": cells,
        "options": dataclasses.asdict(options),
    }
    write_result({**session.document, **found}, session.output / RESULT)
    print_blocks([table(cells, f"{session.document['model']} on {source.name}")], Console())
    session.say(f"Written: {session.output / RESULT}")


@torch.no_grad()
def measure_lengths(
    session: Session, model: PreTrainedModel, tokens: np.ndarray, name: str, stage: str
) -> list[dict[str, Any]]:
    """A cell for each context length; every token but the first is predicted once, from at most `length` - 1 others."""
    cells = []
    for length in session.options.lengths:
        losses, counts = [], []
        for row in split_windows(tokens, length):
            ids = torch.tensor([row["input_ids"]], device=model.device)
            found = window_losses(model(input_ids=ids, use_cache=False).logits, ids)
            losses.append(float(found["losses"]))
            counts.append(int(found["tokens"]))
        metrics = as_document(perplexity(losses, counts))
        speed = measure_speed(model, tokens[:length], session.options.new_tokens)
        cells.append({"attention": name, "stage": stage, "length": length, "metrics": metrics, **speed})
        session.say(f"{name}, {stage}, {length} tokens: perplexity {metrics['perplexity']['value']:.4f}")
    return cells


@torch.no_grad()
def measure_speed(model: PreTrainedModel, tokens: np.ndarray, new_tokens: int) -> dict[str, Any]:
    """Prefill of a context and greedy decoding after it, to as many tokens as are given; medians."""
    wait = synchroniser(model.device)

    def next_token(ids: Tensor, cache: DynamicCache) -> tuple[float, Tensor]:
        wait()
        started = time.perf_counter()
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        wait()
        return time.perf_counter() - started, token

    prompt = torch.tensor(tokens, device=model.device)[None, : len(tokens) - new_tokens]
    prefills, steps = [], []
    for _ in range(1 + REPETITIONS):
        cache = DynamicCache(config=model.config)
        seconds, token = next_token(prompt, cache)
        prefills.append(seconds)
    for _ in range(new_tokens):
        seconds, token = next_token(token, cache)
        steps.append(seconds)
    return {
        "prefill_tokens": prompt.shape[1],
        "prefill_tokens_per_second": rounded(prompt.shape[1] / statistics.median(prefills[1:])),
        "ms_per_token": rounded(1000 * statistics.median(steps)),
        "cache_bytes": cache_bytes(cache),
    }


def table(cells: list[dict[str, Any]], title: str) -> Table:
    """A row for each cell, with its perplexity relative to softmax at the same length."""
    softmax = {c["length"]: c["metrics"]["perplexity"]["value"] for c in cells if c["attention"] == SOFTMAX}
    headings = ["attention", "context", "perplexity", "× softmax", "prefill tokens/s", "ms/token", "cache"]
    rows = []
    for cell in cells:
        value, length = cell["metrics"]["perplexity"]["value"], cell["length"]
        rows.append([
            cell["attention"] + (f", {STAGES[1]}" if cell["stage"] == STAGES[1] else ""),
            f"{length:,}",
            f"{value:.4g}",
            f"{value / softmax[length]:.3f}" if length in softmax else "–",
            f"{cell['prefill_tokens_per_second']:,.0f}",
            f"{cell['ms_per_token']:.4g}",
            in_bytes(cell["cache_bytes"]),
        ])  # fmt: skip
    return Table(title, headings, rows)


if __name__ == "__main__":
    run_recipe(EvaluateOptions, "bench lm", evaluate, __doc__)
