"""PEFT adapters of patched models: they say what they were trained on, and load onto nothing else."""

import copy
import json
import subprocess
import sys
import warnings

import pytest
import torch
from peft import AutoPeftModelForCausalLM, LoraConfig, PeftConfig, PeftModel, PromptTuningConfig, get_peft_model
from support.models import altered, hidden, ids, tiny_gpt2, tiny_llama
from transformers import AutoModelForCausalLM, CLIPConfig, CLIPModel, LlavaConfig, LlavaForConditionalGeneration

from hf_rfattn import FmmConfig, patch_model, redraw, unpatch_model

VARIANTS = {
    "favor+": ("favor+", {}),
    "optimal": ("favor+", {"variance": "optimal"}),
    "hedgehog": ("hedgehog", {}),
    "fmm": (FmmConfig(bandwidth=3, far=("favor+", "elu")), {}),
    "layers": ("rff", {"layers": [1]}),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)


def lora(**options):
    return LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False, **options)


def gpt2():
    """The same weights every time, large enough for attention to matter."""
    torch.manual_seed(0)
    model = tiny_gpt2()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5)
    return model


def trained(model, config):
    """Adapter and what is saved with it, somewhere else than where they started."""
    model = get_peft_model(model, config)
    with torch.no_grad():
        for p in model.parameters():
            if p.requires_grad:
                p.add_(0.1)
    return model.eval()


def assert_same_output(a, b):
    tokens = ids()
    torch.testing.assert_close(hidden(a.eval(), input_ids=tokens), hidden(b.eval(), input_ids=tokens))


def record(folder):
    return json.loads((folder / "adapter_config.json").read_text()).get("hf_rfattn")


@every_variant
@pytest.mark.parametrize("saved", [None, ["rf"]], ids=["frozen", "trained"])
def test_an_adapter_patches_its_base(variant, saved, tmp_path):
    tuned = trained(patch_model(gpt2(), variant[0], **variant[1], seed=7), lora(modules_to_save=saved))
    tuned.save_pretrained(tmp_path)
    assert record(tmp_path)["patched"][""]["seed"] == 7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = PeftModel.from_pretrained(gpt2(), tmp_path)
    assert_same_output(tuned, again)
    # and so does every other way to load it
    gpt2().save_pretrained(tmp_path / "base")
    document = json.loads((tmp_path / "adapter_config.json").read_text())
    document.update(base_model_name_or_path=str(tmp_path / "base"), task_type="CAUSAL_LM")
    (tmp_path / "adapter_config.json").write_text(json.dumps(document))
    assert_same_output(tuned, AutoPeftModelForCausalLM.from_pretrained(tmp_path))
    inside = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert_same_output(tuned, inside)
    inside.save_pretrained(tmp_path / "twice")  # the adapter alone, by transformers
    assert record(tmp_path / "twice") == record(tmp_path)
    assert_same_output(tuned, PeftModel.from_pretrained(gpt2(), tmp_path / "twice"))


@pytest.mark.parametrize("saved", [None, ["rf"]], ids=["frozen", "trained"])
def test_an_adapter_on_a_patched_checkpoint(saved, tmp_path):
    altered(patch_model(gpt2(), "hedgehog")).save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = trained(base, lora(modules_to_save=saved, task_type="CAUSAL_LM"))
    tuned.save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert_same_output(tuned, PeftModel.from_pretrained(base, tmp_path / "adapter"))
    assert_same_output(tuned, AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter"))
    assert_same_output(tuned, AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"))
    half = AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.bfloat16)
    PeftModel.from_pretrained(half, tmp_path / "adapter")  # rounded, but the same


def test_a_later_draw_comes_back(tmp_path):
    tuned = trained(redraw(redraw(patch_model(gpt2(), "favor+", redraw_interval=5))), lora())
    tuned.save_pretrained(tmp_path)
    assert_same_output(tuned, PeftModel.from_pretrained(gpt2(), tmp_path))


def refuses(base, folder, message, **options):
    before = copy.deepcopy(base.state_dict())
    with pytest.raises(ValueError, match=message):
        PeftModel.from_pretrained(base, folder, **options)
    assert base.state_dict().keys() == before.keys() and all(
        torch.equal(x, before[n]) for n, x in base.state_dict().items()
    )


def test_mechanisms_that_are_lost_are_missed(tmp_path):
    """They were trained before, and neither the adapter nor the base has them."""
    tuned = trained(altered(patch_model(gpt2(), "hedgehog")), lora())
    tuned.save_pretrained(tmp_path)
    refuses(gpt2(), tmp_path, r"mechanisms .*other values.*modules_to_save")
    refuses(patch_model(gpt2(), "hedgehog"), tmp_path, "mechanisms .*other values")
    assert_same_output(tuned, PeftModel.from_pretrained(altered(patch_model(gpt2(), "hedgehog")), tmp_path))


def test_another_patch_is_refused(tmp_path):
    trained(patch_model(gpt2(), "favor+"), lora()).save_pretrained(tmp_path)
    for options in ({"seed": 1}, {"layers": [0]}, {"num_features": 4}):
        refuses(patch_model(gpt2(), "favor+", **options), tmp_path, "different patch")
    switched = patch_model(gpt2(), "favor+")
    switched.set_attn_implementation("sdpa")
    refuses(switched, tmp_path, r"set_attn_implementation\('hf_rfattn'\)")
    refuses(tiny_gpt2(n_layer=1), tmp_path, "layer")


def test_other_adapters_are_left_alone(tmp_path):
    trained(patch_model(gpt2(), "favor+"), lora()).save_pretrained(tmp_path)
    model = trained(gpt2(), lora())
    expected = hidden(model, input_ids=(tokens := ids()))
    with pytest.raises(ValueError, match="other adapters"):
        model.load_adapter(tmp_path, "second")
    assert torch.equal(hidden(model, input_ids=tokens), expected)


def test_two_adapters_on_one_base(tmp_path):
    first = trained(patch_model(gpt2(), "favor+"), lora(modules_to_save=["rf"]))
    second = trained(patch_model(gpt2(), "favor+"), lora())
    first.save_pretrained(tmp_path / "first"), second.save_pretrained(tmp_path / "second")
    model = PeftModel.from_pretrained(gpt2(), tmp_path / "first")
    model.load_adapter(tmp_path / "second", "second")
    assert_same_output(first, model)
    model.set_adapter("second")
    assert_same_output(second, model)


def test_softmax_adapters_are_as_they_were(tmp_path):
    tuned = trained(gpt2(), lora())
    tuned.save_pretrained(tmp_path)
    assert record(tmp_path) is None
    assert_same_output(tuned, PeftModel.from_pretrained(gpt2(), tmp_path))
    switched = patch_model(gpt2(), "favor+")
    switched.set_attn_implementation("sdpa")
    trained(switched, lora()).save_pretrained(tmp_path)
    assert record(tmp_path) is None


def test_a_config_is_not_a_carrier(tmp_path):
    """The same options for another model do not patch it, and what is saved is what the model is then."""
    config = lora()
    tuned = trained(patch_model(gpt2(), "favor+"), config)
    tuned.save_pretrained(tmp_path / "patched")
    other = trained(gpt2(), config)
    other.save_pretrained(tmp_path / "other")
    assert record(tmp_path / "other") is None
    unpatch_model(tuned).save_pretrained(tmp_path / "unpatched")
    assert record(tmp_path / "unpatched") is None
    patch_model(tuned, "linear").save_pretrained(tmp_path / "again")
    assert record(tmp_path / "again")["patched"][""]["layers"]["0-1"]["mechanism"] == "linear"
    PeftConfig.from_pretrained(tmp_path / "patched").save_pretrained(tmp_path / "copy")
    assert record(tmp_path / "copy") == record(tmp_path / "patched")


def test_prompts(tmp_path):
    config = PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM", num_layers=2, token_dim=32)
    tuned = trained(patch_model(gpt2(), "favor+"), config)
    tuned.save_pretrained(tmp_path)
    assert_same_output(tuned, PeftModel.from_pretrained(gpt2(), tmp_path))


def test_a_model_inside_a_model(tmp_path):
    def llava():
        torch.manual_seed(0)
        vision = {
            "model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 48, "image_size": 32, "patch_size": 16, "projection_dim": 32,
        }  # fmt: skip
        config = LlavaConfig(text_config=tiny_llama().config, vision_config=vision, image_token_index=49)
        return LlavaForConditionalGeneration(config).eval()

    model = llava()
    patch_model(model.model.language_model, "favor+", seed=3)
    tuned = trained(model, LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    tuned.save_pretrained(tmp_path)
    assert list(record(tmp_path)["patched"]) == ["model.language_model"]
    again = PeftModel.from_pretrained(llava(), tmp_path).eval()
    tokens = torch.randint(1, 49, (1, 9))
    torch.testing.assert_close(tuned(input_ids=tokens).logits, again(input_ids=tokens).logits)


def test_low_memory_says_what_to_do(tmp_path):
    trained(patch_model(gpt2(), "hedgehog"), lora()).save_pretrained(tmp_path)
    refuses(gpt2(), tmp_path, "low_cpu_mem_usage", low_cpu_mem_usage=True)
    base = patch_model(gpt2(), "hedgehog")
    PeftModel.from_pretrained(base, tmp_path, low_cpu_mem_usage=True)


def change_record(folder, change):
    path = folder / "adapter_config.json"
    document = json.loads(path.read_text())
    document["hf_rfattn"] = change(document["hf_rfattn"])
    path.write_text(json.dumps(document))


@pytest.mark.parametrize(
    "damaged",
    [
        {"patched": {"": {"format": 9}}},
        {"patched": {"": None}},
        {"patched": {}},
        {"patched": [1]},
        {"draws": -1},
        {"draws": "many"},
        {"mechanisms": {"feature_map.projection": "xyz"}},
        {"mechanisms": {"feature_map.projection": [1.0]}},
        {"mechanisms": 3},
        {},
        [],
        "favor+",
    ],
    ids=str,
)
def test_records_that_make_no_sense(tmp_path, damaged):
    trained(patch_model(gpt2(), "favor+"), lora()).save_pretrained(tmp_path)
    change_record(tmp_path, lambda r: {**r, **damaged} if damaged and isinstance(damaged, dict) else damaged)
    refuses(gpt2(), tmp_path, "is invalid")


def test_a_model_of_another_shape(tmp_path):
    trained(patch_model(gpt2(), "favor+"), lora()).save_pretrained(tmp_path)
    change_record(tmp_path, lambda r: {**r, "patched": {"nowhere": r["patched"][""]}})
    refuses(gpt2(), tmp_path, "cannot be loaded.*nowhere")


ORDERS = {
    "plugin first": "import hf_rfattn\nfrom peft import PeftModel",
    "peft first": "from peft import PeftModel\nimport hf_rfattn",
    "no plugin": "from peft import PeftModel",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_order_of_imports(order, tmp_path):
    trained(patch_model(gpt2(), "favor+"), lora()).save_pretrained(tmp_path)
    gpt2().save_pretrained(tmp_path / "base")
    code = f"""
import sys
{order}
from transformers import AutoModelForCausalLM
model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/base"), sys.argv[1])
print(model.config._attn_implementation)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True)
    if "hf_rfattn" in order:
        assert done.stdout.strip() == "hf_rfattn", done.stderr
    else:  # all that can be done from here: PEFT's warning names this package
        assert "['hf_rfattn']" in done.stderr and done.stdout.strip() == "sdpa"


def test_clip(tmp_path):
    def clip():
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        vision = {**sizes, "image_size": 32, "patch_size": 16}
        return CLIPModel(CLIPConfig(text_config={**sizes, "vocab_size": 50}, vision_config=vision)).eval()

    tuned = trained(patch_model(clip(), "linear"), LoraConfig(r=2, target_modules=["q_proj"]))
    tuned.save_pretrained(tmp_path)
    assert sorted(record(tmp_path)["patched"]) == ["text_model", "vision_model"]
    again = PeftModel.from_pretrained(clip(), tmp_path).eval()
    inputs = {"input_ids": ids(), "pixel_values": torch.randn(2, 3, 32, 32)}
    torch.testing.assert_close(tuned(**inputs).logits_per_text, again(**inputs).logits_per_text)
