"""Tiny random models of every architecture that is tested, and their inputs."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

from support.models import lively, mechanisms

BATCH, LENGTH, SHORT, DECODED = 2, 12, 8, 7  # rows, tokens, tokens of the padded row, tokens of a decoder
SAMPLES, SHORT_SAMPLES = 67, 43  # of speech

# One size under every name that configs give it; a config takes those that it knows.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_source_positions", "max_target_positions"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16),
    **{"num_key_value_heads": 2, "head_dim": 8, "d_kv": 8, "vocab_size": 99, "projection_dim": 16, "num_mel_bins": 8},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2, "sliding_window": 4},
    **{"image_size": 16, "patch_size": 8, "conv_dim": (8, 8), "conv_kernel": (3, 3), "conv_stride": (2, 2)},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "feat_extract_norm": "layer"},
    **{"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
}


@dataclasses.dataclass(frozen=True)
class Tiny:
    """One architecture of the tables below."""

    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of its config, on top of the sizes
    inputs: str = "text"  # "text", "text to text", "image", "text and image", "speech" or "speech to text"
    causal: bool = False  # whether its last hidden states see the past only
    patched: int = 2  # attention modules that must get a mechanism
    cross: int = 0  # cross-attention modules, which stay softmax
    windows: int = 0  # modules that see a sliding window only, which stay softmax
    padding: bool = True  # whether softmax itself gives a padded row what it gives the row alone
    model_type: str | None = None  # if it is not the name in the table

    @property
    def generates(self) -> bool:
        """Whether it can go on from a cache."""
        return self.causal and "image" not in self.inputs


_LOCAL_FIRST = {"layer_types": ["sliding_attention", "full_attention"]}
_GLOBAL_FIRST = {"layer_types": ["full_attention", "sliding_attention"]}

_ENCODERS = {
    **{
        name: Tiny()
        for name in (
            "bert", "roberta", "distilbert", "electra", "camembert", "xlm-roberta", "xlm-roberta-xl", "ernie",
            "bert-generation", "data2vec-text", "roberta-prelayernorm", "eurobert", "nomic_bert", "layoutlm",
            "markuplm", "splinter", "roc_bert", "gte", "jina_embeddings_v3",
        )
    },
    "albert": Tiny(patched=1),  # both layers share one module
    "esm": Tiny({"mask_token_id": 4, "position_embedding_type": "rotary"}),
    "mobilebert": Tiny({"embedding_size": 16, "intra_bottleneck_size": 32}),
    "xmod": Tiny({"default_language": "en_XX"}),
    "modernbert": Tiny(_GLOBAL_FIRST, patched=1, windows=1),
}  # fmt: skip

_DECODERS = {
    **{
        name: Tiny(causal=True)
        for name in (
            "gpt2", "opt", "gpt_neox", "llama", "qwen2", "qwen3", "gemma", "phi", "olmo", "olmo2", "stablelm",
            "granite", "cohere", "smollm3", "glm", "glm4", "biogpt", "gpt_bigcode", "persimmon", "nemotron", "ctrl",
            "qwen2_moe", "qwen3_moe", "olmoe", "helium", "ernie4_5", "apertus", "arcee", "seed_oss",
            "hunyuan_v1_dense", "bitnet", "granitemoe", "jais2", "glm4_moe", "flex_olmo", "ernie4_5_moe",
            "granitemoeshared", "hunyuan_v1_moe", "nanochat", "jetmoe",
        )
    },
    **{
        name: Tiny({"sliding_window": None}, causal=True)
        for name in ("mistral", "mixtral", "starcoder2", "phi3", "phimoe")
    },
    **{
        name: Tiny(_LOCAL_FIRST, causal=True, patched=1, windows=1)
        for name in ("gemma3_text", "cohere2", "olmo3", "exaone4", "modernbert-decoder")
    },
    "gemma4_text": Tiny(
        {**_LOCAL_FIRST, "global_head_dim": 16, "hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        causal=True, patched=1, windows=1,
    ),
    "deepseek_v3": Tiny({"num_key_value_heads": 4}, causal=True),
    "qwen3_next": Tiny(
        {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2,
         "linear_key_head_dim": 8, "linear_value_head_dim": 8},
        causal=True, patched=1,
    ),
    "lfm2": Tiny({"layer_types": ["conv", "full_attention"]}, causal=True, patched=1),
    "jamba": Tiny({"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False}, causal=True, patched=1),
}  # fmt: skip

_SEQ2SEQ = {
    name: Tiny(inputs="text to text", causal=True, patched=4, cross=2)
    for name in (
        "bart", "mbart", "marian", "pegasus", "blenderbot", "blenderbot-small", "m2m_100", "plbart", "nllb-moe",
    )
}  # fmt: skip

_IMAGE = {
    **{
        name: Tiny(inputs="image")
        for name in ("vit", "deit", "dinov2", "dinov3_vit", "ijepa", "vit_msn", "beit", "dinov2_with_registers")
    },
    **{name: Tiny(inputs="image") for name in ("clip_vision_model", "siglip_vision_model")},
    "yolos": Tiny({"image_size": [16, 16]}, inputs="image"),
}

_TEXT_AND_IMAGE = {
    **{name: Tiny(inputs="text and image", patched=4, causal=True) for name in ("clip", "metaclip_2")},
    **{name: Tiny(inputs="text and image", patched=4) for name in ("chinese_clip", "altclip")},
    "siglip": Tiny(inputs="text and image", patched=4, padding=False),  # pools the last position, padded or not
}

_SPEECH = {
    **{name: Tiny(inputs="speech") for name in ("wav2vec2", "hubert", "unispeech", "unispeech-sat")},
    "data2vec-audio": Tiny(inputs="speech", padding=False),  # a stack of convolutions gives its positions
    "whisper": Tiny(inputs="speech to text", causal=True, patched=4, cross=2),
    "speech_to_text": Tiny(
        {"input_feat_per_channel": 8, "conv_channels": 16},
        inputs="speech to text", causal=True, patched=4, cross=2,
    ),
}  # fmt: skip

SUPPORTED: dict[str, Tiny] = {**_ENCODERS, **_DECODERS, **_SEQ2SEQ, **_IMAGE, **_TEXT_AND_IMAGE, **_SPEECH}

# What must be refused before anything changes, each with a fragment of the reason.
REFUSED: dict[str, tuple[Tiny, str]] = {
    **{
        name: (Tiny(), "does not go through transformers' attention interface")
        for name in (
            "deberta", "deberta-v2", "gptj", "bloom", "mpt", "falcon", "mpnet", "xlnet", "codegen", "longformer",
            "big_bird", "megatron-bert", "convbert", "roformer", "rembert", "led", "openai-gpt", "xglm", "fnet",
        )
    },
    "gpt_neo": (Tiny({"attention_types": [[["global", "local"], 1]]}), "attention interface"),
    "mamba": (Tiny({"conv_kernel": 4}), "attention interface"),
    **{name: (Tiny(inputs="text to text"), "relative position bias") for name in ("t5", "mt5", "umt5", "longt5")},
    "swin": (
        Tiny({"patch_size": 2, "embed_dim": 16, "depths": (2,), "num_heads": (2,), "window_size": 4}, inputs="image"),
        "relative position bias",
    ),
    "beit with a position bias": (
        Tiny({"use_relative_position_bias": True}, inputs="image", model_type="beit"),
        "relative position bias",
    ),
    "beit with a shared position bias": (
        Tiny({"use_shared_relative_position_bias": True}, inputs="image", model_type="beit"),
        "relative position bias",
    ),
    "wav2vec2-conformer": (Tiny(inputs="speech"), "relative position bias"),
    "gpt_oss": (Tiny(), "attention sinks"),
    "gemma2": (Tiny(), "caps its scores"),
    "mistral with a window": (Tiny({"sliding_window": 8}, model_type="mistral"), "window of 8 tokens"),
    "starcoder2 with a window": (Tiny({"sliding_window": 8}, model_type="starcoder2"), "window of 8 tokens"),
    "doge": (Tiny(), "selects the keys"),
    "deepseek_v32": (Tiny({"num_key_value_heads": 4}), "selects the keys"),
    "bigbird_pegasus": (Tiny(inputs="text to text"), "reads the attention mask"),
    "pixtral": (Tiny(inputs="image"), "builds its own L × L attention mask"),
    "timesfm": (Tiny(inputs="time series"), "builds its own L × L attention mask"),
    "segformer": (  # its keys are fewer than its queries, so they do not stand at the same positions
        Tiny(
            {"num_attention_heads": [1, 2], "patch_sizes": [7, 3], "strides": [2, 2], "sr_ratios": [4, 2],
             "hidden_sizes": [16, 32], "depths": [1, 1], "mlp_ratios": [2, 2], "num_encoder_blocks": 2},
            inputs="image",
        ),
        "only cross-attention",
    ),
}  # fmt: skip


def tiny_config(model_type: str, options: dict[str, Any]) -> Any:
    """A config with the sizes above, in its towers too."""
    cls = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(cls)}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    for name, tower in cls.sub_configs.items():
        if tower.model_type in CONFIG_MAPPING:
            sizes[name] = tiny_config(tower.model_type, {}).to_dict()
    return cls(**{**sizes, **options})


def build(name: str) -> PreTrainedModel:
    """The model of that name in `SUPPORTED` or `REFUSED`, with weights large enough for its attention to matter."""
    tiny = SUPPORTED[name] if name in SUPPORTED else REFUSED[name][0]
    torch.manual_seed(0)
    return lively(AutoModel.from_config(tiny_config(tiny.model_type or name, tiny.options)).eval())


def make_inputs(name: str) -> dict[str, Any]:
    """A batch of two rows, of which the second is padded on the right if the model takes a mask."""
    tiny = SUPPORTED[name]
    torch.manual_seed(1)
    inputs: dict[str, Any] = {"use_cache": False} if tiny.generates else {}
    if tiny.inputs.startswith("text"):
        inputs["input_ids"] = torch.randint(5, 99, (BATCH, LENGTH))
        inputs["attention_mask"] = torch.ones(BATCH, LENGTH, dtype=torch.long)
        inputs["input_ids"][1, SHORT:] = inputs["attention_mask"][1, SHORT:] = 0
    if name == "layoutlm":
        inputs["bbox"] = torch.randint(0, 50, (BATCH, LENGTH, 4)).sort(-1).values
    if tiny.inputs.endswith("image"):
        inputs["pixel_values"] = torch.randn(BATCH, 3, 16, 16)
    if tiny.inputs == "speech":
        inputs["input_values"] = torch.randn(BATCH, SAMPLES)
        inputs["attention_mask"] = torch.ones(BATCH, SAMPLES, dtype=torch.long)
        inputs["input_values"][1, SHORT_SAMPLES:] = inputs["attention_mask"][1, SHORT_SAMPLES:] = 0
    if tiny.inputs == "speech to text":  # [B, features, frames] or [B, frames, features]
        inputs["input_features"] = torch.randn(BATCH, 8, 128) if name == "whisper" else torch.randn(BATCH, 48, 8)
    if tiny.inputs.endswith("to text"):
        inputs["decoder_input_ids"] = torch.randint(5, 99, (BATCH, DECODED))
    return inputs


def unpadded(inputs: dict[str, Any]) -> dict[str, Any]:
    """The second row alone, without its padding."""
    mask = inputs["attention_mask"]
    valid = int(mask[1].sum())
    alone = {k: v[1:2] if isinstance(v, Tensor) else v for k, v in inputs.items()}
    return {k: v[:, :valid] if getattr(v, "shape", ())[1:2] == mask.shape[1:] else v for k, v in alone.items()}


def token_streams(name: str) -> list[tuple[str, str, bool]]:
    """(input of tokens, output that follows them, whether it may see the past only) for each part that reads tokens."""
    tiny = SUPPORTED[name]
    if tiny.inputs == "text":
        return [("input_ids", "last_hidden_state", tiny.causal)]
    if tiny.inputs == "text and image":
        return [("input_ids", "text_model_output.last_hidden_state", tiny.causal)]
    streams = [("decoder_input_ids", "last_hidden_state", True)] if tiny.inputs.endswith("to text") else []
    return streams + ([("input_ids", "encoder_last_hidden_state", False)] if tiny.inputs == "text to text" else [])


def outputs(model: nn.Module, inputs: dict[str, Any]) -> dict[str, Tensor]:
    """Every floating tensor that the model returns, by its name; caches are left out."""
    found: dict[str, Tensor] = {}

    def collect(prefix: str, values: dict[str, Any]) -> None:
        for name, value in values.items():
            if isinstance(value, dict):
                collect(f"{prefix}{name}.", value)
            elif isinstance(value, Tensor) and value.is_floating_point():
                found[prefix + name] = value

    collect("", model(**inputs))
    return found


@contextmanager
def mechanism_calls(model: nn.Module) -> Iterator[dict[str, list[bool]]]:
    """Collects, by the name of the attention module, whether each call of its mechanism was causal."""
    calls: dict[str, list[bool]] = {}

    def recorder(name: str) -> Any:
        return lambda module, args, kwargs, output: calls.setdefault(name, []).append(kwargs["causal"])

    handles = [m.register_forward_hook(recorder(n), with_kwargs=True) for n, m in mechanisms(model).items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()
