"""`hf-rfattn convert`: attention transfer on unlabelled text, from a pretrained model to a converted one."""

import copy
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .command_line import errors_without_traceback, typed
from .patch_model import Attention, Layers, Model, Options, Seed, copy_pooling, load
from .texts import Texts, read_texts

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..conversion import Conversion
    from ..mechanisms import MechanismConfig

STATE = "unfinished"  # a folder inside that of the output, deleted when everything is written
SETTINGS = "settings.json"  # in it
SAVE_EVERY = 20  # steps
USUAL_LENGTH = 512
DATA = (
    "Unlabelled text: a .txt file (one text per line), .csv, .jsonl or .parquet file, a folder of such files, or the "
    "name of a data set on the Hub."
)


def convert(
    context: typer.Context,
    model: Model,
    attention: Attention,
    data: Annotated[str, typer.Option(help=DATA)],
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder for the converted model.")],
    options: Options = None,
    column: Annotated[list[str] | None, typer.Option(help="Text column; give two for pairs. [default: text]")] = None,
    split: Annotated[str, typer.Option(help="Split of the data set; in a folder, files named by it.")] = "train",
    data_config: Annotated[str | None, typer.Option(help="Configuration of a data set on the Hub.")] = None,
    max_texts: Annotated[int, typer.Option(min=1, help="Maximum number of texts to read.")] = 100_000,
    join: Annotated[
        bool | None, typer.Option(help="Join all texts and split them into blocks. [default: only for decoders]")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Sequence length in tokens. [default: 512, or the model's maximum]")
    ] = None,
    extend_positions: Annotated[
        str | None, typer.Option(help="Extend learned positions to --max-length: tile or interpolate.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Number of training steps.")] = 400,
    rounds: Annotated[
        int, typer.Option(min=1, help="Repeat the last steps up to this many times, while the error falls.")
    ] = 4,
    exact_heads: Annotated[
        float, typer.Option(min=0, max=0.99, help="Fraction of all heads, the worst ones, that keep exact softmax.")
    ] = 0.0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step, over all processes.")] = 8,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Peak learning rate. [default: that of hf_rfattn.convert]")
    ] = None,
    layers: Layers = None,
    bf16: Annotated[bool, typer.Option("--bf16", help="Run the model in bfloat16 (autocast).")] = False,
    device: Annotated[str | None, typer.Option(help="Such as cpu or cuda:1. [default: a GPU if available]")] = None,
    seed: Seed = 0,
    base_model: Annotated[str | None, typer.Option(help="Name of MODEL in results and in the model card.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Patch a model and train the new attention to imitate softmax.

    Trains on unlabelled text; the weights of MODEL do not change. Saves model, tokenizer, model card and results. After
    an interruption, the same command resumes. Several processes: `torchrun --nproc_per_node 4 -m hf_rfattn convert ...`
    """
    with errors_without_traceback(), _processes(device) as chosen:
        import torch

        from .. import convert as transfer
        from ..conversion.processes import process_count, process_rank
        from ..mechanisms import parse_attention
        from ..results.documents import name_of, new_result

        columns = column or ["text"]
        rounds = rounds if steps > 2 else 1  # fewer steps have no part to repeat
        if len(columns) > 2 or (join and len(columns) == 2):
            raise ValueError("Give --column once, or twice for pairs of texts; --join works with one column only.")
        if batch_size % process_count():
            raise ValueError(f"--batch-size {batch_size} must be a multiple of the {process_count()} processes.")
        config = _trainable(parse_attention(attention, options or []), options or [])
        before = _unfinished(output)
        texts, dataset = read_texts(data, columns, split, data_config, max_texts)
        document = new_result("transfer", seed=seed, device=chosen.type, packages=["tokenizers"])
        loaded, tokenizer = load(model)
        if tokenizer is None:
            raise ValueError(f"{model} has no tokenizer, which is needed to read text. Save one in its folder.")
        if join is None:
            join = loaded.can_generate() and not loaded.config.is_encoder_decoder and len(columns) == 1
        length = _length(loaded, tokenizer, max_length, extend_positions)
        batches = _batches(texts, tokenizer, length, (steps + 1) * batch_size if join else None, batch_size, seed)
        settings = {
            "model": model, "attention": config.to_dict(), "layers": layers, "data": dataset, "join": join,
            "max_length": length, "steps": steps, "rounds": rounds, "batch_size": batch_size,
            "exact_heads": exact_heads, "learning_rate": learning_rate, "seed": seed,
        }  # fmt: skip
        with _state(output, before, settings) as state:
            autocast = torch.autocast(chosen.type, torch.bfloat16) if bf16 else nullcontext()
            rate: dict[str, Any] = {} if learning_rate is None else {"learning_rate": learning_rate}
            with autocast:
                done = transfer(
                    loaded.to(chosen), config, batches, steps=steps, rounds=rounds, exact_heads=exact_heads,
                    seed=seed, layers=layers, checkpoint=state, save_every=SAVE_EVERY, **rate,
                )  # fmt: skip
            if process_rank() > 0:
                return
            document |= {"model": base_model or name_of(model), "command": typed(context)}
            document |= {"processes": process_count(), "dataset": dataset, "errors": done.to_dict()}
            document["transfer"] = {
                "steps": max(done.steps.values()),
                "batch_size": batch_size,
                "seconds": round(done.seconds, 3),
                "error": {"before": done.before.overall, "after": done.after.overall, "average": done.after.average},
                "max_length": length,
            }
            document = _save(loaded, tokenizer, document, output)
            copy_pooling(model, output)
        typer.echo(json.dumps(document, indent=2) if as_json else _summary(done, output, join))


def _trainable(config: "MechanismConfig", given: list[str]) -> "MechanismConfig":
    """The config with random projections that are trained, also in far fields, unless its options say otherwise."""
    from ..mechanisms import resolve_config

    if hasattr(config, "trainable") and not any(option.startswith("trainable=") for option in given):
        return config.replace(trainable=True)
    if isinstance(far := getattr(config, "far", None), tuple):
        named = (_trainable(resolve_config(each), []) if isinstance(each, str) else each for each in far)
        return config.replace(far=tuple(named))
    return config


@contextmanager
def _processes(device: str | None) -> "Iterator[torch.device]":
    """Joins the processes that torchrun started, if it did; the device of this one."""
    import torch

    gpu = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    chosen = torch.device(device or gpu or "cpu")
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield chosen
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(chosen)
    torch.distributed.init_process_group()
    try:
        yield chosen
    finally:
        torch.distributed.destroy_process_group()


def _length(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", wanted: int | None, extend: str | None
) -> int:
    from .. import extend_positions, longest_input

    limit = longest_input(model)
    if wanted is None:
        return min(USUAL_LENGTH, limit or USUAL_LENGTH, tokenizer.model_max_length)
    if limit is not None and wanted > limit:
        if extend is None:
            raise ValueError(
                f"--max-length {wanted} exceeds the {limit} positions of this model. Choose at most {limit}, or extend "
                "the position table with --extend-positions tile."
            )
        extend_positions(model, wanted, extend, tokenizer=tokenizer)  # type: ignore[arg-type]
    return wanted


def _batches(texts: Texts, tokenizer: Any, length: int, blocks: int | None, batch_size: int, seed: int) -> Any:
    """A DataLoader of this process's share. `blocks`: join the texts and split them into at most that many blocks."""
    import torch
    from torch.utils.data import DataLoader

    from ..conversion.processes import process_count, process_rank

    rows: Any = texts if blocks is None else _blocks(texts, tokenizer, length, blocks)
    if len(rows) <= batch_size:
        what = "texts" if blocks is None else f"blocks of {length} tokens"
        raise ValueError(
            f"--data has {len(rows)} {what}; more than --batch-size {batch_size} are needed, since one "
            "batch is held out to measure errors. Give more text, or a smaller --batch-size or --max-length."
        )
    if tokenizer.pad_token is None:  # any token will do, since padding is masked
        tokenizer = copy.deepcopy(tokenizer)  # it is saved without this change
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token

    def collate(given: list[Any]) -> Any:
        if blocks is not None:
            return {"input_ids": torch.stack(given)}
        how = {"padding": True, "padding_side": "right", "truncation": True, "max_length": length}
        return tokenizer(*map(list, zip(*given, strict=True)), **how, return_tensors="pt")

    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    share: Any = [rows[i] for i in order[process_rank() :: process_count()]]
    size = batch_size // process_count()
    return DataLoader(share, size, drop_last=len(share) >= 2 * size, collate_fn=collate)


def _blocks(texts: Texts, tokenizer: Any, length: int, most: int) -> "tuple[torch.Tensor, ...]":
    """Blocks of tokens, as language models are trained on; the incomplete one at the end is left out."""
    import torch

    lines = [text.rstrip("\n") + "\n" for (text,) in texts]
    tokens: list[int] = []
    for start in range(0, len(lines), 1000):
        for encoded in tokenizer(lines[start : start + 1000], add_special_tokens=False, verbose=False)["input_ids"]:
            tokens += encoded
        if len(tokens) >= most * length:
            break
    count = min(len(tokens) // length, most)
    return torch.tensor(tokens[: count * length], dtype=torch.long).view(count, length).unbind()


def _unfinished(output: Path) -> dict[str, Any] | None:
    """The settings of the unfinished conversion in a folder; None if it is empty or does not exist."""
    from ..results.documents import read_result

    if (output / STATE / SETTINGS).exists():
        return read_result(output / STATE / SETTINGS)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists already and is not an empty folder; choose another --output.")
    return None


@contextmanager
def _state(output: Path, before: dict[str, Any] | None, settings: dict[str, Any]) -> Iterator[Path]:
    """The folder for the state of a conversion, new or from an interrupted run with the same settings.

    It is deleted when everything is done, and if there is nothing in it to resume from.
    """
    from ..conversion.processes import check_alike, process_rank
    from ..results.documents import write_result

    state = output / STATE
    record = state / SETTINGS
    settings = json.loads(json.dumps(settings))
    for name, value in settings.items():
        if before is not None and before.get(name) != value:
            raise ValueError(
                f"{output} holds an unfinished conversion with {name} {before.get(name)!r}, not {value!r}. Run the "
                "same command to resume it, or choose another --output."
            )
    check_alike(settings=settings)  # and wait: from here on the folder is not empty
    if process_rank() == 0:
        write_result(settings, record)
    finished = False
    try:
        yield state
        finished = True
    except KeyboardInterrupt:
        resumable = any(path != record for path in state.glob("*"))
        raise KeyboardInterrupt("Run the same command again to resume." if resumable else "") from None
    finally:
        if process_rank() == 0 and (finished or [path.name for path in state.iterdir()] == [record.name]):
            shutil.rmtree(state)
            if not any(output.iterdir()):
                output.rmdir()


def _save(model: Any, tokenizer: Any, document: dict[str, Any], output: Path) -> dict[str, Any]:
    """Model, tokenizer, result file and model card; returns the document of the result file."""
    from .. import write_card
    from ..hub.cards import CheckpointFolder
    from ..results.documents import RESULTS, without_folders, write_result
    from ..results.schema import parse_result

    model.save_pretrained(output)
    tokenizer.save_pretrained(output)
    folder = CheckpointFolder(output)
    document = without_folders({**document, "attention": folder.attention, "checkpoint": folder.fingerprint})
    parse_result(document)
    write_result(document, output / RESULTS / "transfer.json")
    write_card(output)
    return document


def _summary(done: "Conversion", output: Path, decoder: bool) -> str:
    """Errors by layer, what to expect, and what to do next."""
    before, after, average = (
        sum(errors) / len(errors) for errors in (done.before.overall, done.after.overall, done.after.average)
    )
    if after < 0.9 * average:
        expect = "Expect scores below those of softmax until you fine-tune: the smaller the error, the smaller the gap."
        if "exact_heads" not in done.after.mechanisms:
            expect += (
                " --exact-heads 0.167 closes most of the gap: the worst heads keep softmax, at its quadratic cost."
            )
    else:
        expect = (
            "This is hardly better than averaging all tokens: give more --steps or text, more features (num_features), "
            "or choose another attention, such as hedgehog or fmm."
        )
    recipe = "finetune_lm.py --distill MODEL" if decoder else "finetune_text.py"
    return (
        f"{done}\n\nMean error: {before:.3f} before, {after:.3f} after. {expect}\n"
        f"Next: evaluate the model on your task, or fine-tune it, for example with recipes/{recipe} --model {output}\n"
        f"Written: {output}. Load it with from_pretrained({str(output)!r}) after `import hf_rfattn`."
    )
