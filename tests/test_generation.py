"""generate() of patched decoders: token for token what use_cache=False gives, from a state of constant size."""

import copy
import gc
import threading
import weakref

import pytest
import torch
import torch._dynamo.testing
from support.architectures import build
from support.models import MODELS, tiny_gpt2, tiny_llama
from support.variants import OPTIONS, every_mechanism, over
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    StaticCache,
)

from hf_rfattn import build_mechanism, mechanism_names, patch_model, unpatch_model
from hf_rfattn.integration.cache import RecurrentLayer
from hf_rfattn.integration.cost import attention_cost
from hf_rfattn.integration.discovery import find_attention

NEW = 24


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 160,
}


def opt():
    return OPTForCausalLM(OPTConfig(**SIZES, ffn_dim=48, word_embed_proj_dim=32, dropout=0.0))


def gpt_neox():
    return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, intermediate_size=48))


def qwen2():
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, intermediate_size=48))


DECODERS = {"gpt2": tiny_gpt2, "llama": tiny_llama, "opt": opt, "gpt_neox": gpt_neox, "qwen2": qwen2}
WAYS = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"num_beams": 4},
    "beam-sampling": {"num_beams": 3, "do_sample": True, "num_return_sequences": 3},
    "static": {"cache_implementation": "static"},
    "chunked": {"prefill_chunk_size": 7},
}


def sharpened(model):
    """Random weights large enough that tokens depend on the whole context; float64, so that ties cannot decide."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model.double().eval()


def prompt(batch=3, length=20):
    """A batch with left padding, unless it is one row."""
    tokens = torch.randint(1, 50, (batch, length))
    mask = torch.ones_like(tokens)
    if batch > 1:
        mask[1, :7] = 0
        mask[2, : length - 1] = 0
    return {"input_ids": tokens * mask, "attention_mask": mask}


def generate(model, inputs, seed=0, **ways):
    torch.manual_seed(seed)
    settings = dict(max_new_tokens=NEW, pad_token_id=0, eos_token_id=None, bos_token_id=1, output_logits=True)
    return model.generate(**inputs, **settings | {"return_dict_in_generate": True} | ways)


def assert_same_generation(model, inputs, ways):
    plain = {k: v for k, v in ways.items() if k not in ("cache_implementation", "prefill_chunk_size")}
    expected = generate(model, inputs, use_cache=False, **plain)
    result = generate(model, inputs, use_cache=True, **ways)
    assert torch.equal(result.sequences, expected.sequences)
    for a, b in zip(result.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
    return result


@every_mechanism
@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_cached_generation_equals_uncached(family, ways, variant):
    model = patch_model(sharpened(DECODERS[family]()), variant[0])
    result = assert_same_generation(model, prompt(), WAYS[ways])
    assert len(set(result.sequences[0, -NEW:].tolist())) > 1, "tokens that never change would prove nothing"
    layers = result.past_key_values.layers
    assert all(isinstance(layer, RecurrentLayer) for layer in layers)
    assert all(int(layer.get_seq_length()) == 20 + NEW - 1 for layer in layers)


@over(OPTIONS)
@pytest.mark.parametrize("ways", ["greedy", "chunked"])
def test_every_option_generates(ways, variant):
    model = patch_model(sharpened(tiny_llama()), variant[0], **variant[1])
    assert_same_generation(model, prompt(), WAYS[ways])


@pytest.mark.parametrize("name", ["favor+", "fmm"])
@pytest.mark.parametrize("ways", ["greedy", "beams", "static"])
@pytest.mark.parametrize("family", ["opt", "gpt_neox", "qwen2"])
def test_other_decoders(family, ways, name):
    assert_same_generation(patch_model(sharpened(DECODERS[family]()), name), prompt(), WAYS[ways])


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("ways", WAYS)
def test_mixed_models_keep_an_ordinary_cache_in_softmax_layers(family, ways):
    for layer in (0, 1):
        model = patch_model(sharpened(DECODERS[family]()), "fmm", bandwidth=3, layers=[layer])
        result = assert_same_generation(model, prompt(), WAYS[ways])
        kinds = [isinstance(x, RecurrentLayer) for x in result.past_key_values.layers]
        assert kinds == [layer == 0, layer == 1]


@pytest.mark.parametrize("ways", ["greedy", "sampling", "beams"])
@pytest.mark.parametrize("name", ["favor+", "fmm"])
def test_encoder_decoder(ways, name):
    config = BartConfig(
        vocab_size=50, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=160, dropout=0.0, forced_eos_token_id=None,
        decoder_start_token_id=2,
    )  # fmt: skip
    model = patch_model(sharpened(BartForConditionalGeneration(config)), name)
    result = assert_same_generation(model, prompt(), WAYS[ways])
    assert isinstance(result.past_key_values.self_attention_cache.layers[0], RecurrentLayer)
    assert not isinstance(result.past_key_values.cross_attention_cache.layers[0], RecurrentLayer)


@every_mechanism
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_continuing_from_a_returned_cache(cache, variant):
    model = patch_model(sharpened(tiny_llama()), variant[0])
    inputs = prompt()
    whole = generate(model, inputs, use_cache=False).sequences
    past = (
        DynamicCache(config=model.config) if cache == "dynamic" else StaticCache(config=model.config, max_cache_len=100)
    )
    first = generate(model, inputs, past_key_values=past, max_new_tokens=9)
    mask = torch.cat([inputs["attention_mask"], torch.ones(3, 9, dtype=torch.long)], dim=1)
    second = generate(
        model,
        {"input_ids": first.sequences, "attention_mask": mask},
        past_key_values=first.past_key_values,
        max_new_tokens=NEW - 9,
    )
    assert torch.equal(second.sequences, whole)


def held(cache):
    return sum(layer.nbytes() for layer in cache.layers)


@every_mechanism
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_bytes_held_do_not_depend_on_the_prompt(family, variant):
    long = {"n_positions": 16384} if family == "gpt2" else {"max_position_embeddings": 16384}
    model = patch_model(MODELS[family](**long), variant[0])
    sizes = []
    for length in (16, 16384):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=torch.randint(1, 50, (1, length)), past_key_values=cache, use_cache=True, logits_to_keep=1)
        sizes.append(held(cache))
    mechanism = build_mechanism(variant[0], num_heads=4, num_kv_heads=4 if family == "gpt2" else 2, head_dim=8)
    assert sizes == [2 * attention_cost(mechanism, length, causal=True).memory for length in (16, 16384)]
    assert mechanism.holds_all_keys or sizes[0] == sizes[1]


@every_mechanism
def test_no_tensor_of_the_prompt_stays_alive(variant):
    """Keys and values of the prompt are freed once the forward pass is over."""
    model = patch_model(tiny_llama(), variant[0])
    alive = []

    def remember(module, args, output):
        alive.append(weakref.ref(output))

    handles = [m.register_forward_hook(remember) for n, m in model.named_modules() if n.endswith(("k_proj", "v_proj"))]
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.randint(1, 50, (1, 100)), past_key_values=cache, use_cache=True)
    [handle.remove() for handle in handles]
    gc.collect()
    assert len(alive) == 4 and all(ref() is None for ref in alive)
    # the state owns its memory: nothing in it is a view of something larger
    for layer in cache.layers:
        for tensor in layer.state.tensors():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes


@every_mechanism
def test_cache_operations(variant):
    """Rows repeated, selected, reordered, offloaded and fetched: each row goes on as it would have alone."""
    model = patch_model(sharpened(tiny_llama()), variant[0])
    tokens, following = torch.randint(1, 50, (3, 30)), torch.randint(1, 50, (3, 1))

    def after(rows, change):
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(input_ids=tokens, past_key_values=cache, use_cache=True)
            change(cache)
            return model(input_ids=following[rows], past_key_values=cache, use_cache=True).logits[:, -1]

    with torch.no_grad():
        expected = torch.stack(
            [model(input_ids=torch.cat([tokens[i], following[i]])[None]).logits[0, -1] for i in range(3)]
        )
    close = torch.testing.assert_close
    close(after([2, 0, 1], lambda c: c.reorder_cache(torch.tensor([2, 0, 1]))), expected[[2, 0, 1]])
    close(after([0, 0, 1, 1, 2, 2], lambda c: c.batch_repeat_interleave(2)), expected[[0, 0, 1, 1, 2, 2]])
    close(after([2, 1], lambda c: c.batch_select_indices(torch.tensor([2, 1]))), expected[[2, 1]])
    close(after([0, 2], lambda c: c.batch_select_indices(torch.tensor([True, False, True]))), expected[[0, 2]])

    def there_and_back(cache):
        [layer.offload() for layer in cache.layers]
        [layer.prefetch() for layer in cache.layers]

    close(after([0, 1, 2], there_and_back), expected)

    def reset_and_refill(cache):
        addresses = [t.data_ptr() for layer in cache.layers for t in layer.state.tensors()]
        cache.reset()
        assert cache.get_seq_length() == 0
        for layer, site in zip(cache.layers, find_attention(model), strict=True):
            empty = site.module.rf.new_state(len(tokens), site.head_dim, torch.float32, "cpu")
            if site.module.rf.holds_all_keys:  # what has grown stays as large
                assert not getattr(layer.state, "exact", layer.state).count.any()
                continue
            assert all(torch.equal(a, b) for a, b in zip(layer.state.tensors(), empty.tensors(), strict=True))
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
        assert addresses == [t.data_ptr() for layer in cache.layers for t in layer.state.tensors()]

    close(after([0, 1, 2], reset_and_refill), expected)


def test_what_needs_rollback_is_refused_before_the_first_token():
    model, helper = patch_model(tiny_gpt2(), "favor+"), tiny_gpt2()
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    inputs = prompt(batch=1)
    for ways in ({"assistant_model": helper}, {"prompt_lookup_num_tokens": 2}):
        with pytest.raises(ValueError, match="stateful"):
            generate(model, inputs, **ways)
    assert not calls
    cache = generate(model, inputs).past_key_values
    with pytest.raises(NotImplementedError, match="cannot forget"):
        cache.crop(-1)
    with pytest.raises(NotImplementedError, match="cannot forget"):
        cache.activate_past_recording()
    assert not cache.is_croppable
    # a softmax model may still be helped: after switching, in a copy, and after unpatching
    expected = generate(model, inputs, use_cache=False).sequences
    model.set_attn_implementation("sdpa")
    for one in (model, copy.deepcopy(model)):
        assert generate(one, inputs, assistant_model=helper).sequences.shape == (1, 20 + NEW)
    model.set_attn_implementation("hf_rfattn")
    assert torch.equal(generate(model, inputs).sequences, expected)
    with pytest.raises(ValueError, match="stateful"):
        generate(model, inputs, assistant_model=helper)
    assert generate(unpatch_model(model), inputs, assistant_model=helper).sequences.shape == (1, 20 + NEW)


def test_a_checkpoint_loaded_with_softmax_may_be_helped(tmp_path):
    patch_model(tiny_gpt2(), "favor+").save_pretrained(tmp_path)
    inputs, helper = prompt(batch=1), tiny_gpt2()
    with pytest.warns(UserWarning, match="makes it softmax again"):
        model = type(helper).from_pretrained(tmp_path, attn_implementation="sdpa")
    assert generate(model, inputs, assistant_model=helper).sequences.shape == (1, 20 + NEW)


def test_models_that_are_stateful_anyway_stay_so():
    model = patch_model(build("jamba"), "favor+")
    assert type(model)._is_stateful
    model.set_attn_implementation("sdpa")
    assert model._is_stateful


def test_continuous_batching_is_refused():
    model = patch_model(tiny_llama(), "favor+")
    with pytest.raises(ValueError, match=r"hf_rfattn.*is not supported"):
        model.generate_batch(inputs=[[1, 2, 3]], max_new_tokens=2)


def test_other_caches_are_refused():
    from transformers.cache_utils import Cache, DynamicSlidingWindowLayer

    model = patch_model(tiny_llama(), "favor+")
    odd = Cache(layers=[DynamicSlidingWindowLayer(sliding_window=4) for _ in range(2)])
    with pytest.raises(NotImplementedError, match="DynamicSlidingWindowLayer"):
        model(**prompt(), past_key_values=odd, use_cache=True)
    plain = tiny_llama()
    filled = plain(**prompt(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="filled by softmax"):
        model(input_ids=torch.ones(3, 1, dtype=torch.long), past_key_values=filled, use_cache=True)


def test_an_architecture_that_calls_attention_twice_is_refused_with_a_cache():
    config = DiffLlamaConfig(**SIZES, num_key_value_heads=2, intermediate_size=48)
    model = patch_model(DiffLlamaForCausalLM(config).eval(), "favor+")
    with pytest.raises(NotImplementedError, match="more than once per layer"):
        generate(model, prompt(batch=1))


def test_threads_generating_at_once_do_not_mix():
    model = patch_model(sharpened(tiny_llama()), "fmm", bandwidth=4)
    inputs = [prompt(batch=1, length=10 + 5 * n) for n in range(4)]
    expected = [generate(model, x).sequences for x in inputs]
    results = [None] * 4

    def work(n):
        results[n] = model.generate(**inputs[n], max_new_tokens=NEW, pad_token_id=0, eos_token_id=None)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    for result, reference in zip(results, expected, strict=True):
        assert torch.equal(result, reference)


@pytest.mark.slow
@pytest.mark.parametrize("name", mechanism_names())
def test_compiled_decoding_step(name):
    """fullgraph, with a static cache: the state stays where it is, and one graph serves every step."""
    model = patch_model(sharpened(tiny_llama(num_hidden_layers=1)), name)
    tokens = torch.randint(1, 50, (2, 30))
    with torch.no_grad():
        expected = model(input_ids=tokens, use_cache=False).logits
    cache = StaticCache(config=model.config, max_cache_len=64)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    with torch.no_grad():
        model(input_ids=tokens[:, :20], past_key_values=cache, use_cache=True)
        addresses = [t.data_ptr() for t in cache.layers[0].state.tensors()]
        for t in range(20, 30):
            positions = torch.full((2, 1), t)
            out = step(input_ids=tokens[:, t : t + 1], position_ids=positions, past_key_values=cache, use_cache=True)
            torch.testing.assert_close(out.logits[:, 0], expected[:, t])
    assert addresses == [t.data_ptr() for t in cache.layers[0].state.tensors()]
    assert counter.frame_count == 1, "the step was compiled again"


@pytest.mark.slow
@torch.no_grad()
def test_compiled_steps_let_a_dynamic_cache_grow():
    """Some programs at first, then one for all lengths; multipole holds all keys."""
    model = patch_model(sharpened(tiny_llama(num_hidden_layers=1)), "multipole", exact_keys=16, block=4)
    tokens, cache = torch.randint(1, 50, (2, 60)), DynamicCache(config=model.config)
    expected = model(input_ids=tokens, use_cache=False).logits
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    step = torch.compile(model, fullgraph=True, backend=counter)
    step(input_ids=tokens[:, :20], past_key_values=cache, use_cache=True)
    for t in range(20, 60):
        before = counter.frame_count
        positions = torch.full((2, 1), t)
        out = step(input_ids=tokens[:, t : t + 1], position_ids=positions, past_key_values=cache, use_cache=True)
        torch.testing.assert_close(out.logits[:, 0], expected[:, t], rtol=1e-4, atol=1e-4)
    assert counter.frame_count == before <= 6


@pytest.mark.parametrize("family", ["gpt2", "llama"])
@every_mechanism
def test_training_with_a_cache_is_training_without(family, variant):
    """GPT-2 caches by default, in training too: the gradients must not notice."""
    model = patch_model(MODELS[family](), variant[0]).train()
    tokens = torch.randint(1, 50, (2, 70))
    grads = []
    for use_cache in (True, False):
        model.zero_grad()
        model(input_ids=tokens, labels=tokens, use_cache=use_cache).loss.backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    assert grads[0].keys() == grads[1].keys()
    for name, grad in grads[0].items():
        torch.testing.assert_close(grad, grads[1][name], rtol=1e-4, atol=1e-6)
