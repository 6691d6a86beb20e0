"""Measure perplexity, speed and cache size of a pretrained decoder by context length, with several mechanisms.

python recipes/evaluate_lm.py --model ./my-llama --attention "softmax,fmm bandwidth=256" --lengths 512 1024
"""

import training.messages  # noqa: F401  # isort: skip

import dataclasses
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from rich.console import Console
from torch import Tensor
from training.data import find_source
from training.language import load_text, perplexity, split_blocks, split_windows, tokens_of, window_losses
from training.models import Collator, attention_of, choose_length, load_tokenizer, mechanism_parameters, read
from training.options import CommonOptions, described
from training.session import RESULT, Session, run_recipe
from training.task import as_document, model_inputs, shared_batches
from training.teaching import transfer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

import hf_rfattn
from hf_rfattn import MechanismConfig
from hf_rfattn.bench.decode import cache_bytes
from hf_rfattn.bench.loading import check_decoder
from hf_rfattn.bench.measuring import synchroniser
from hf_rfattn.results.documents import rounded, write_result
from hf_rfattn.results.report import DASH, Table, in_bytes, number, print_blocks, times
from hf_rfattn.results.schema import SOFTMAX, STAGES

MEASURED_ON = 2  # number of blocks on which the errors of attention transfer are measured


@dataclass(kw_only=True)
class EvaluateOptions(CommonOptions):
    attention: str | None = described(
        "softmax or mechanisms, separated by commas, with options: 'softmax,fmm bandwidth=256,band'. Default: leave "
        "the model as it is."
    )
    dtype: Literal["float32", "bfloat16"] = described("Dtype of weights and activations.", "float32")
    lengths: list[int] = field(
        default_factory=lambda: [512, 1024, 2048], metadata={"help": "Context lengths in tokens."}
    )
    data_config: str = described("Configuration of WikiText on the Hub.", "wikitext-2-raw-v1")
    text_column: str = described("Column with the text.", "text")
    split: str = described("Split to evaluate on.", "test")
    max_tokens: int | None = described("Maximum number of tokens to evaluate on; 0 measures speed only.")
    new_tokens: int = described("Number of tokens to generate and time after each context.", 16)
    repetitions: int = described("Number of timed repetitions, after a warm-up; 0 skips speed.", 3)

    transfer_steps: int = described("Number of attention transfer steps; measures before and after.", 0)
    transfer_split: str = described("Split for attention transfer.", "train")
    transfer_length: int | None = described(
        "Sequence length of attention transfer. Default: the smallest of --lengths."
    )
    transfer_learning_rate: float | None = described("Peak learning rate of attention transfer.")
    batch_size: int = described("Batch size of attention transfer.", 4)

    def __post_init__(self) -> None:
        self.lengths = sorted(set(self.lengths))
        super().__post_init__()
        if self.save_every:
            raise ValueError("--save-every: this recipe cannot resume; leave the option out.")
        if not self.lengths or self.lengths[0] <= self.new_tokens + 1:
            raise ValueError(
                f"--lengths {self.lengths}: all must be larger than {self.new_tokens + 1}, which is --new-tokens + 1."
            )
        if self.max_length not in (None, self.lengths[-1]):
            raise ValueError("--max-length is set by the largest of --lengths; leave it out.")
        self.max_length = self.lengths[-1]
        self.kinds()  # raises ValueError for unknown mechanisms

    def kinds(self) -> dict[str | None, MechanismConfig | None]:
        """Config of each entry of --attention; None for softmax. The key None stands for the unchanged model."""
        if self.attention is None:
            return {None: None}
        words = {kind: kind.split() or [""] for kind in self.attention.split(",")}
        mechanisms = [name for name, *_ in words.values() if name != SOFTMAX]
        if (self.attention_options or self.layers) and len(mechanisms) != 1:
            raise ValueError(
                "--attention-options and --layers work with one mechanism only; write options after its name."
            )
        return {
            kind: None if name == SOFTMAX else hf_rfattn.parse_attention(name, [*given, *self.attention_options])
            for kind, (name, *given) in words.items()
        }


def evaluate(session: Session) -> None:
    options = session.options
    if session.accelerator.num_processes > 1:
        raise ValueError("evaluate_lm.py measures speed, so it runs in one process only; start it with python.")
    tokenizer = load_tokenizer(options)
    model = read("--model", AutoModelForCausalLM, options.model, dtype=getattr(torch, options.dtype))
    model.to(session.accelerator.device).eval()
    check_decoder(model, f"--model {options.model}")
    choose_length(model, options, options.lengths[-1], tokenizer)
    source = find_source(options.data, "Salesforce/wikitext", options.data_config, options.data_name)
    splits = [options.split, *([options.transfer_split] if options.transfer_steps else [])]
    texts = {split: load_text(source, split, column=options.text_column) for split in splits}
    stream = tokens_of(texts[options.split], tokenizer)
    tokens = stream[: options.max_tokens]
    if len(stream if options.max_tokens == 0 else tokens) < options.lengths[-1]:
        raise ValueError(
            f"The text has {len(tokens)} tokens, less than the longest of --lengths ({options.lengths[-1]})."
        )
    train, few = None, {}
    if options.transfer_steps:  # the last blocks are held out to measure errors
        learnt, collate = tokens_of(texts[options.transfer_split], tokenizer), Collator(tokenizer)
        blocks = split_blocks(learnt, options.transfer_length or options.lengths[0]).select_columns(["input_ids"])
        count = len(blocks) - MEASURED_ON
        if count < options.batch_size:
            raise ValueError(
                f"The text for attention transfer has {len(blocks)} block(s); --batch-size {options.batch_size} and "
                f"{MEASURED_ON} to measure errors on are needed. Give a smaller --batch-size or --transfer-length."
            )
        train, few = blocks.select(range(count)), model_inputs(blocks, collate, list(range(count, len(blocks))))
    session.open_output()
    cells: list[dict[str, Any]] = []
    kinds: dict[str, Any] = {}
    transfers: dict[str, Any] = {}
    speed = measure_speed(model, stream, options)
    for kind, config in options.kinds().items():
        set_kind(model, kind, config, options)
        name = kind or hf_rfattn.attention_label(attention_of(model))
        kinds[name] = attention_of(model)
        here = {length: speed.get((kind, length), {}) for length in options.lengths}
        cells += measure_lengths(session, model, tokens, here, name, STAGES[0])
        if train is not None and mechanism_parameters(model):
            transfers[name] = transfer(session, model, shared_batches(session, train, collate), few)
            model.eval()
            cells += measure_lengths(session, model, tokens, here, name, STAGES[1])
    found = {
        "attention": kinds,
        "dataset": source.document(", ".join(texts), texts),
        "lengths": options.lengths,
        "tokens": len(tokens),
        "new_tokens": options.new_tokens,
        "repetitions": options.repetitions,
        "dtype": options.dtype,
        "threads": torch.get_num_threads(),
        "transfer": transfers or None,
        "cells": cells,
        "options": dataclasses.asdict(options),
    }
    write_result({**session.document, **found}, session.output / RESULT)
    print_blocks([table(cells, f"Perplexity and speed of {session.document['model']} on {source.name}")], Console())
    session.say(f"Written: {session.output / RESULT}")


def set_kind(model: PreTrainedModel, kind: str | None, config: MechanismConfig | None, options: Any) -> None:
    """Patch or unpatch the model; with `kind` None, leave it unchanged."""
    if kind is not None:
        hf_rfattn.unpatch_model(model)
    if config is not None:
        hf_rfattn.patch_model(model, config, layers=options.layers, seed=options.seed)


def measure_lengths(
    session: Session, model: PreTrainedModel, tokens: np.ndarray, speed: dict[int, Any], name: str, stage: str
) -> list[dict[str, Any]]:
    """Return a cell per context length. `speed`: by length; attention transfer does not change it."""
    cells = []
    for length, measured in speed.items():
        metrics = score(model, tokens, length) if len(tokens) else {}
        cells.append({"attention": name, "stage": stage, "length": length, "metrics": metrics, **measured})
        said = f"perplexity {metrics['perplexity']['value']:.4f}" if metrics else measured
        session.say(f"{name}, {stage}, {length} tokens: {said}")
    return cells


@torch.no_grad()
def score(model: PreTrainedModel, tokens: np.ndarray, length: int) -> dict[str, Any]:
    """Compute the perplexity. Each token but the first is predicted once, from at most `length` - 1 previous ones."""
    losses, counts = [], []
    for row in split_windows(tokens, length):
        ids = torch.tensor([row["input_ids"]], device=model.device)
        found = window_losses(model(input_ids=ids, use_cache=False).logits, ids)
        losses.append(float(found["losses"]))
        counts.append(int(found["tokens"]))
    return as_document(perplexity(losses, counts))


@torch.no_grad()
def measure_speed(
    model: PreTrainedModel, tokens: np.ndarray, options: EvaluateOptions
) -> dict[tuple[str | None, int], dict[str, Any]]:
    """Measure prefill and greedy decoding, up to `length` tokens in total; medians over repetitions.

    Mechanisms are measured alternately, so that other load on the machine affects all of them.
    """
    wait = synchroniser(model.device)

    def next_token(ids: Tensor, cache: DynamicCache) -> tuple[float, Tensor]:
        wait()
        started = time.perf_counter()
        logits = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
        token = logits[:, -1:].argmax(-1)
        wait()
        return time.perf_counter() - started, token

    found = {}
    for length in options.lengths if options.repetitions else ():
        prompt = torch.tensor(tokens[: length - options.new_tokens], device=model.device)[None]
        prefills: dict[str | None, list[float]] = {kind: [] for kind in options.kinds()}
        for repetition in range(1 + options.repetitions):
            for kind, config in options.kinds().items():
                set_kind(model, kind, config, options)
                cache = DynamicCache(config=model.config)
                seconds, token = next_token(prompt, cache)
                prefills[kind] += [seconds] if repetition else []
                if repetition < options.repetitions:
                    continue
                steps = []
                for _ in range(options.new_tokens):
                    seconds, token = next_token(token, cache)
                    steps.append(seconds)
                found[kind, length] = {
                    "prefill_tokens": prompt.shape[1],
                    "prefill_tokens_per_second": rounded(prompt.shape[1] / statistics.median(prefills[kind])),
                    "ms_per_token": rounded(1000 * statistics.median(steps)),
                    "cache_bytes": cache_bytes(cache),
                }
    return found


def table(cells: list[dict[str, Any]], title: str) -> Table:
    """One row per length and attention, with perplexity by stage, speed and cache size.

    In brackets: ratios to softmax, for perplexity both before training and at the same stage.
    """
    scores = {
        (cell["length"], cell["attention"], cell["stage"]): cell["metrics"]["perplexity"]["value"]
        for cell in cells
        if cell["metrics"]
    }
    speeds = {(cell["length"], cell["attention"]): cell for cell in cells if "cache_bytes" in cell}
    found = {stage for *_, stage in scores}
    stages = [stage for stage in STAGES if stage in found] + sorted(found - set(STAGES))
    rows = []
    for length, attention in dict.fromkeys((cell["length"], cell["attention"]) for cell in cells):
        row = [f"{length:,}", attention]
        for stage in stages:
            value = scores.get((length, attention, stage))
            softmax = [scores.get((length, SOFTMAX, name)) for name in dict.fromkeys((STAGES[0], stage))]
            row.append(with_ratios(value, [value / base for base in softmax if value and base]))
        own, base = (speeds.get((length, name), {}) for name in (attention, SOFTMAX))
        for name, power in (("prefill_tokens_per_second", 1), ("ms_per_token", -1)):
            row.append(with_ratios(own.get(name), [(own[name] / base[name]) ** power] if own and base else []))
        rows.append([*row, in_bytes(own["cache_bytes"]) if own else DASH])
    headings = ["context", "attention", *stages, "prefill tokens/s", "ms/token"]
    return Table(title, [*headings, "cache"], rows)


def with_ratios(value: float | None, ratios: list[float]) -> str:
    """Format a value with its ratios to softmax.

    >>> with_ratios(22.05, [1.2, 1.1]), with_ratios(300.0, []), with_ratios(None, [])
    ('22.05 (1.20 × / 1.10 ×)', '300', '–')
    """
    if value is None:
        return DASH
    return number(value) + (f" ({' / '.join(map(times, ratios))})" if ratios else "")


if __name__ == "__main__":
    run_recipe(EvaluateOptions, "bench lm", evaluate, __doc__)
