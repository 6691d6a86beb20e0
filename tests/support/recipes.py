"""Tiny models and a word-level tokenizer for the recipes' own `sample` data, and ways to run a recipe."""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState, PartialState
from tokenizers import processors
from training.messages import script
from training.run import train
from training.session import in_session

from support import sample
from support.word_tokenizers import word_level

ROOT = Path(__file__).parents[2]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
WORDS = [
    *sample.PLACES,
    *(word for kind in sample.KINDS for word in kind),
    *sample.THINGS,
    sample.NOTHING,
    ":",
    ";",
    ".",
]
SIZE = 64
SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": SIZE}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def sample_tokenizer(sentences_apart=True):
    """With [CLS] and [SEP] as BERT has them, or without as GPT-2."""
    words = word_level([*SPECIAL, *WORDS])
    if not sentences_apart:
        return transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", eos_token="[SEP]")
    words.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="[UNK]", pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip


def make_bert(folder, **changes):
    """Random weights of a size at which a model this small learns."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(SPECIAL) + len(WORDS), intermediate_size=2 * SIZE, max_position_embeddings=64,
        initializer_range=SIZE**-0.5, **{**SHAPE, **NO_DROPOUT, **changes},
    )  # fmt: skip
    return _save(transformers.BertModel(config), sample_tokenizer(), folder)


def make_gpt2(folder, **changes):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(SPECIAL) + len(WORDS), n_layer=2, n_head=4, n_embd=SIZE, n_positions=64,
        initializer_range=SIZE**-0.5, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=3, eos_token_id=3,
        **changes,
    )  # fmt: skip
    return _save(transformers.GPT2LMHeadModel(config), sample_tokenizer(sentences_apart=False), folder)


def _save(model, words, folder):
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return str(folder)


def run_here(task_class, options_class, **fields):
    """A recipe in this process; returns its result document. `data="sample"`: the sample in the schema of its task."""
    forget_processes()
    try:
        task = task_class(options_class(**fields))
        if task.options.data == "sample":
            task.options.data = sample.folder(task.name)
        with script():
            return json.loads(in_session(task.options, "task", lambda session: train(session, task)).read_text())
    finally:
        forget_processes()


def forget_processes():
    """accelerate keeps one state a process; every run here wants its own."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def environment():
    """Of a recipe in a process of its own."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


def command(script, *arguments, processes=1, port=None):
    """The command line of a recipe on so many CPU processes."""
    launcher = [sys.executable]
    if processes > 1:
        address = ["--standalone"] if port is None else ["--master_addr", "127.0.0.1", "--master_port", str(port)]
        launcher += ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), *address]
    return [*launcher, str(ROOT / "recipes" / script), *map(str, arguments)]


def run_apart(script, *arguments, processes=1, check=True):
    """A recipe in a process of its own (or several)."""
    done = subprocess.run(
        command(script, *arguments, processes=processes), env=environment(), capture_output=True, text=True, timeout=170
    )
    if check and done.returncode:
        raise RuntimeError(f"exit code {done.returncode}\n{done.stderr[-4000:]}")
    return done
