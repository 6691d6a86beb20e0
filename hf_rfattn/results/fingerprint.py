"""Fingerprints of checkpoints and results, by which cards and results refer to them."""

import hashlib
from pathlib import Path

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
RESULTS = "results"  # subfolder of a checkpoint for result documents


def weight_files(folder: Path) -> list[Path]:
    """Return the weight files that `from_pretrained` reads: one file, or shards."""
    whole = folder / WEIGHTS
    return [whole] if whole.is_file() else sorted(folder.glob("model-?????-of-?????.safetensors"))


def checkpoint_fingerprint(folder: str | Path) -> str:
    """SHA-256 digest of config.json and the weights."""
    return _digest([Path(folder) / CONFIG, *weight_files(Path(folder))])


def results_fingerprint(folder: Path) -> str:
    """SHA-256 digest of the result documents in a checkpoint's folder."""
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
