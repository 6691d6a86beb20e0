"""One sequence over several processes gives what one process gives: outputs, losses, gradients, training."""

import copy
import os
import time
import warnings

import pytest
import torch
import torch.distributed as dist
import transformers
from accelerate.big_modeling import _attach_context_parallel_hooks
from measure_sharding import SentBytes
from support.attention import build, draw_qkv
from support.models import lively, tiny_bert, tiny_gpt2, tiny_llama
from support.ranks import Ranks
from support.variants import every_mechanism, every_variant
from torch.nn.parallel import DistributedDataParallel

import hf_rfattn
from hf_rfattn.ops.sharded import Part


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    group = Ranks(request.param)
    yield group
    group.close()


@pytest.fixture(scope="module")
def two():
    group = Ranks(2)
    yield group
    group.close()


@every_variant
@pytest.mark.parametrize("length", [1, 37])
def test_mechanisms(ranks, variant, length):
    ranks(parts_equal_the_whole, variant, length)


def parts_equal_the_whole(variant, length):
    """Attention and gradients of a part are those of its rows, with and without masks; the last part is all padding."""
    rank, size = dist.get_rank(), dist.get_world_size()
    total = size * length
    torch.manual_seed(0)
    mechanism = build(variant, heads=4, kv_heads=2)
    q, k, v = draw_qkv(total, heads=4, kv_heads=2)
    key_mask = torch.rand(2, total) > 0.4
    key_mask[:, -length:] = False
    segments = (torch.rand(2, total) > 0.9).long().cumsum(1)
    weight = torch.randn(2, 4, total, v.shape[-1], dtype=v.dtype)

    def own(x):
        return x.narrow(2, rank * length, length)

    for causal, mask, numbers in [
        (False, None, None), (False, key_mask, None), (False, key_mask, segments),
        (True, None, None), (True, key_mask, None), (True, None, segments), (True, key_mask, segments),
    ]:  # fmt: skip
        if numbers is not None and not causal and not mechanism.gathers_sequence():
            continue
        part = Part(dist.group.WORLD, rank, size, length, mask, numbers)
        results = []
        for cut in (lambda x: x, own):
            mechanism.zero_grad()
            inputs = [x.detach().requires_grad_() for x in (q, k, v)]
            masks = {"part": part} if results else {"key_mask": mask, "segments": numbers}
            out = mechanism(*map(cut, inputs), causal=causal, **masks)
            (out * cut(weight)).sum().backward()
            found = [torch.zeros_like(x) if x.grad is None else x.grad for x in (*inputs, *mechanism.parameters())]
            for gradient in found if results else []:
                dist.all_reduce(gradient)  # each process knows what its own rows contribute
            results.append([out if results else own(out), *found])
        for whole, mine in zip(*results, strict=True):
            torch.testing.assert_close(mine, whole, rtol=1e-7, atol=1e-7)


def multipole_fetches_blocks():
    """Of a long sequence, less is sent than the keys and values that a process holds; the output is the same."""
    rank, length = dist.get_rank(), 2048
    torch.manual_seed(0)
    mechanism = hf_rfattn.build_mechanism("multipole", num_heads=2, head_dim=16, global_tokens=0)
    q, k, v = (2 * x for x in torch.randn(3, 1, 2, 2 * length, 16))
    mine = [x.narrow(2, rank * length, length) for x in (q, k, v)]
    with SentBytes() as counter:
        out = mechanism(*mine, part=Part(dist.group.WORLD, rank, 2, length))
    torch.testing.assert_close(out, mechanism(q, k, v).narrow(2, rank * length, length), rtol=1e-5, atol=1e-5)
    assert 0 < counter.total < mine[1].nbytes + mine[2].nbytes


def test_multipole_fetches_blocks(two):
    two(multipole_fetches_blocks)


def masked_lm(**changes):
    return _with_head(transformers.BertForMaskedLM, tiny_bert(**changes))


def classifier(**changes):
    return _with_head(transformers.BertForSequenceClassification, tiny_bert(num_labels=3, **changes))


def _with_head(cls, body):
    return cls(body.config).eval()


MODELS = {"bert": masked_lm, "gpt2": tiny_gpt2, "llama": tiny_llama, "classifier": classifier}
# Small enough for tiny sequences to be divided.
OPTIONS = {
    "band": {"bandwidth": 7},
    "fmm": {"bandwidth": 7},
    "multipole": {"exact_keys": 16, "block": 4, "tile": 8},
    "rff": {"num_features": 512},  # fewer amplify rounding errors, since the features are signed
}


def patched(kind, name, **options):
    torch.manual_seed(0)
    return hf_rfattn.patch_model(lively(MODELS[kind]()), name, **OPTIONS.get(name, {}) | options)


def shard(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some mechanisms gather the sequence
        return hf_rfattn.shard_sequence(model, dist.group.WORLD, **options)


def batch_for(kind, length, padding=None):
    """Two sequences; the second is padded, so much that whole parts are padding."""
    torch.manual_seed(1)
    ids = torch.randint(1, 50, (2, length))
    labels = ids.clone() if kind != "classifier" else torch.tensor([0, 2])
    batch = {"input_ids": ids, "labels": labels}
    if padding:
        mask = torch.ones_like(ids)
        short = slice(None, -length // 4) if padding == "left" else slice(length // 4, None)
        mask[1, short] = 0
        batch["attention_mask"] = mask
        if kind != "classifier":
            labels[mask == 0] = -100
    return batch


def same_training(kind, name, batch, options=None, steps=3, checkpointing=False, gather=None):
    """Loss, logits, gradients and weights after some steps of a sharded model, beside those of one process."""
    whole = patched(kind, name, **options or {}).train()
    single = copy.deepcopy(whole)
    sharded = DistributedDataParallel(shard(whole, gather=gather))
    if checkpointing:
        whole.gradient_checkpointing_enable()
    results = []
    for model in (single, sharded):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        found = []
        for _ in range(steps):
            optimizer.zero_grad()
            out = model(**batch)
            out.loss.backward()
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
            found += [out.loss.detach(), *gradients]
            optimizer.step()
        results.append((found, out.logits))
    for alone, mine in zip(results[0][0], results[1][0], strict=True):
        close(mine, alone)
    alone, mine = results[0][1], results[1][1]
    if mine.shape != alone.shape:
        start = dist.get_rank() * mine.shape[1]
        alone = alone[:, start : start + mine.shape[1]]
        mine = mine[:, : alone.shape[1]]
    close(mine, alone)


def close(mine, alone):
    """To 1e-5 of the largest number."""
    atol = 1e-5 * max(1.0, float(alone.abs().max()))
    torch.testing.assert_close(mine, alone, rtol=0, atol=atol, check_dtype=False)


@every_mechanism
@pytest.mark.parametrize("kind", MODELS)
def test_models(ranks, kind, variant):
    """Odd lengths, padding on either side, parts that are all padding."""
    for length, padding in ((37, None), (38, "right"), (41, "left")):
        ranks(same_training, kind, variant[0], batch_for(kind, length, padding))


def packed(length):
    """Three sequences in each row, without padding."""
    batch = batch_for("gpt2", length)
    starts = torch.tensor([0, length // 5, length // 5 * 4])
    positions = torch.arange(length)
    positions = positions - starts[torch.searchsorted(starts, positions, right=True) - 1]
    return batch | {"position_ids": positions.expand(2, -1), "use_cache": False}  # with a cache, nothing is packed


@every_mechanism
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_packed_sequences(ranks, kind, variant):
    ranks(same_training, kind, variant[0], packed(43))


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("favor+", {"layers": [0]}),  # the other stays softmax
        ("band", {"bandwidth": 30}),  # wider than a part
        ("band", {"bandwidth": 3, "global_tokens": 2}),
        ("fmm", {"bandwidth": 30, "normalizer": "joint"}),
        ("fmm", {"bandwidth": 4, "far": ("elu", "elu-")}),
    ],
)
def test_softmax_layers_and_wide_bands(two, kind, name, options):
    two(same_training, kind, name, batch_for(kind, 41, "left"), options)
    if kind in ("gpt2", "llama"):
        two(same_training, kind, name, packed(43), options)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", ["favor+", "fmm"])
def test_gradient_checkpointing_and_gathered_outputs(two, kind, name):
    batch = batch_for(kind, 38, "right")
    two(same_training, kind, name, batch, None, 2, True)
    two(same_training, kind, name, batch, None, 1, False, True)


def two_passes_before_backward():
    """Each pass has masks of its own, also when gradient checkpointing runs its layers again."""
    batches = [batch_for("gpt2", 38, "right"), batch_for("gpt2", 38, "left"), batch_for("gpt2", 21)]
    whole = patched("gpt2", "fmm").train()
    single = copy.deepcopy(whole)
    shard(whole).gradient_checkpointing_enable()
    for model in (single, DistributedDataParallel(whole)):
        sum(model(**batch).loss for batch in batches).backward()
    for alone, mine in zip(single.parameters(), whole.parameters(), strict=True):
        close(mine.grad, alone.grad)


def test_two_passes_before_backward(two):
    two(two_passes_before_backward)


def other_models():
    """RoBERTa numbers positions by its tokens; answers to questions need the logits of all positions."""
    sizes = dict(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=160, pad_token_id=1,
    )  # fmt: skip
    spans = {"start_positions": torch.tensor([3, 30]), "end_positions": torch.tensor([5, 33])}
    tokens = torch.randint(2, 50, (2, 37), generator=torch.Generator().manual_seed(0))
    tokens[1, 35:] = 1
    inputs = {"input_ids": tokens, "attention_mask": (tokens != 1).long()}
    labels, classes = {"labels": tokens % 5}, {"labels": tokens[:, 0] % 2}
    for cls, config, targets in [
        (transformers.RobertaForQuestionAnswering, transformers.RobertaConfig(**sizes), spans),
        (transformers.RobertaForTokenClassification, transformers.RobertaConfig(**sizes, num_labels=5), labels),
        (transformers.DistilBertForMaskedLM, transformers.DistilBertConfig(**sizes), {"labels": tokens}),
        (transformers.ElectraForSequenceClassification, transformers.ElectraConfig(**sizes), classes),
        (transformers.AlbertModel, transformers.AlbertConfig(**sizes), {}),
        (transformers.GPTNeoXForSequenceClassification, transformers.GPTNeoXConfig(**sizes), classes),
        (transformers.Qwen3ForCausalLM, transformers.Qwen3Config(**sizes, num_key_value_heads=2), {"labels": tokens}),
    ]:  # fmt: skip
        torch.manual_seed(0)
        whole = hf_rfattn.patch_model(lively(cls(config).eval()), "fmm", bandwidth=5)
        single = copy.deepcopy(whole)
        shard(whole)
        alone, mine = single(**inputs, **targets), whole(**inputs, **targets)
        assert list(alone) == list(mine) or "past_key_values" in alone
        for key, value in mine.items():
            reference = alone[key]
            if value.shape != reference.shape:
                start = dist.get_rank() * value.shape[1]
                reference = reference[:, start : start + value.shape[1]]
            close(value[:, : reference.shape[1]] if value.ndim > 1 else value, reference)


def test_other_models(two):
    two(other_models)


def mesh_of_two_dimensions(wrap):
    """Two sequences a process and two parts a sequence; DDP or FSDP2 over all four processes."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    whole = patched("llama", "fmm").train()
    single = copy.deepcopy(whole)
    with pytest.raises(ValueError, match=r"dp.*cp"):
        hf_rfattn.shard_sequence(whole, mesh)
    hf_rfattn.shard_sequence(whole, mesh["cp"])
    if wrap == "accelerate":  # its ParallelismConfig(cp_size=2) takes the masks away from attention modules
        _attach_context_parallel_hooks(whole)
    if wrap != "fsdp2":
        model = DistributedDataParallel(whole)
    else:
        for layer in whole.model.layers:
            torch.distributed.fsdp.fully_shard(layer)
        model = torch.distributed.fsdp.fully_shard(whole)
    batch = {name: torch.cat([x, x.flip(0) + 0]) for name, x in batch_for("llama", 37).items()}
    first = 2 * mesh["dp"].get_local_rank()
    mine = {name: x[first : first + 2] for name, x in batch.items()}
    loss = model(**mine).loss
    loss.backward()
    single(**batch).loss.backward()
    for alone, theirs in zip(single.parameters(), whole.parameters(), strict=True):
        gradient = theirs.grad.full_tensor() if wrap == "fsdp2" else theirs.grad
        close(gradient, alone.grad)


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2", "accelerate"])
def test_with_data_parallelism(four, wrap):
    four(mesh_of_two_dimensions, wrap)


@pytest.fixture(scope="module")
def four():
    group = Ranks(4)
    yield group
    group.close()


def refusals():
    model = patched("gpt2", "favor+")
    with pytest.raises(ValueError, match="must be a DeviceMesh"):
        hf_rfattn.shard_sequence(model, 2)
    with pytest.raises(ValueError, match="not patched"):
        hf_rfattn.shard_sequence(tiny_gpt2(), dist.group.WORLD)
    bart = hf_rfattn.patch_model(transformers.BartModel(_bart()), "favor+")
    with pytest.raises(NotImplementedError, match="one stack of layers"):
        hf_rfattn.shard_sequence(bart, dist.group.WORLD)
    opt = transformers.OPTConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=1, ffn_dim=48, num_attention_heads=4, word_embed_proj_dim=32
    )
    opt = hf_rfattn.patch_model(transformers.OPTModel(opt), "favor+")
    ids = torch.arange(1, 9)[None]
    with pytest.raises(ValueError, match="pass position_ids"):
        hf_rfattn.shard_sequence(opt, dist.group.WORLD)(ids)
    shard(model)
    with pytest.raises(NotImplementedError, match="cannot generate"):
        model.generate(ids, max_new_tokens=2, pad_token_id=0)
    with pytest.raises(NotImplementedError, match="2D attention_mask"):
        model(ids, attention_mask=torch.ones(1, 1, 8, 8))
    with pytest.raises(ValueError, match="logits_to_keep"):
        model(ids, labels=ids, logits_to_keep=1)
    with pytest.raises(ValueError, match="'sdpa' now"):
        model.set_attn_implementation("sdpa")
        model(ids)
    model.set_attn_implementation("hf_rfattn")
    with pytest.warns(UserWarning, match=r"1 attention modules \(softmax\) gather.*transformer\.h\.1\.attn"):
        hf_rfattn.shard_sequence(patched("gpt2", "favor+", layers=[0]), dist.group.WORLD)
    hf_rfattn.shard_sequence(model, None)
    assert torch.equal(model(ids).logits, patched("gpt2", "favor+")(ids).logits)
    assert model.generate(ids, max_new_tokens=2, pad_token_id=0).shape == (1, 10)


def _bart():
    return transformers.BartConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
    )  # fmt: skip


def test_refusals_warnings_and_undoing(two):
    two(refusals)


def die_or_fail():
    model = shard(patched("gpt2", "favor+"))
    if dist.get_rank() == 1:
        os._exit(3)
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Process 0 of 2 that share a sequence lost the others"):
        for _ in range(10):
            model(**batch_for("gpt2", 37)).loss.backward()
    return time.monotonic() - start


def test_a_process_that_dies_ends_the_others():
    group = Ranks(2, seconds=20)
    with pytest.raises(AssertionError, match=r"^rank 1: it has ended$"):
        group(die_or_fail)
