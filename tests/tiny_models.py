"""Tiny random models of every architecture that is tested, their inputs, and the README's table of them.

`python tests/tiny_models.py` prints the table, `python tests/tiny_models.py --readme README.md` puts it between the markers there. Nothing in it is
written by hand: each model is built, patched and run, and what its attention modules did is what the table says.
"""

import argparse
import dataclasses
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, AutoModelForCausalLM, PreTrainedModel

from hf_rfattn import patch_model
from hf_rfattn.integration.discovery import find_attention
from hf_rfattn.mechanisms import Mechanism

logging.getLogger("transformers").setLevel(logging.ERROR)

BATCH, LENGTH, SHORT, DECODED = 2, 12, 8, 7  # rows, tokens, tokens of the shorter row, tokens of a decoder
START, END = "<!-- reach:start -->", "<!-- reach:end -->"

# One size under every name that configs give it; a config takes those that it knows.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **{"num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": 99, "projection_dim": 16},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    **{"image_size": 16, "patch_size": 8, "num_mel_bins": 8, "conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2)},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"},
    **{"num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1},
    **{"topk_group": 1, "shared_expert_intermediate_size": 16},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """One architecture of the tables below."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of its config, on top of the sizes
    inputs: str = "text"  # one of _INPUTS
    patched: int = 2  # attention modules that must get a mechanism
    softmax: int = 0  # attention modules that must stay as they are
    model_type: str | None = None  # if it is not the name in the table
    auto: Any = AutoModel


def _seq2seq(**options: Any) -> Tiny:
    return Tiny(options, inputs="text to text", patched=4, softmax=2)


def _both_towers(**options: Any) -> Tiny:
    return Tiny(options, inputs="text and image", patched=4)


_ENCODERS = {
    **{
        name: Tiny()
        for name in (
            "bert", "roberta", "distilbert", "electra", "camembert", "xlm-roberta", "xlm-roberta-xl", "ernie", "bert-generation",
            "data2vec-text", "roberta-prelayernorm", "eurobert", "nomic_bert", "layoutlm", "markuplm", "splinter", "roc_bert", "xmod",
        )
    },
    "albert": Tiny(patched=1),  # both layers share one module
    "mobilebert": Tiny({"embedding_size": 16, "intra_bottleneck_size": 32}),
    "esm": Tiny({"mask_token_id": 4, "position_embedding_type": "rotary"}),
    "modernbert": Tiny({"layer_types": ["full_attention", "sliding_attention"]}, patched=1, softmax=1),
}  # fmt: skip

_DECODERS = {
    **{
        name: Tiny()
        for name in (
            "gpt2", "opt", "gpt_neox", "llama", "qwen2", "qwen3", "gemma", "phi", "mixtral", "olmo", "olmo2", "stablelm", "phi3", "granite",
            "cohere", "smollm3", "glm", "glm4", "biogpt", "xglm", "gpt_bigcode", "persimmon", "nemotron", "ctrl", "qwen2_moe", "qwen3_moe",
            "olmoe", "helium", "ernie4_5", "apertus", "arcee", "seed_oss", "hunyuan_v1_dense", "bitnet", "granitemoe", "phimoe",
        )
    },
    "mistral": Tiny({"sliding_window": None}),
    "starcoder2": Tiny({"sliding_window": None}),
    "deepseek_v3": Tiny({"num_key_value_heads": 4}),
    "gemma3_text": Tiny({"layer_types": ["sliding_attention", "full_attention"]}, patched=1, softmax=1),
    "cohere2": Tiny({"layer_types": ["sliding_attention", "full_attention"]}, patched=1, softmax=1),
    "olmo3": Tiny({"layer_types": ["sliding_attention", "full_attention"]}, patched=1, softmax=1),
    "lfm2": Tiny({"layer_types": ["conv", "full_attention"]}, patched=1),
}  # fmt: skip

_SEQ2SEQ = {
    name: Tiny(inputs="text to text", patched=4, softmax=2)
    for name in ("bart", "mbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "m2m_100", "plbart", "nllb-moe")
}

_IMAGE = {
    name: Tiny(inputs="image")
    for name in ("vit", "deit", "dinov2", "dinov3_vit", "ijepa", "vit_msn", "beit", "clip_vision_model", "siglip_vision_model")
}

_TWO_TOWERS = {
    name: Tiny(inputs="text and image", patched=4)
    for name in ("clip", "siglip", "altclip", "chinese_clip", "metaclip_2")
}

_SPEECH = {
    **{name: Tiny(inputs="speech") for name in ("wav2vec2", "hubert", "data2vec-audio", "unispeech", "unispeech-sat")},
    **{
        name: Tiny(inputs="speech to text", patched=4, softmax=2)
        for name in ("whisper", "speech_to_text")
    },
}

# Those whose outputs at a position may not depend on what comes after it; of `text and image` models the text tower.
CAUSAL = {*_DECODERS, *_SEQ2SEQ, "whisper", "speech_to_text", "clip", "metaclip_2"}

SUPPORTED: dict[str, Tiny] = {**_ENCODERS, **_DECODERS, **_SEQ2SEQ, **_IMAGE, **_TWO_TOWERS, **_SPEECH}

_LARGE_PATCHES = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": (2,), "window_size": 4}

# What must be refused before anything changes, each with a fragment of the reason.
REFUSED: dict[str, tuple[Tiny, str]] = {
    **{
        name: (Tiny(), "does not go through transformers' attention interface")
        for name in (
            "deberta", "deberta-v2", "gptj", "bloom", "mpt", "falcon", "mpnet", "xlnet", "codegen", "longformer", "big_bird", "megatron-bert",
            "convbert", "roformer", "rembert", "funnel", "led", "openai-gpt", "fnet", "mamba",
        )
    },
    "gpt_neo": (Tiny({"attention_types": [[["global", "local"], 1]]}), "attention interface"),
    **{name: (Tiny(inputs="text to text"), "relative position bias") for name in ("t5", "mt5", "umt5", "longt5")},
    "swin": (Tiny({**_LARGE_PATCHES, "num_heads": (2,)}, inputs="image"), "relative position bias"),
    "beit with position bias": (
        Tiny({"use_relative_position_bias": True}, inputs="image", model_type="beit"),
        "relative position bias",
    ),
    "wav2vec2-conformer": (Tiny(inputs="speech"), "relative position bias"),
    "gpt_oss": (Tiny(), "attention sinks"),
    "gemma2": (Tiny(), "caps its scores"),
    "mistral with a window": (Tiny({"sliding_window": 8}, model_type="mistral"), "window of 8 tokens"),
    "starcoder2 with a window": (Tiny({"sliding_window": 8}, model_type="starcoder2"), "window of 8 tokens"),
    "doge": (Tiny(), "selects the keys"),
    "deepseek_v32": (Tiny({"num_key_value_heads": 4}), "selects the keys"),
    "bigbird_pegasus": (Tiny(inputs="text to text"), "attention mask"),
    "lasr_encoder": (Tiny(inputs="speech"), "attention mask"),
    "pixtral": (Tiny(inputs="image"), "attention mask"),
}  # fmt: skip


def _config(model_type: str, options: dict[str, Any]) -> Any:
    """A config with the sizes above, in its towers too."""
    cls = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(cls)}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    for name, tower in cls.sub_configs.items():
        sizes[name] = _config(tower.model_type, {}).to_dict()
    return cls(**{**sizes, **options})


def build(name: str) -> PreTrainedModel:
    """The tiny model of that name in `SUPPORTED` or `REFUSED`, with weights large enough for its attention to matter."""
    tiny = SUPPORTED[name] if name in SUPPORTED else REFUSED[name][0]
    torch.manual_seed(0)
    model = AutoModel.from_config(_config(tiny.model_type or name, tiny.options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


def make_inputs(name: str) -> dict[str, Tensor]:
    """A batch of two rows; where the model takes a mask, the second row is padded on the right."""
    kind = SUPPORTED[name].inputs
    torch.manual_seed(1)
    inputs: dict[str, Tensor] = {}
    if kind.startswith("text"):
        inputs["input_ids"] = torch.randint(5, 99, (BATCH, LENGTH))
        inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        inputs["input_ids"][1, SHORT:] = inputs["attention_mask"][1, SHORT:] = 0
    if name == "layoutlm":
        inputs["bbox"] = torch.randint(0, 50, (BATCH, LENGTH, 4)).sort(-1).values
    if kind.endswith("to text"):
        inputs["decoder_input_ids"] = torch.randint(5, 99, (BATCH, DECODED))
    if kind.endswith("image"):
        inputs["pixel_values"] = torch.randn(BATCH, 3, 16, 16)
    if kind == "speech":
        inputs["input_values"] = torch.randn(BATCH, 67)
    if kind == "speech to text":
        inputs["input_features"] = torch.randn(BATCH, 8, 128)
    return inputs


def outputs(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every floating tensor that the model returns, by its name; caches are left out."""
    found: dict[str, Tensor] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            if value.is_floating_point():
                found[name] = value
        elif isinstance(value, dict):
            for key, part in value.items():
                collect(f"{name}.{key}" if name else key, part)

    collect("", dict(model(**inputs)))
    return found


@contextmanager
def mechanism_calls(model: nn.Module) -> Iterator[dict[str, list[bool]]]:
    """While open, the dict that is given collects under each mechanism's name whether its calls were causal."""
    calls: dict[str, list[bool]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Tensor) -> None:
            calls.setdefault(name, []).append(kwargs["causal"])

        return hook

    handles = [m.register_forward_hook(record(name), with_kwargs=True) for name, m in mechanisms(model).items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def mechanisms(model: nn.Module) -> dict[str, Mechanism]:
    """The mechanisms of a patched model (not those inside another one) by the names of their attention modules."""
    return {n.removesuffix(".rf"): m for n, m in model.named_modules() if isinstance(m, Mechanism) and n.endswith(".rf")}
