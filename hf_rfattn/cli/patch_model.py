"""`hf-rfattn patch` and `hf-rfattn unpatch`: from a checkpoint to a new folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import errors_without_traceback

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a model's name on the Hub.")]
Options = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Options of the mechanism; values are JSON or plain text."),
]
Output = Annotated[Path, typer.Option("-o", "--output", help="The new folder; it must not exist, or be empty.")]


def patch(
    model: Model,
    attention: Annotated[str, typer.Argument(help="A mechanism; `hf-rfattn list` shows them and their options.")],
    output: Output,
    options: Options = None,
    layers: Annotated[str | None, typer.Option(help="Layers to patch, such as 0-5,11. Default: all.")] = None,
    cross_attention: Annotated[bool, typer.Option(help="Patch cross-attention too.")] = False,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
    max_length: Annotated[
        int | None, typer.Option(help="Extend learned positions to this number of tokens, in the tokenizer too.")
    ] = None,
    positions: Annotated[str, typer.Option(help="How to extend them: tile or interpolate.")] = "tile",
) -> None:
    """Patch MODEL and save it with its tokenizer; `from_pretrained` of the folder loads it patched."""

    def change(loaded: Any, tokenizer: Any) -> None:
        from .. import extend_positions, patch_model

        patch_model(loaded, config, layers=layers, cross_attention=cross_attention, seed=seed)
        if max_length is not None:
            extend_positions(loaded, max_length, method=positions, tokenizer=tokenizer)  # type: ignore[arg-type]

    with errors_without_traceback():
        from ..mechanisms import parse_attention

        config = parse_attention(attention, options or [])
        _save_changed(model, output, change)
    typer.echo(f"{output}: {model} with {attention}. Load it after `import hf_rfattn`.")


def unpatch(model: Model, output: Output) -> None:
    """Save a patched MODEL with softmax again, without its mechanisms."""

    def change(loaded: Any, tokenizer: Any) -> None:
        from .. import Mechanism, unpatch_model

        if not any(isinstance(module, Mechanism) for module in loaded.modules()):
            raise ValueError(f"{model} is not patched.")
        unpatch_model(loaded)

    with errors_without_traceback():
        _save_changed(model, output, change)
    typer.echo(f"{output}: {model} with softmax.")


def _save_changed(name: str, output: Path, change: Callable[[Any, Any], None]) -> None:
    """Load a model and its tokenizer, change them, and save them into a new folder."""
    import transformers

    from ..integration.reading import load_config, model_class
    from ..results import new_folder

    transformers.logging.set_verbosity_error()
    with new_folder(output) as partial:
        loaded = model_class(load_config(name)).from_pretrained(name, trust_remote_code=False)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except (OSError, ValueError, KeyError):
            tokenizer = None
            typer.echo(f"{name} has no tokenizer that could be copied.", err=True)
        change(loaded, tokenizer)
        loaded.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
