"""Patched checkpoints: saved, reloaded exactly, refused where they make no sense."""

import json
import shutil
import subprocess
import sys

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from support.models import MODELS, altered, assert_same_model, hidden, ids, mechanisms, tiny_bart, tiny_bert, tiny_llama
from support.variants import every_variant
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Trainer,
    TrainingArguments,
)

from hf_rfattn import FmmConfig, patch_model, redraw, unpatch_model
from hf_rfattn.features.maps import RandomFeatures
from hf_rfattn.integration.spec import PatchSpec


def auto(family):
    return AutoModel if family == "bert" else AutoModelForCausalLM


@pytest.fixture
def saved(tmp_path):
    model = altered(patch_model(tiny_bert(), "favor+", seed=7))
    model.save_pretrained(tmp_path)
    return model, tmp_path


def edit(folder, change):
    path = folder / "config.json"
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))


@every_variant
@pytest.mark.parametrize("family", MODELS)
def test_round_trip(family, variant, tmp_path):
    model = altered(patch_model(MODELS[family](), variant[0], **variant[1], seed=7))
    for m in model.modules():
        if isinstance(m, RandomFeatures):
            m.draws.fill_(3)
            m.steps.fill_(2)
    model.save_pretrained(tmp_path)
    assert not list(tmp_path.glob("*.bin"))
    again = auto(family).from_pretrained(tmp_path)
    assert_same_model(model, again, input_ids=ids())
    assert again.config.to_dict()["rfattn"] == model.config.rfattn
    again.save_pretrained(tmp_path / "twice")
    assert_same_model(model, auto(family).from_pretrained(tmp_path / "twice"), input_ids=ids())
    # what was loaded can be redrawn, switched and unpatched like any other
    if any(isinstance(m, RandomFeatures) for m in again.modules()):
        redraw(again), redraw(model)
        assert_same_model(model, again, input_ids=ids())
    unpatch_model(model), unpatch_model(again)
    assert_same_model(model, again, input_ids=ids())
    with pytest.raises(ValueError, match="no L × L"):
        auto(family).from_pretrained(tmp_path)(input_ids=ids(), output_attentions=True)


def test_nothing_is_drawn_on_loading(saved, monkeypatch):
    model, folder = saved
    monkeypatch.setattr(RandomFeatures, "sample", lambda self, generator: pytest.fail("a projection was drawn"))
    assert_same_model(model, AutoModel.from_pretrained(folder), input_ids=ids())


def test_sharded_files(tmp_path):
    model = altered(patch_model(tiny_llama(), "fmm", bandwidth=3))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert_same_model(model, AutoModelForCausalLM.from_pretrained(tmp_path), input_ids=ids())


def test_other_heads_on_the_same_backbone(saved):
    model, folder = saved
    for head in (AutoModelForSequenceClassification, AutoModelForMaskedLM):
        other = head.from_pretrained(folder)
        backbone = other.bert
        for name, tensor in model.state_dict().items():
            if "pooler" not in name:
                assert torch.equal(tensor, backbone.state_dict()[name])
        assert len(mechanisms(other)) == 2
        assert other(input_ids=ids()).logits is not None


def test_other_sizes_still_follow_the_rule_of_transformers(saved):
    _, folder = saved
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        AutoModel.from_pretrained(folder, vocab_size=51)
    assert AutoModel.from_pretrained(folder, vocab_size=51, ignore_mismatched_sizes=True).config.vocab_size == 51


def test_low_memory_and_device_map(saved):
    model, folder = saved
    assert_same_model(model, AutoModel.from_pretrained(folder, device_map="cpu"), input_ids=ids())
    assert_same_model(model, AutoModel.from_pretrained(folder, device_map={"": "cpu"}), input_ids=ids())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dtypes(saved, dtype, tmp_path_factory):
    model, folder = saved
    half = AutoModel.from_pretrained(folder, dtype=dtype)
    assert all(x.dtype == dtype for x in half.state_dict().values() if x.is_floating_point())
    torch.testing.assert_close(
        hidden(half, input_ids=(t := ids())).float(), hidden(model, input_ids=t), rtol=0.1, atol=0.1
    )
    other = tmp_path_factory.mktemp("half")
    half.save_pretrained(other)
    assert_same_model(half, AutoModel.from_pretrained(other), input_ids=ids())  # in the dtype it was saved in


def test_mappings_and_encoder_decoder(tmp_path):
    model = altered(
        patch_model(tiny_bert(num_hidden_layers=4), {"0-1": "favor+", 3: FmmConfig(bandwidth=2, far=("elu", "elu-"))})
    )
    model.save_pretrained(tmp_path / "bert")
    assert_same_model(model, AutoModel.from_pretrained(tmp_path / "bert"), input_ids=ids())
    for cross in (False, True):
        bart = altered(patch_model(tiny_bart(), "favor+", cross_attention=cross))
        bart.save_pretrained(tmp_path / f"bart{cross}")
        again = AutoModel.from_pretrained(tmp_path / f"bart{cross}")
        assert_same_model(bart, again, input_ids=ids(), decoder_input_ids=ids(2, 9))


def test_a_stack_with_fewer_layers_than_the_other(tmp_path):
    model = tiny_bart()
    config = model.config.__class__.from_dict(model.config.to_dict() | {"encoder_layers": 3, "decoder_layers": 1})
    model = altered(patch_model(type(model)(config).eval(), "linear"))
    model.save_pretrained(tmp_path)
    assert_same_model(model, AutoModel.from_pretrained(tmp_path), input_ids=ids(), decoder_input_ids=ids(2, 9))


def test_a_model_inside_a_model(tmp_path):
    """A vision-language model: the text model's config is nested, and says for itself what was patched."""
    config = LlavaConfig(
        text_config=tiny_llama().config,
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "image_size": 32, "patch_size": 16, "projection_dim": 32,
        },
        image_token_index=49,
    )  # fmt: skip
    model = altered(patch_model(LlavaForConditionalGeneration(config).eval(), "favor+"))
    assert len(mechanisms(model)) == 4
    model.save_pretrained(tmp_path)
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path)
    assert_same_model(model, again, input_ids=torch.randint(1, 49, (1, 9)))


def test_trainer_checkpoint(tmp_path):
    model = AutoModelForSequenceClassification.from_config(tiny_bert().config)
    patch_model(model, "favor+", redraw_interval=2)
    data = [{"input_ids": ids(1, 20)[0], "labels": i % 2} for i in range(16)]
    arguments = TrainingArguments(
        tmp_path,
        max_steps=5,
        save_steps=5,
        per_device_train_batch_size=4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=data).train()
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-5")
    assert_same_model(model.eval(), again, input_ids=ids())
    maps = [m for m in again.modules() if isinstance(m, RandomFeatures)]
    assert maps and all(int(m.draws) == 2 and m.redraw_interval == 2 for m in maps)


def test_from_config_is_patched_too(saved):
    model, _ = saved
    fresh = AutoModel.from_config(model.config)
    assert len(mechanisms(fresh)) == 2 and torch.isfinite(hidden(fresh.eval(), input_ids=ids())).all()


# --- never softmax in silence ----------------------------------------------------------------------------------------


def run(code, *arguments):
    return subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)


def test_without_the_plugin_loading_fails_by_name(saved):
    _, folder = saved
    result = run("import sys; from transformers import AutoModel; AutoModel.from_pretrained(sys.argv[1])", folder)
    assert result.returncode != 0 and "hf_rfattn" in result.stderr.splitlines()[-1] and "ValueError" in result.stderr


def test_the_plugin_is_enough(saved):
    _, folder = saved
    code = """
import sys, hf_rfattn
from transformers import AutoModel
print(AutoModel.from_pretrained(sys.argv[1]).config.rfattn["seed"])
"""
    assert run(code, folder).stdout.strip() == "7"


def test_asking_for_softmax_by_name_is_softmax_with_a_warning(saved):
    model, folder = saved
    for load in (AutoModel.from_pretrained, BertModel.from_pretrained):
        with pytest.warns(UserWarning, match="makes it softmax again"):
            softmax = load(folder, attn_implementation="sdpa")
        tokens = ids()
        patched = hidden(model, input_ids=tokens)
        assert not torch.allclose(hidden(softmax, input_ids=tokens), patched)
        softmax.set_attn_implementation("hf_rfattn")
        assert torch.equal(hidden(softmax, input_ids=tokens), patched)


def test_a_lost_key_does_not_lose_the_mechanisms(saved):
    model, folder = saved
    edit(folder, lambda c: c.pop("attn_implementation"))
    for load in (AutoModel.from_pretrained, BertModel.from_pretrained):
        assert_same_model(model, load(folder), input_ids=ids())


# --- documents and files that make no sense --------------------------------------------------------------------------


def change_spec(**changes):
    return lambda config: config["rfattn"].update(changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_spec(format=2), "format 2 of hf_rfattn; this version reads up to 1"),
        (change_spec(format=None), "no format version"),
        (change_spec(layers={"0-1": {"mechanism": "their-own"}}), "Unknown attention 'their-own'.*import that package"),
        (change_spec(layers={"0-9": {"mechanism": "favor+"}}), "patches layer 2, which this model does not have"),
        (change_spec(layers={"0-1": {"mechanism": "favor+", "num_features": 99}}), "ignore_mismatched_sizes"),
        (change_spec(layers={"0-1": {"mechanism": "favor+", "hadamard": 1}}), "no option 'hadamard'"),
        (change_spec(layers={"0-1": {"mechanism": "fmm"}}), "mechanism tensors"),
        (change_spec(layers={"0": {"mechanism": "favor+"}}), "mechanism tensors that its config does not describe"),
        (change_spec(layers={}), "which layers are patched"),
        (change_spec(layers={"0-99999999999": {"mechanism": "favor+"}}), "10000 or more"),
        (change_spec(seed="7"), "integer seed"),
        (lambda c: c.update(rfattn=[1]), "must be a JSON object"),
    ],
)
def test_documents_that_make_no_sense(saved, change, message):
    _, folder = saved
    edit(folder, change)
    with pytest.raises((ValueError, RuntimeError), match=message):
        AutoModel.from_pretrained(folder)


def test_missing_and_extra_tensors(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    tensors = load_file(path)
    name = next(n for n in tensors if ".rf." in n and n.endswith("projection"))
    save_file({n: t for n, t in tensors.items() if n != name}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"lacks 1 mechanism tensors, such as {name}"):
        AutoModel.from_pretrained(folder)
    save_file(tensors | {name.replace("projection", "secret"): torch.zeros(2)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="that its config does not describe"):
        AutoModel.from_pretrained(folder)
    save_file(tensors | {name: tensors[name][:, :3].contiguous()}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="of the wrong shape"):
        AutoModel.from_pretrained(folder, ignore_mismatched_sizes=True)


def test_truncated_and_corrupted_files(saved):
    _, folder = saved
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\x00" * len(whole), whole[:100]):
        path.write_bytes(damaged)
        with pytest.raises(Exception, match=r"(?i)safetensor|header|deserializ|incomplete|corrupt|invalid"):
            AutoModel.from_pretrained(folder)
    path.unlink()
    with pytest.raises(OSError):
        AutoModel.from_pretrained(folder)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
OPTION = st.sampled_from(
    ["num_features", "projection", "kernel", "far", "bandwidth", "normalizer", "antithetic", "form"]
)
MECHANISM = st.builds(
    lambda name, options: {"mechanism": name, **options},
    st.sampled_from(["favor+", "rff", "fmm", "band", "linear", "hedgehog", "average", "nothing"]) | JSON,
    st.dictionaries(OPTION, JSON | st.sampled_from(["iid", "relu", "joint", 4, 8, ["elu"]]), max_size=2),
)
LAYERS = st.sampled_from(["0", "0-1", "1", "7", "x", "1-0"]) | st.text(max_size=5)
SPEC = st.fixed_dictionaries(
    {},
    optional={
        "format": st.just(1) | JSON,
        "seed": st.integers(-5, 5) | JSON,
        "cross_attention": st.booleans() | JSON,
        "softmax": st.just("sdpa") | JSON,
        "layers": st.dictionaries(LAYERS, MECHANISM | JSON, max_size=2) | JSON,
    },
)  # fmt: skip


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(spec=SPEC | JSON)
def test_every_document_loads_or_raises_value_error(spec):
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 8,
        "vocab_size": 9,
    }
    config = BertConfig(**sizes, max_position_embeddings=16)
    config.rfattn = json.loads(json.dumps(spec))
    config._attn_implementation = "hf_rfattn"
    try:
        BertModel(config)
    except ValueError:
        return
    if spec is not None:
        PatchSpec.from_dict(spec)  # what loads is a document that makes sense


def test_a_folder_can_be_moved(saved, tmp_path_factory):
    model, folder = saved
    other = tmp_path_factory.mktemp("elsewhere") / "model"
    shutil.move(folder, other)
    assert_same_model(model, AutoModel.from_pretrained(other), input_ids=ids())
