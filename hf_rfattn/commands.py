"""What all commands share: reading numbers and models from the command line, units, and errors without a traceback."""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import typer
from rich.console import Console

if TYPE_CHECKING:
    from .mechanisms import MechanismConfig

Choice = TypeVar("Choice")
INTERRUPTED = 130  # exit code after Ctrl-C, as shells have it


def parse_numbers(option: str, text: str, example: str) -> list[int]:
    """Positive whole numbers between commas, sorted, each once.

    >>> parse_numbers("--lengths", "512, 128,512", "128,512")
    [128, 512]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"{option} {text!r} must be whole numbers such as {example}.")
    return sorted({int(part) for part in parts})


def parse_choices(option: str, text: str, choices: Mapping[str, Choice]) -> tuple[Choice, ...]:
    """What the words between commas stand for, each once, in the order of the choices.

    >>> parse_choices("--passes", "training,forward", {"forward": 1, "training": 2})
    (1, 2)
    """
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in choices:
            raise ValueError(f"{option} {word!r} is not possible; choose from {', '.join(choices)}.")
    return tuple(value for name, value in choices.items() if name in words)


def load_config(name: str, **changes: Any) -> Any:
    """The config of a model in a folder or on the Hub, with some fields changed."""
    import transformers

    if not Path(name).is_dir() and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ValueError(f"There is no folder {name!r}.")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False, **changes)
    except OSError as error:
        raise ValueError(f"{name!r} is not a model that can be read. {first_paragraph(error)}") from error


def first_paragraph(error: Exception) -> str:
    """The first paragraph of a long message, in one line.

    >>> first_paragraph(ValueError("This is\\n wrong.\\n\\nAnd so on."))
    'This is wrong.'
    """
    return " ".join(str(error).strip().partition("\n\n")[0].split())[:300]


def model_class(config: Any) -> Any:
    """The model class the checkpoint was saved from, or AutoModel."""
    import transformers

    found = [cls for name in config.architectures or () if (cls := named_model_class(name))]
    return found[0] if found else transformers.AutoModel


def named_model_class(name: str) -> Any:
    """The model class that transformers has under this name, and nothing else that it has; or None."""
    import transformers

    found = getattr(transformers, name, None)
    return found if isinstance(found, type) and issubclass(found, transformers.PreTrainedModel) else None


def first_tokens(text: str, name: str, model: Any, most: int) -> Any:
    """A text as a batch of one, by the tokenizer of that name; cut at `most` tokens, or what the model takes."""
    from transformers import AutoTokenizer

    from .integration.positions import longest_input

    tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    limits = (tokenizer.model_max_length, longest_input(model), most)
    return tokenizer(text, return_tensors="pt", truncation=True, max_length=min(limit for limit in limits if limit))


def parse_attention(attention: str, assignments: list[str]) -> "MechanismConfig":
    """The config of a mechanism with options NAME=VALUE, values in JSON or plain text.

    >>> parse_attention("fmm", ["bandwidth=8", "normalizer=joint"]).bandwidth
    8
    """
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


def option_value(value: Any) -> str:
    """A value as NAME=VALUE takes it.

    >>> option_value("joint"), option_value(None), option_value(("elu", "tanh"))
    ('joint', 'null', '["elu", "tanh"]')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)


def option_values(options: dict[str, Any]) -> str:
    """
    >>> option_values({"bandwidth": 8, "normalizer": "joint"})
    'bandwidth=8, normalizer=joint'
    """
    return ", ".join(f"{name}={option_value(value)}" for name, value in options.items())


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes the target when all is written; if that fails, nothing stays behind."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already and is not an empty folder; choose another one.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield partial
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
    except Exception as error:
        if disk_is_full(error, target):
            raise ValueError(
                f"The disk of {target} is full, so nothing was written. Make room, or choose another folder."
            ) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def disk_is_full(error: Exception, folder: Path) -> bool:
    """Whether this is why writing to a folder failed; torch and safetensors each have an error of their own for it."""
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left on device" in str(error):
        return True
    there = next(place for place in [folder.resolve(), *folder.resolve().parents] if place.exists())
    return shutil.disk_usage(there).free < 2**20


@contextmanager
def errors_without_traceback() -> Iterator[None]:
    """What the user got wrong becomes one message and exit code 2; Ctrl-C one message and 130."""
    try:
        yield
    except (ValueError, NotImplementedError, OSError, ImportError) as error:
        _fail(str(error))
    except KeyboardInterrupt:
        _fail("Interrupted.", INTERRUPTED)


def _fail(message: str, code: int = 2) -> NoReturn:
    paragraph = message.strip().partition("\n\n")[0]
    Console(stderr=True).print(
        f"hf-rfattn: {' '.join(paragraph.split())}", highlight=False, markup=False, soft_wrap=True
    )
    raise typer.Exit(code)
