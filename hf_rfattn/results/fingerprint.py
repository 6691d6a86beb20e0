"""What results and cards name a checkpoint by: a digest of the files in its folder."""

import hashlib
import json
import re
from pathlib import Path

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
RESULTS = "results"  # the folder of result documents in that of a checkpoint


def weight_files(folder: Path) -> list[Path]:
    """The weights that `from_pretrained` reads, and no other tensors: one file, or the shards that an index names."""
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return [folder / WEIGHTS] if (folder / WEIGHTS).is_file() else []
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{folder / INDEX} is not an index of weights: {type(error).__name__}: {error}.") from error
    for name in names:
        if not isinstance(name, str) or not SHARD.fullmatch(name) or not (folder / name).is_file():
            raise ValueError(f"{folder / INDEX} names {name!r}, which is not a file of weights in this folder.")
    return [folder / name for name in names]


def checkpoint_fingerprint(folder: str | Path) -> str:
    """SHA-256 over config.json and the weights: what a result and a card name the checkpoint by."""
    folder = Path(folder)
    return _digest([folder / CONFIG, *weight_files(folder)])


def results_fingerprint(folder: Path) -> str:
    """The same over the result documents that lie beside the weights."""
    return _digest(sorted((folder / RESULTS).glob("*.json")))


def _digest(files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        one = hashlib.sha256()
        with file.open("rb") as stream:
            while block := stream.read(2**20):
                one.update(block)
        total.update(f"{file.name}\0{one.hexdigest()}\n".encode())
    return total.hexdigest()
