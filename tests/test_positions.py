"""Longer inputs for learned positions: rows by hand, old inputs, saving, generation, and what is refused."""

import copy
from pathlib import Path

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from support.architectures import LENGTH, REFUSED, SUPPORTED, build, make_inputs, outputs
from support.models import hidden, tiny_bert, tiny_gpt2, tiny_llama
from support.word_tokenizers import tiny_tokenizer
from torch import nn
from transformers import AutoModel

from hf_rfattn import extend_positions, patch_model, unpatch_model
from hf_rfattn.integration.positions import learned_positions

LIMIT, LONG = 64, 150  # positions of the tiny models, as config or table count them, and after extension
FROM_PADDING = [
    "roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "data2vec-text", "roberta-prelayernorm", "markuplm",
    "xmod", "altclip",
]  # fmt: skip
OFFSET = ["opt", "biogpt", "bart", "mbart", "plbart"]
LEARNED = [
    "bert", "distilbert", "electra", "ernie", "bert-generation", "layoutlm", "splinter", "roc_bert", "albert",
    "mobilebert", "gpt2", "gpt_bigcode", "blenderbot", "blenderbot-small", "clip", "metaclip_2", "chinese_clip",
    "siglip", *FROM_PADDING, *OFFSET,
]  # fmt: skip
SHARED = Path(__file__).parents[2] / "shared" / "models" / "paraphrase-MiniLM-L3-v2"


def first_row(name):
    """Where the position of the first token stands: padding_idx is 0 in tiny models."""
    return 1 if name in FROM_PADDING else 2 if name in OFFSET else 0


def tables(model):
    names = ("position_embeddings", "position_embedding", "wpe", "embed_positions")
    return {n: m for n, m in model.named_modules() if n.split(".")[-1] in names and not n.startswith("vision")}


def one_row(name, length):
    """The first row of the batch, its tokens repeated up to a length."""
    inputs = {k: v[:1] if isinstance(v, torch.Tensor) else v for k, v in make_inputs(name).items()}
    for key in ("input_ids", "attention_mask", "bbox", "decoder_input_ids"):
        if key in inputs:
            inputs[key] = inputs[key][:, torch.arange(length) % inputs[key].shape[1]]
    return inputs


def rows_by_hand(old, first, length, method):
    """The definition, one row after the other."""
    usable = old[first:]
    rows = list(old[:first])
    for i in range(length):
        if method == "tile":
            rows.append(usable[i % len(usable)])
        else:
            where = i * (len(usable) - 1) / (length - 1)
            below = int(where)
            above = min(below + 1, len(usable) - 1)
            rows.append(usable[below] + (where - below) * (usable[above] - usable[below]))
    return torch.stack(rows)


@pytest.mark.parametrize("method", ["interpolate", "tile"])
@pytest.mark.parametrize("name", LEARNED)
@torch.no_grad()
def test_rows_forward_and_checkpoint(name, method, tmp_path):
    model, first = build(name), first_row(name)
    before = {n: t.weight.clone() for n, t in tables(model).items()}
    usable = LIMIT - 1 if name in FROM_PADDING else LIMIT
    assert learned_positions(model) == usable
    short = outputs(model, one_row(name, LENGTH))

    assert extend_positions(model, LONG, method=method) is model
    assert learned_positions(model) == LONG
    looked_up = {}
    for n, table in tables(model).items():
        torch.testing.assert_close(table.weight, rows_by_hand(before[n], first, LONG, method), rtol=1e-5, atol=1e-5)
        kept = first + (usable if method == "tile" else 1)
        assert torch.equal(table.weight[:kept], before[n][:kept])
        assert method == "tile" or torch.equal(table.weight[-1], before[n][-1])
        table.register_forward_hook(lambda m, args, out, n=n: looked_up.update({n: out}))
    out = outputs(model, one_row(name, LONG))
    for n, table in tables(model).items():
        assert torch.equal(looked_up[n].reshape(LONG, -1), table.weight[first:])
    assert all(torch.isfinite(o).all() for o in out.values())
    if method == "tile":
        for key, value in outputs(model, one_row(name, LENGTH)).items():
            assert torch.equal(value, short[key])

    model.save_pretrained(tmp_path)
    again, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items())
    for key, value in outputs(again.eval(), one_row(name, LONG)).items():  # libraries round by where weights lie
        torch.testing.assert_close(value, out[key], rtol=1e-5, atol=1e-5)
    for (key, value), (_, other) in zip(model.named_buffers(), again.named_buffers(), strict=True):
        assert torch.equal(value, other), key


@pytest.mark.parametrize("name", [*LEARNED, "pegasus", "marian"])
@torch.no_grad()
def test_inputs_longer_than_the_table_are_told_what_to_do(name):
    model = patch_model(build(name), "average")
    usable = learned_positions(model) or LIMIT
    model(**one_row(name, usable))
    with pytest.raises(ValueError, match=rf"input has {usable + 1} tokens.*positions for {usable}\..*extend_positions"):
        model(**one_row(name, usable + 1))
    if name in LEARNED:
        extend_positions(model, LONG)
        model(**one_row(name, LONG))


@torch.no_grad()
def test_long_inputs_whose_positions_fit_are_not_refused():
    packed = torch.arange(12).repeat(3)[None]
    patch_model(tiny_gpt2(n_positions=16), "average")(
        torch.randint(1, 50, (1, 36)), position_ids=packed, use_cache=False
    )
    padded = torch.ones(1, LONG, dtype=torch.long)
    padded[:, : LONG - 40] = 0
    patch_model(build("opt"), "average")(input_ids=torch.randint(5, 50, (1, LONG)), attention_mask=padded)
    patch_model(build("llama"), "average")(input_ids=torch.randint(5, 50, (1, LONG)))


@pytest.mark.parametrize("name", [name for name in SUPPORTED if name not in LEARNED])
def test_positions_that_are_not_learned(name):
    model = build(name)
    with pytest.raises(ValueError, match=r"has rotary|has no learned absolute positions"):
        extend_positions(model, 4096)
    assert learned_positions(model) is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("llama", r"rotary.*max_position_embeddings=256.*'factor': 4,.*'original_max_position_embeddings': 64"),
        ("pegasus", r"no learned.*resize_position_embeddings\(256\)"),
        ("t5", "no learned absolute positions.*relative positions"),
        ("vit", "no learned absolute positions.*images"),
        ("xlnet", "no learned absolute positions"),
    ],
)
def test_what_to_do_instead(name, message):
    with pytest.raises(ValueError, match=message):
        extend_positions(build(name), 256)


def test_the_advice_for_rotary_models_works(tmp_path):
    tiny_llama().save_pretrained(tmp_path)
    scaling = {"rope_type": "yarn", "factor": 4, "rope_theta": 1e4, "original_max_position_embeddings": 160}
    model = AutoModel.from_pretrained(tmp_path, max_position_embeddings=640, rope_parameters=scaling)
    assert model.config.max_position_embeddings == 640 and model.rotary_emb.rope_type == "yarn"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_length": 100}, "BertModel already has positions for 160 tokens; max_length=100"),
        ({"max_length": 0}, "positive integer"),
        ({"max_length": 512.0}, "positive integer"),
        ({"max_length": True}, "positive integer"),
        ({"max_length": 512, "method": "stretch"}, "Unknown method 'stretch'; choose one of tile, interpolate"),
        ({"max_length": 512, "tokenizer": "bert"}, "model_max_length"),
    ],
)
def test_mistakes_change_nothing(arguments, message):
    model = tiny_bert()
    before, config = copy.deepcopy(model.state_dict()), model.config.to_dict()
    with pytest.raises(ValueError, match=message):
        extend_positions(model, **arguments)
    after = model.state_dict()
    assert after.keys() == before.keys() and all(torch.equal(after[k], before[k]) for k in after)
    assert model.config.to_dict() == config


def test_models_that_cannot_be_extended():
    with pytest.raises(ValueError, match="holds no transformers model"):
        extend_positions(nn.Linear(2, 2), 512)
    with torch.device("meta"):
        empty = transformers.BertModel(tiny_bert().config)
    assert learned_positions(empty) == 160
    with pytest.raises(ValueError, match=r"on the meta device.*Load the weights first"):
        extend_positions(empty, 512)
    cut = tiny_bert()
    cut.embeddings.position_embeddings.weight = nn.Parameter(torch.zeros(7, 32))
    with pytest.raises(ValueError, match=r"7 rows where config.max_position_embeddings=160"):
        extend_positions(cut, 512)
    sizes = dict(vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    relative = transformers.DebertaModel(transformers.DebertaConfig(**sizes, relative_attention=True))
    with pytest.raises(ValueError, match=r"relative positions .*rel_embeddings"):
        extend_positions(relative, 1024)
    wrapped = get_peft_model(tiny_gpt2(), LoraConfig(target_modules=["c_attn"], modules_to_save=["wpe"]))
    with pytest.raises(ValueError, match="extend the model before that"):
        extend_positions(wrapped, 1024)
    window = dict(hidden_size=32, num_layers=1, num_heads=4, attention_types=[[["local"], 1]], window_size=4)
    local = transformers.GPTNeoModel(transformers.GPTNeoConfig(**window, max_position_embeddings=64, vocab_size=20))
    with pytest.raises(ValueError, match=r"buffer h\.0\.attn\.attention\.bias"):
        extend_positions(local, 128)


def test_as_long_as_now_is_no_change():
    model = tiny_bert()
    table = model.embeddings.position_embeddings.weight.clone()
    extend_positions(model, 160)
    assert torch.equal(model.embeddings.position_embeddings.weight, table)
    assert model.config.max_position_embeddings == 160


def test_twice_tiled_is_once_tiled():
    once, twice = tiny_gpt2(), tiny_gpt2()
    twice.load_state_dict(once.state_dict())
    extend_positions(once, 640, "tile")
    extend_positions(extend_positions(twice, 320, method="tile"), 640, method="tile")
    assert torch.equal(once.transformer.wpe.weight, twice.transformer.wpe.weight)


def test_what_a_table_is_stays():
    model = tiny_bert().to(torch.bfloat16)
    table = model.embeddings.position_embeddings
    table.weight.requires_grad_(False)
    rng = torch.get_rng_state()
    extend_positions(model, 512)
    assert model.embeddings.position_embeddings is table and table.num_embeddings == len(table.weight) == 512
    assert isinstance(table.weight, nn.Parameter)
    assert table.weight.dtype == torch.bfloat16 and not table.weight.requires_grad
    assert model.embeddings.position_ids.shape == (1, 512) == model.embeddings.token_type_ids.shape
    assert "embeddings.position_ids" not in model.state_dict()
    assert torch.equal(torch.get_rng_state(), rng)


def test_it_can_be_trained_after():
    model = extend_positions(tiny_bert(), 320).train()
    hidden(model, input_ids=torch.randint(50, (1, 320))).square().mean().backward()
    assert model.embeddings.position_embeddings.weight.grad.abs().sum(1).gt(0).all()


def test_two_models_in_one_share_what_they_shared(tmp_path):
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=32)
    encoder = transformers.BertConfig(**sizes, max_position_embeddings=64)
    decoder = transformers.BertConfig(
        **sizes, max_position_embeddings=64, is_decoder=True, add_cross_attention=True, bos_token_id=1
    )
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    model = transformers.EncoderDecoderModel(config).eval()
    upper, lower = model.encoder.embeddings, model.decoder.bert.embeddings
    upper.position_embeddings.weight = lower.position_embeddings.weight
    extend_positions(model, LONG)
    assert upper.position_embeddings.weight is lower.position_embeddings.weight
    assert len(upper.position_embeddings.weight) == LONG == model.decoder.config.max_position_embeddings
    lower.position_embeddings.weight = nn.Parameter(lower.position_embeddings.weight.detach().clone())
    model.save_pretrained(tmp_path)
    again = transformers.EncoderDecoderModel.from_pretrained(tmp_path).eval()
    tokens = {"input_ids": torch.randint(50, (1, LONG)), "decoder_input_ids": torch.randint(50, (1, LONG))}
    assert torch.equal(hidden(again, **tokens), hidden(model, **tokens))


def test_both_numbers_of_gpt2():
    model = tiny_gpt2(n_ctx=160)
    extend_positions(model, 320)
    assert model.config.n_positions == model.config.n_ctx == 320


def test_a_causal_mask_kept_as_a_buffer_grows():
    model = build("gpt_bigcode")
    extend_positions(model, LONG)
    assert torch.equal(model.bias, torch.ones(LONG, LONG, dtype=torch.bool).tril())


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert", "electra", "gpt2", "opt"])
def test_patched_before_or_after(name, tmp_path):
    inputs = one_row(name, LONG)
    after = patch_model(extend_positions(build(name), LONG), "fmm", bandwidth=8)
    before = extend_positions(patch_model(build(name), "fmm", bandwidth=8), LONG)
    expected = hidden(after, **inputs)
    assert torch.isfinite(expected).all()
    assert torch.equal(hidden(before, **inputs), expected)
    before.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path).eval()
    assert loaded.config._attn_implementation == "hf_rfattn"
    assert torch.equal(hidden(loaded, **inputs), expected)
    softmax = hidden(extend_positions(build(name), LONG), **inputs)
    assert torch.equal(hidden(unpatch_model(loaded), **inputs), softmax)


def test_a_checkpoint_that_is_loaded_patched_can_be_extended(tmp_path):
    patch_model(tiny_bert(), "favor+").save_pretrained(tmp_path / "patched")
    model = extend_positions(AutoModel.from_pretrained(tmp_path / "patched"), 512, method="tile").eval()
    model.save_pretrained(tmp_path / "long")
    tokens = torch.randint(50, (1, 512))
    again = AutoModel.from_pretrained(tmp_path / "long").eval()
    assert torch.equal(hidden(again, input_ids=tokens), hidden(model, input_ids=tokens))


@pytest.mark.parametrize("attention", [None, "favor+", "fmm"])
@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_generation_beyond_the_old_limit(name, attention):
    if name == "gpt2":
        model = tiny_gpt2(n_positions=64)
    else:
        sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, ffn_dim=48, word_embed_proj_dim=32)
        config = transformers.OPTConfig(**sizes, vocab_size=50, max_position_embeddings=64, do_layer_norm_before=True)
        model = transformers.OPTForCausalLM(config).eval()
    if attention is not None:
        patch_model(model, attention)
    prompt = torch.randint(3, 50, (1, 60))
    how = dict(max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    with pytest.raises(IndexError if attention is None else ValueError, match=r"out of range|has positions for 64"):
        model.generate(prompt, **how)
    assert model.generate(prompt, **{**how, "max_new_tokens": 5}).shape == (1, 65)  # the last token is not an input
    extend_positions(model, 128)
    cached = model.generate(prompt, **how)
    assert cached.shape == (1, 80)
    assert torch.equal(cached, model.generate(prompt, **how, use_cache=False))


def test_the_limit_of_a_tokenizer_is_saved(tmp_path):
    tokenizer = tiny_tokenizer()
    tokenizer.model_max_length = 160
    extend_positions(tiny_bert(), 512, tokenizer=tokenizer)
    tokenizer.save_pretrained(tmp_path)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again.model_max_length == tokenizer.model_max_length == 512
    assert len(again("the film " * 300, truncation=True)["input_ids"]) == 512


def test_refused_attention_is_no_reason_to_refuse_positions():
    """Models whose attention cannot be patched may still have a table."""
    model = build("big_bird")
    assert "big_bird" in REFUSED and learned_positions(extend_positions(model, 128)) == 128


def test_beside_lora():
    model = get_peft_model(patch_model(tiny_gpt2(n_positions=64), "favor+"), LoraConfig(target_modules=["c_attn"]))
    assert extend_positions(model, 128)(torch.ones(1, 128, dtype=torch.long)).logits.shape == (1, 128, 50)


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs {SHARED.name} in ../shared/models")
@torch.no_grad()
def test_a_real_model(tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(SHARED)
    model = AutoModel.from_pretrained(SHARED)
    extend_positions(model, 1024, tokenizer=tokenizer)
    patch_model(model, "fmm", bandwidth=32)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    model, tokenizer = AutoModel.from_pretrained(tmp_path).eval(), transformers.AutoTokenizer.from_pretrained(tmp_path)
    batch = tokenizer("Where linear attention begins to pay, this model used to stop. " * 200, truncation=True,
                      return_tensors="pt")  # fmt: skip
    assert batch["input_ids"].shape == (1, 1024)
    assert torch.isfinite(hidden(model, **batch)).all()
