"""What results and cards name a checkpoint by: a digest of the files in its folder."""

import hashlib
from pathlib import Path

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
RESULTS = "results"  # the folder of result documents in that of a checkpoint


def weight_files(folder: Path) -> list[Path]:
    """The weights that `from_pretrained` reads: one file, or shards."""
    whole = folder / WEIGHTS
    return [whole] if whole.is_file() else sorted(folder.glob("model-?????-of-?????.safetensors"))


def checkpoint_fingerprint(folder: str | Path) -> str:
    """SHA-256 over config.json and the weights: what a result and a card name the checkpoint by."""
    return _digest([Path(folder) / CONFIG, *weight_files(Path(folder))])


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
