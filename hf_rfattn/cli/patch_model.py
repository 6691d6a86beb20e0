"""`hf-rfattn patch` and `hf-rfattn unpatch`: change a checkpoint and save it to a new folder."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .command_line import errors_without_traceback

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or the name of a model on the Hub.")]
Attention = Annotated[
    str, typer.Argument(metavar="ATTENTION", help="A mechanism; `hf-rfattn list` shows all, with their options.")
]
Options = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Options of the mechanism; values are JSON or plain text."),
]
Layers = Annotated[str | None, typer.Option(help="Layers to patch, such as 0-5,11. [default: all]")]
Seed = Annotated[int, typer.Option(help="Random seed.")]
Output = Annotated[Path, typer.Option("-o", "--output", help="New folder for the model.")]


def patch(
    model: Model,
    attention: Attention,
    output: Output,
    options: Options = None,
    layers: Layers = None,
    cross_attention: Annotated[bool, typer.Option("--cross-attention", help="Also patch cross-attention.")] = False,
    seed: Seed = 0,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Extend learned positions to this number of tokens.")
    ] = None,
    positions: Annotated[
        str | None, typer.Option(help="How --max-length extends them: tile or interpolate. [default: tile]")
    ] = None,
) -> None:
    """Replace the attention of a model; no training.

    Saves model and tokenizer; `from_pretrained` of the new folder loads the patched model after `import hf_rfattn`.
    """

    def change(loaded: Any, tokenizer: Any) -> None:
        from .. import extend_positions, patch_model

        patch_model(loaded, config, layers=layers, cross_attention=cross_attention, seed=seed)
        if max_length is not None:
            extend_positions(loaded, max_length, positions or "tile", tokenizer=tokenizer)  # type: ignore[arg-type]

    with errors_without_traceback():
        from ..mechanisms import parse_attention

        if positions is not None and max_length is None:
            raise ValueError("--positions needs --max-length, the length to extend the positions to.")
        config = parse_attention(attention, options or [])
        _save_changed(model, output, change)
    typer.echo(f"Written: {output}, {model} with {attention} attention. Load it after `import hf_rfattn`.")


def unpatch(model: Model, output: Output) -> None:
    """Restore softmax attention in a patched model."""

    def change(loaded: Any, tokenizer: Any) -> None:
        from .. import Mechanism, unpatch_model

        if not any(isinstance(module, Mechanism) for module in loaded.modules()):
            raise ValueError(f"{model} is not patched, so there is nothing to undo.")
        unpatch_model(loaded)

    with errors_without_traceback():
        _save_changed(model, output, change)
    typer.echo(f"Written: {output}, {model} with softmax attention.")


def load(name: str) -> tuple[Any, Any]:
    """Load a model, with the class it was saved from, and its tokenizer; None if it has none."""
    import transformers

    from ..integration.reading import load_config, load_tokenizer, model_class

    transformers.logging.set_verbosity_error()
    loaded = model_class(load_config(name)).from_pretrained(name, trust_remote_code=False)
    try:
        return loaded, load_tokenizer(name)
    except (OSError, ValueError, KeyError):
        return loaded, None


def copy_pooling(name: str, folder: Path) -> None:
    """Copy the sentence-transformers files of an embedding model, which define its pooling and prompts."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def copy(file: str) -> Path | None:
        try:
            found = Path(name, file) if Path(name).is_dir() else Path(hf_hub_download(name, file))
            content = found.read_bytes()
        except (OSError, EntryNotFoundError):
            return None  # most models have no such file
        (folder / file).parent.mkdir(exist_ok=True)
        (folder / file).write_bytes(content)
        return found

    modules = copy("modules.json")
    if modules:
        parts = [entry["path"] for entry in json.loads(modules.read_text(encoding="utf-8"))]
        inside = [f"{part}/{file}" for part in parts if part for file in ("config.json", "model.safetensors")]
        for file in ("config_sentence_transformers.json", "sentence_bert_config.json", *inside):
            copy(file)


def _save_changed(name: str, output: Path, change: Callable[[Any, Any], None]) -> None:
    """Load a model and its tokenizer, change them, and save them to a new folder."""
    from ..results.documents import new_folder

    with new_folder(output) as partial:
        loaded, tokenizer = load(name)
        change(loaded, tokenizer)
        loaded.save_pretrained(partial)
        if tokenizer is None:
            typer.echo(f"{name} has no tokenizer to copy.", err=True)
        else:
            tokenizer.save_pretrained(partial)
        copy_pooling(name, partial)
