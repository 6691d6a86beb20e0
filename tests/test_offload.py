"""Layers whose weights accelerate keeps elsewhere and brings in for each call."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from support.models import tiny_llama
from support.variants import every_mechanism, every_variant

from hf_rfattn import patch_model


def check(model, offload):
    ids = torch.randint(50, (2, 40))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    inputs, options = {"input_ids": ids, "attention_mask": mask}, {"max_new_tokens": 5, "do_sample": False}
    with torch.no_grad():
        logits, tokens = model(**inputs).logits, model.generate(**inputs, **options)
        offload(model)
        assert all(parameter.is_meta for parameter in model.parameters())
        assert torch.equal(model(**inputs).logits, logits)
        assert torch.equal(model.generate(**inputs, **options), tokens)


@every_variant
def test_offloading_to_the_cpu(variant):
    name, options = variant
    check(patch_model(tiny_llama(), name, **options), lambda model: cpu_offload(model, execution_device="cpu"))


@pytest.mark.slow
@every_mechanism
def test_offloading_to_disk(variant, tmp_path):
    name, options = variant
    check(
        patch_model(tiny_llama(), name, **options), lambda model: disk_offload(model, tmp_path, execution_device="cpu")
    )
