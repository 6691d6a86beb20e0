"""Result documents as recipes and benchmarks write them, with numbers that occur nowhere else."""

import json
from pathlib import Path

import torch
import transformers

import hf_rfattn
from hf_rfattn.results.documents import SCHEMA_VERSION, checkpoint_fingerprint, write_result

FAVOR = {"mechanism": "favor+", "num_features": 16}
FMM = {"mechanism": "fmm", "bandwidth": 4, "far": ["elu"]}
THIS = "this"
BASE = "sentence-transformers/paraphrase-MiniLM-L3-v2"
HARDWARE = {"device": "cpu", "cpu": "Test CPU", "cores": 2, "threads": 2, "memory_bytes": 2**33, "gpu": None}


def shared(kind, seed=0, **changes):
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": kind,
        "created": "2026-11-16T00:00:00+00:00",
        "git": {"commit": "0123456789abcdef", "changed": False},
        "versions": {"python": "3.11.9", "torch": "2.13.0", "transformers": "5.22.2", "hf-rfattn": "0.1"},
        "hardware": HARDWARE,
        "load_average": [0.1, 0.2, 0.3],
        "seed": seed,
        "model": BASE,
        **changes,
    }


def task(attention=FAVOR, accuracy=0.5703, *, seed=3, **changes):
    return {
        **shared("task", seed),
        "base_license": "apache-2.0",
        "task": "snli",
        "task_type": "text-classification",
        "dataset": {"name": "stanfordnlp/snli", "config": None, "split": "validation", "fingerprint": "f00d"},
        "attention": attention,
        "metrics": {"accuracy": {"value": accuracy, "n": 1987, "scale": 1}},
        "budget": {"epochs": 1, "learning_rate": 5e-05, "batch_size": 32},
        "samples_per_second": 117.3,
        "tokens_per_second": 7513.0,
        "peak_memory_bytes": 777 * 2**20,
        "wall_time_seconds": 68.21,
        "command": ["python", "recipes/finetune_snli.py", "--attention", "favor+"],
        **changes,
    }


def speed(attention=FAVOR, **changes):
    rows = [(128, 0.0211, 0.0302, 301, 311), (1024, 0.257, 0.1713, 1201, 707), (4096, 3.093, 0.6719, 9011, 2017)]
    return {
        **shared("speed"),
        "attention": attention,
        "batch": 4,
        "dtype": "float32",
        "lengths": [
            {
                "length": length,
                "softmax_seconds": softmax,
                "patched_seconds": patched,
                "softmax_peak_bytes": a * 2**20,
                "patched_peak_bytes": b * 2**20,
            }
            for length, softmax, patched, a, b in rows
        ],
        **changes,
    }


def measured_runs():
    """This model, softmax of the same budget, the controls, another mechanism, and timings."""
    return {
        "favor.json": task(checkpoint=THIS),
        "softmax.json": task("softmax", 0.6364, samples_per_second=131.9),
        "band.json": task({"mechanism": "band", "bandwidth": 16}, 0.5411),
        "average.json": task({"mechanism": "average"}, 0.4793),
        "hedgehog.json": task({"mechanism": "hedgehog"}, 0.6017),
        "speed.json": speed(checkpoint=THIS),
    }


def make_checkpoint(folder: Path, attention=FAVOR, tokenizer=True, **patching):
    """A tiny classifier, patched and saved; returns it."""
    torch.manual_seed(5)
    model = transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
            num_labels=3
        )
    ).eval()  # fmt: skip
    options = {k: tuple(v) if isinstance(v, list) else v for k, v in attention.items() if k != "mechanism"}
    hf_rfattn.patch_model(model, attention["mechanism"], **options, **patching)
    model.save_pretrained(folder)
    if tokenizer:
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij"]
        (folder / "vocab.txt").write_text("\n".join(words))
        transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    return model


def write_results(folder: Path, documents):
    """Those whose checkpoint is THIS belong to the model in the folder."""
    for name, document in documents.items():
        own = {"checkpoint": checkpoint_fingerprint(folder)} if document.get("checkpoint") == THIS else {}
        write_result({**document, **own}, folder / "results" / name)


def edit(path: Path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
