"""`hf-rfattn convert`: attention transfer of a pretrained model on unlabelled text."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from .command_line import errors_without_traceback, typed
from .patch_model import Attention, Layers, Model, Options, Seed, copy_pooling, load

DATA = (
    "Unlabelled text: a .txt file (one text per line), .csv, .jsonl or .parquet file, a folder of such files, or the "
    "name of a dataset on the Hub."
)
EXACT_HEADS = (
    "Fraction of all heads, those that matter most, that keep exact softmax; 0 for none. [default: 0.125 for encoders "
    "with linear attention, else 0]"
)


@errors_without_traceback()
def convert(
    context: typer.Context,
    model: Model,
    attention: Attention,
    data: Annotated[str, typer.Option(help=DATA)],
    output: Annotated[Path, typer.Option("-o", "--output", help="New folder for the converted model.")],
    options: Options = None,
    column: Annotated[list[str] | None, typer.Option(help="Text column; give two for pairs. [default: text]")] = None,
    split: Annotated[
        str, typer.Option(help="Split of the dataset; in a folder, files whose names start with it.")
    ] = "train",
    data_config: Annotated[str | None, typer.Option(help="Configuration of a dataset on the Hub.")] = None,
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
        float | None,
        typer.Option(min=0, max=0.99, help=EXACT_HEADS),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences per step, over all processes.")] = 8,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate.")] = 0.05,
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
    import torch

    from .. import convert as transfer
    from ..conversion.processes import process_count, process_rank
    from ..mechanisms import parse_attention
    from ..results.documents import name_of, new_result
    from . import converting as work

    with work.join_processes(device) as chosen:
        columns = column or ["text"]
        if len(columns) > 2 or (join and len(columns) == 2):
            raise ValueError("Give --column once, or twice for pairs of texts; --join works with one column only.")
        if batch_size % process_count():
            raise ValueError(f"--batch-size {batch_size} must be a multiple of the {process_count()} processes.")
        config = work.make_trainable(parse_attention(attention, options or []), options or [])
        before = work.unfinished_settings(output)
        texts, dataset = work.read_texts(data, columns, split, data_config, max_texts)
        document = new_result("transfer", seed=seed, device=chosen.type, packages=["tokenizers"])
        loaded, tokenizer = load(model)
        if tokenizer is None:
            raise ValueError(f"{model} has no tokenizer, which is needed to read text. Save one in its folder.")
        if join is None:
            join = loaded.can_generate() and not loaded.config.is_encoder_decoder and len(columns) == 1
        length = work.choose_length(loaded, tokenizer, max_length, extend_positions)
        blocks = (steps + 1) * batch_size if join else None
        batches = work.make_batches(texts, tokenizer, length, blocks, batch_size, seed)
        settings = {
            "model": model, "attention": config.to_dict(), "layers": layers, "data": dataset, "join": join,
            "max_length": length, "steps": steps, "rounds": rounds, "batch_size": batch_size,
            "exact_heads": exact_heads, "learning_rate": learning_rate, "seed": seed, "bf16": bf16,
            "extend_positions": extend_positions,
        }  # fmt: skip
        with work.state_folder(output, before, settings) as state:
            autocast = torch.autocast(chosen.type, torch.bfloat16) if bf16 else nullcontext()
            with autocast:
                done = transfer(
                    loaded.to(chosen), config, batches, steps=steps, rounds=rounds, exact_heads=exact_heads,
                    learning_rate=learning_rate, seed=seed, layers=layers, checkpoint=state, save_every=work.SAVE_EVERY,
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
            document = work.save(loaded, tokenizer, document, output)
            copy_pooling(model, output)
        typer.echo(json.dumps(document, indent=2) if as_json else work.summary(done, output, join))
