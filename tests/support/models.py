"""Tiny models of a few architectures with random weights, and what tests ask of a model."""

import torch
import transformers

from hf_rfattn.mechanisms import Mechanism


def tiny_bert(**changes):
    config = dict(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=160, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return transformers.BertModel(transformers.BertConfig(**config | changes)).eval()


def tiny_gpt2(**changes):
    config = dict(
        vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=160, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**config | changes)).eval()


def tiny_llama(**changes):
    """Grouped queries: four query heads share two key heads."""
    config = dict(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=160, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**config | changes)).eval()


def tiny_bart(**changes):
    config = dict(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64, dropout=0.0,
    )  # fmt: skip
    return transformers.BartModel(transformers.BartConfig(**config | changes)).eval()


MODELS = {"bert": tiny_bert, "gpt2": tiny_gpt2, "llama": tiny_llama}


def ids(batch=2, length=30):
    """Random tokens of the models above, without 0, which pads."""
    return torch.randint(1, 50, (batch, length))


def lively(model):
    """With weights large enough for attention to differ from averaging."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5)
    return model


def hidden(model, **inputs):
    """The output that tests compare: hidden states or logits `[B, L, E]`."""
    out = model(**inputs)
    return out.logits if "logits" in out else out.last_hidden_state


def gradients(model, **inputs):
    """(outputs, gradients by name) of one training step."""
    model.zero_grad()
    out = hidden(model, **inputs)
    out.square().mean().backward()
    return out.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def mechanisms(model):
    """The mechanisms of a patched model, not those inside others, by the names of their attention modules."""
    named = ((name, m) for name, m in model.named_modules() if isinstance(m, Mechanism))
    return {name.removesuffix(".rf"): m for name, m in named if name.endswith(".rf")}


def altered(model):
    """Every tensor of a mechanism changed by hand: what a checkpoint gives back must be this, not a new draw."""
    with torch.no_grad():
        for mechanism in mechanisms(model).values():
            for tensor in mechanism.state_dict().values():
                if tensor.is_floating_point():
                    tensor.mul_(1.25)
    return model


def assert_same_model(a, b, **inputs):
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(x, b.state_dict()[name]) for name, x in a.state_dict().items())
    assert torch.equal(hidden(a, **inputs), hidden(b, **inputs))
    assert {n: m.config for n, m in mechanisms(a).items()} == {n: m.config for n, m in mechanisms(b).items()}
