"""Attention transfer: what is trained, on what, that nothing else changes, and that it goes on where it was."""

import copy
from functools import partial

import pytest
import torch
from support.conversion import Torn, learnt, make_batches, same, torn
from support.models import MODELS, ids, lively, mechanisms, tiny_bart, tiny_bert, tiny_llama
from support.recipes import sample_tokenizer
from torch import distributed

from hf_rfattn import FavorConfig, attention_error, calibrate, convert, keep_exact_heads, patch_model
from hf_rfattn.conversion import batches as conversion_batches
from hf_rfattn.conversion import conversion
from hf_rfattn.conversion.heads import decisive_heads, gains_of_heads
from hf_rfattn.integration.error import mechanism_sites, run_batch, run_with_softmax
from hf_rfattn.mechanisms import Mechanism
from hf_rfattn.ops import softmax_attention

every_model = pytest.mark.parametrize("family", list(MODELS))


@every_model
def test_it_learns_and_leaves_the_rest_alone(family):
    model, batches = lively(MODELS[family]()), make_batches()
    model.train()
    next(iter(model.children())).eval()
    frozen = [p for i, p in enumerate(model.parameters()) if i % 2]
    for parameter in frozen:
        parameter.requires_grad_(False)
    before = {name: p.clone() for name, p in model.named_parameters()}
    modes = [m.training for m in model.modules()]
    dice = torch.get_rng_state()
    options = {"rounds": 1, "exact_heads": 0, "progress": False}
    report = convert(model, "hedgehog", batches, steps=60, learning_rate=0.03, **options)
    assert torch.equal(dice, torch.get_rng_state())
    assert all(a < 0.7 * b for a, b in zip(report.after.overall, report.before.overall, strict=True))
    assert report.after.overall == attention_error(model, batches[0]).overall  # the first batch, not trained on
    assert set(report.steps.values()) == {60} and report.seconds > 0
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], value) for name, value in before.items())
    assert all(p.grad is None for p in model.parameters())
    assert [p.requires_grad for p in frozen] == [False] * len(frozen)
    assert all(p.requires_grad for name, p in named.items() if ".rf." in name)
    assert modes == [m.training for name, m in model.named_modules() if ".rf" not in name]
    assert "average" in str(report) and str(report).count("\n") == 3
    assert report.to_dict()["after"]["heads"] == report.after.heads


def test_a_step_by_hand():
    """Adam on the relative error by head over valid positions, with q, k, v of the softmax model."""
    model, (batch,) = lively(tiny_bert()), make_batches(1)
    expected = copy.deepcopy(patch_model(model, "hedgehog"))
    convert(model, None, [batch], measure=batch, steps=1, learning_rate=0.1, exact_heads=0, progress=False)
    seen = {}
    softmax = copy.deepcopy(expected)
    softmax.set_attn_implementation("sdpa")
    for site in (layer.attention.self for layer in softmax.encoder.layer):
        site.register_forward_pre_hook(lambda m, args: seen.__setitem__(m, args[0]))
    softmax(**batch)
    mask = batch["attention_mask"].bool()
    for site, (module, hidden) in zip(expected.encoder.layer, seen.items(), strict=True):
        q, k, v = (
            f(hidden).view(4, 24, 4, 8).transpose(1, 2).detach() for f in (module.query, module.key, module.value)
        )
        mechanism = site.attention.self.rf
        exact, out = softmax_attention(q, k, v, key_mask=mask), mechanism(q, k, v, key_mask=mask)
        rows = mask[:, None, :, None]
        loss = (((out - exact) * rows).square().sum((0, 2, 3)) / (exact * rows).square().sum((0, 2, 3))).mean()
        optimizer = torch.optim.Adam(mechanism.parameters(), lr=0.1)
        loss.backward()
        optimizer.step()
    for name, value in learnt(expected).items():
        torch.testing.assert_close(learnt(model)[name], value, rtol=1e-4, atol=1e-4)


def test_layers_learn_apart_from_each_other():
    batches = make_batches()
    options = {"steps": 8, "end_to_end": 0, "exact_heads": 0, "progress": False}
    both, last = lively(tiny_bert()), None
    last = copy.deepcopy(both)
    convert(both, "hedgehog", batches, **options)
    convert(last, "hedgehog", batches, layers=[1], **options)
    expected = learnt(last)
    assert expected and all(".layer.1." in name for name in expected)
    assert all(torch.equal(learnt(both)[name], value) for name, value in expected.items())


def test_an_end_to_end_step_by_hand():
    """Adam on the mean of all relative errors, of outputs on what the patched layers before give."""
    model, (batch,) = lively(tiny_bert()), make_batches(1)
    expected = copy.deepcopy(patch_model(model, "hedgehog"))
    options = {"end_to_end": 1, "rounds": 1, "exact_heads": 0, "progress": False}
    convert(model, None, [batch], measure=batch, steps=1, learning_rate=0.5, **options)
    mechanisms, exact, given = list(mechanism_sites(expected)), [], []
    run_with_softmax(expected, batch, lambda mechanism, args, masks, softmax, output: exact.append(softmax))
    for mechanism in mechanisms:
        mechanism.register_forward_hook(lambda module, args, output: given.append(output))
    expected.eval()(**batch)
    rows = batch["attention_mask"].bool()[:, None, :, None]
    energies = [((a - b) * rows).square().sum((0, 2, 3)) / (b * rows).square().sum((0, 2, 3))
                for a, b in zip(given, exact, strict=True)]  # fmt: skip
    optimizer = torch.optim.Adam([p for mechanism in mechanisms for p in mechanism.parameters()], lr=0.1)
    torch.stack(energies).mean().backward()
    optimizer.step()
    for name, value in learnt(expected).items():
        torch.testing.assert_close(learnt(model)[name], value, rtol=1e-4, atol=1e-4)


def test_padding_and_packing_do_not_matter():
    """Packed rows teach what rows of their own teach, and what stands under the mask teaches nothing."""
    model = lively(tiny_llama()).double()
    rows = torch.randint(1, 50, (2, 20))
    options = {"steps": 4, "progress": False}

    def learn(batch):
        copied = copy.deepcopy(model)
        convert(copied, "fmm", [batch], measure=batch, bandwidth=3, far="hedgehog", **options)
        return learnt(copied)

    apart = learn({"input_ids": rows, "attention_mask": torch.ones_like(rows)})
    packed = learn({"input_ids": rows.reshape(1, 40), "position_ids": torch.arange(20).repeat(2)[None]})
    filler = torch.full((2, 5), 7)
    mask = torch.cat([torch.ones_like(rows), torch.zeros_like(filler)], dim=1)
    padded = learn({"input_ids": torch.cat([rows, filler], dim=1), "attention_mask": mask})
    for name, value in apart.items():
        torch.testing.assert_close(packed[name], value)
        torch.testing.assert_close(padded[name], value)


@every_model
def test_bf16(family):
    """Steps are too small for bf16: they are taken in float32, and only the end is rounded."""
    model, batches = lively(MODELS[family]()).bfloat16(), make_batches()
    report = convert(model, "hedgehog", batches, steps=60, learning_rate=0.03, progress=False)
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert all(a < 0.85 * b for a, b in zip(report.after.overall, report.before.overall, strict=True))


def test_it_goes_on_where_it_was(tmp_path):
    model, batches = lively(tiny_bert()), make_batches()
    options = {"measure": batches[0], "steps": 12, "save_every": 4, "progress": False}
    whole = copy.deepcopy(model)
    expected = convert(whole, "hedgehog", batches, **options)
    first = copy.deepcopy(model)
    with pytest.raises(Torn):
        convert(first, "hedgehog", torn(batches, 7), checkpoint=tmp_path, **options)
    again = copy.deepcopy(model)
    seen = []
    watched = (seen.append(i) or batches[i % 6] for i in range(100))
    report = convert(again, "hedgehog", watched, checkpoint=tmp_path, **options)
    assert same(learnt(whole), learnt(again)) and not same(learnt(whole), learnt(first))
    assert (report.after, report.before, report.steps) == (expected.after, expected.before, expected.steps)
    assert len(seen) == max(report.steps.values())  # those of the steps before are passed over
    third = copy.deepcopy(model)
    finished = convert(third, "hedgehog", batches, checkpoint=tmp_path, **options)
    assert same(learnt(whole), learnt(third)) and finished.steps == expected.steps
    for other in ({"steps": 13}, {"seed": 1}):
        with pytest.raises(ValueError, match=r"another conversion: its settings"):
            convert(copy.deepcopy(model), "hedgehog", batches, checkpoint=tmp_path, **{**options, **other})
    with pytest.raises(ValueError, match=r"another conversion: its error before"):
        convert(lively(tiny_bert()), "hedgehog", batches, checkpoint=tmp_path, **options)


def test_rounds_end_when_the_error_no_longer_falls(tmp_path):
    model, batches = lively(tiny_bert()), make_batches()
    options = {"measure": batches[0], "steps": 10, "end_to_end": 0.5, "progress": False}

    def learn(rounds, rate, given=batches, **further):
        learner = copy.deepcopy(model)
        report = convert(learner, "hedgehog", given, rounds=rounds, learning_rate=rate, **options, **further)
        return set(report.steps.values()), learnt(learner)

    assert learn(4, 1e-6)[0] == {15}  # the second round changes nothing
    steps, whole = learn(3, 0.1)  # every round helps
    assert steps == {20}
    with pytest.raises(Torn):
        learn(3, 0.1, torn(batches, 13), checkpoint=tmp_path, save_every=4)
    assert same(whole, learn(3, 0.1, checkpoint=tmp_path, save_every=4)[1])
    with pytest.raises(Torn):
        learn(4, 1e-6, torn(batches, 13), checkpoint=tmp_path / "stuck", save_every=4)
    assert learn(4, 1e-6, checkpoint=tmp_path / "stuck", save_every=4)[0] == {15}  # the first round counts


def test_learning_rates(monkeypatch):
    """Warm-up and decay of the layers apart, and again, at a lower rate, of each round together."""
    rates, fresh, step = [], [], torch.optim.Adam.step

    def recorded(optimizer, *arguments):
        rates.append(optimizer.param_groups[0]["lr"])
        fresh.append(not optimizer.state)
        return step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.Adam, "step", recorded)
    monkeypatch.setattr("hf_rfattn.conversion.transfer.ENOUGH", 100.0)
    options = {"end_to_end": 0.5, "rounds": 2, "learning_rate": 0.1, "exact_heads": 0, "progress": False}
    convert(tiny_bert(), "hedgehog", make_batches(2), steps=8, **options)
    apart = [0.1, 0.1, 0.1, 0.0625]
    assert rates == pytest.approx([*apart, *(0.2 * rate for rate in 2 * apart)])
    assert fresh == 3 * [True, False, False, False]


def test_gains_of_heads_are_derivatives_of_the_output_error():
    model, batch = patch_model(lively(tiny_bert()), "hedgehog"), make_batches()[0]
    mask = torch.ones_like(batch["input_ids"])
    mask[0, -5:] = 0
    batch = {**batch, "attention_mask": mask}
    sites = list(mechanism_sites(model))
    target = run_with_softmax(model, batch, lambda *_: None)[0].last_hidden_state

    def toward_softmax(head, share, mechanism, args, masks, output):
        output = output.clone()
        output[:, head] += share * (softmax_attention(*args, **masks) - output)[:, head]
        return output

    def error(mechanism, head, share):
        change = mechanism.register_forward_hook(partial(toward_softmax, head, share), with_kwargs=True)
        with torch.no_grad():
            states = run_batch(model, batch)[0].last_hidden_state
        change.remove()
        return float(((states - target).double().square() * mask[..., None]).sum())

    assert list(gains_of_heads(model, batch)) == sites
    exact = {sites[0]: [], sites[1]: [2]}
    gains = gains_of_heads(model, batch, exact)
    assert gains[sites[1]][2] == 0
    sites[1].register_forward_hook(partial(toward_softmax, 2, 1.0), with_kwargs=True)
    for mechanism, found in gains.items():
        wanted = [(error(mechanism, h, -0.01) - error(mechanism, h, 0.01)) / 0.02 for h in range(len(found))]
        torch.testing.assert_close(found, torch.tensor(wanted), rtol=0.02, atol=1e-3)
    assert all(p.grad is None for p in model.parameters())


def test_every_exact_head_changes_the_choice_of_the_next(monkeypatch):
    model = patch_model(tiny_bert(), "hedgehog")
    first, second = mechanism_sites(model)

    def gains(model, batch, exact):
        later = 9.0 if exact[first] == [0] else 0.0
        return {first: torch.tensor([5.0, 4.0, 0.0, 0.0]), second: torch.tensor([0.0, 0.0, 0.0, later])}

    monkeypatch.setattr("hf_rfattn.conversion.heads.gains_of_heads", gains)
    assert decisive_heads(model, [{}], 0.25) == {0: (0,), 1: (3,)}


def test_the_heads_that_matter_most_stay_exact(tmp_path):
    model, batches = lively(tiny_bert()), make_batches()
    options = {"measure": batches[0], "steps": 10, "exact_heads": 0.25, "progress": False}

    def learn(given=batches, **further):
        learner = copy.deepcopy(model)
        return learner, convert(learner, "hedgehog", given, **options, **further)

    learner, report = learn()
    plain = copy.deepcopy(model)
    apart = {"steps": 6, "end_to_end": 0, "exact_heads": 0, "progress": False}
    convert(plain, "hedgehog", batches, measure=batches[0], **apart)
    first = gains_of_heads(plain, batches[0])
    _, layer, head = max((gain, i, h) for i, of in enumerate(first.values()) for h, gain in enumerate(of.tolist()))
    chosen = decisive_heads(plain, batches[:1], 0.25)
    assert sum(map(len, chosen.values())) == 2 and head in chosen[layer]  # a quarter of 8 heads
    for layer, errors in enumerate(report.after.heads):
        assert [error < 1e-5 for error in errors] == [head in chosen.get(layer, ()) for head in range(len(errors))]
    assert "exact_heads" in report.after.mechanisms and report.exact_heads == chosen
    with torch.no_grad():
        assert keep_exact_heads(plain, batches[0], 0.25) == chosen
    learner.save_pretrained(tmp_path / "model")
    loaded = type(learner).from_pretrained(tmp_path / "model")
    assert torch.equal(loaded.eval()(**batches[1])[0], learner.eval()(**batches[1])[0])
    for end in (5, 9):  # before and after the heads are chosen
        with pytest.raises(Torn):
            learn(torn(batches, end), checkpoint=tmp_path / str(end), save_every=2)
        resumed, again = learn(checkpoint=tmp_path / str(end), save_every=2)
        assert same(learnt(learner), learnt(resumed)) and again.after == report.after
    with pytest.raises(ValueError, match="exact already"):
        keep_exact_heads(learner, batches[0])
    with pytest.raises(ValueError, match="linear mechanism"):
        keep_exact_heads(patch_model(copy.deepcopy(model), "band"), batches[0])


def test_all_processes_keep_the_heads_that_the_first_has_chosen(monkeypatch):
    """Their gains may be rounded in other ways, for instance on another device."""
    monkeypatch.setattr(conversion, "from_first", lambda value: value if "input_ids" in value else {1: (2, 3)})
    model, batches = lively(tiny_bert()), make_batches(2)
    assert convert(model, "hedgehog", batches, steps=2, progress=False).exact_heads == {1: (2, 3)}
    assert getattr(mechanisms(model)["encoder.layer.1.attention.self"].config, "heads", ()) == (2, 3)


def test_modules_with_the_same_number_have_the_same_exact_heads():
    """An encoder and its decoder, or two towers, may also differ in their number of heads."""
    for decoder_heads, count in ((4, 4), (2, 2)):  # half of 2 layers of 4 or 2 heads
        model = patch_model(lively(tiny_bart(decoder_attention_heads=decoder_heads)), "hedgehog")
        batch = {"input_ids": ids(2, 10), "decoder_input_ids": ids(2, 7)}
        chosen = keep_exact_heads(model, batch, 0.5)
        assert sum(map(len, chosen.values())) == count
        for name, mechanism in mechanisms(model).items():
            number = int(name.split(".")[2])
            assert getattr(mechanism.config, "heads", ()) == chosen.get(number, ())


def test_gains_of_heads_in_float16_do_not_overflow():
    model, batch = patch_model(lively(tiny_bert()), "hedgehog"), make_batches(1)[0]
    with torch.no_grad():
        model.encoder.layer[-1].output.LayerNorm.weight.fill_(3000.0)
    expected = gains_of_heads(model, batch)
    for gains, wanted in zip(gains_of_heads(model.half(), batch).values(), expected.values(), strict=True):
        torch.testing.assert_close(gains, wanted, rtol=0.1, atol=0.1 * float(wanted.abs().max()))


def test_far_fields_learn_by_themselves():
    model, batches = lively(tiny_bert()), make_batches()
    found = []
    for parts in (0.0, 1.0):
        copied = copy.deepcopy(model)
        convert(copied, "fmm", batches, bandwidth=3, far="hedgehog", parts=parts, steps=60, progress=False)
        far = copy.deepcopy(model)
        patch_model(far, "hedgehog")
        for mechanism, source in zip(mechanism_sites(far), mechanism_sites(copied), strict=True):
            mechanism.load_state_dict(source.far[0].state_dict())
        found.append(attention_error(far, batches[0]).overall)
    assert all(taught < 0.95 * not_taught for not_taught, taught in zip(*found, strict=True))


def test_far_fields_of_optimal_variance_are_calibrated():
    model, (batch,) = lively(tiny_bert()), make_batches(1)
    options = {"far": (FavorConfig(variance="optimal"),)}
    expected = calibrate(patch_model(copy.deepcopy(model), "fmm", **options), batch)
    convert(model, "fmm", batch, steps=1, progress=False, **options)
    for own, other in zip(mechanism_sites(model), mechanism_sites(expected), strict=True):
        assert torch.equal(own.far[0].feature_map.rho, other.far[0].feature_map.rho)


def test_processes_share_texts(monkeypatch):
    """Every text once, and no process sees those of another."""
    texts = [str(i) for i in range(24)]
    seen = []

    class Words:
        model_max_length = 8

        def __call__(self, part, **_):
            return {"texts": part}

    for rank in range(2):
        monkeypatch.setattr(conversion_batches, "process_count", lambda: 2)
        monkeypatch.setattr(conversion_batches, "process_rank", lambda rank=rank: rank)
        shared = conversion_batches.TrainingBatches(texts, Words(), batch_size=3, max_length=8, seed=0)
        seen.append([text for batch in shared.given for text in batch["texts"]])
    assert [len(part) for part in seen] == [12, 12] and sorted(seen[0] + seen[1]) == sorted(texts)


def test_texts():
    texts = [f"{a} : {b} ; {a} ." for a in ("box", "cup", "jar", "pot") for b in ("red", "blue", "green", "grey")]
    options = {"tokenizer": sample_tokenizer(), "batch_size": 4, "steps": 5, "progress": False}
    models = [copy.deepcopy(tiny) for tiny in [tiny_bert()] * 3]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        convert(model, "hedgehog", texts, seed=seed, **options)
    assert same(learnt(models[0]), learnt(models[1])) and not same(learnt(models[0]), learnt(models[2]))


def mechanisms_of(model):
    return [module for module in model.modules() if isinstance(module, Mechanism)]


def test_mistakes_are_told():
    model, batches = tiny_bert(), make_batches(3)
    for arguments, message in [
        ((None, batches), "not patched"),
        (("favor+", batches), "nothing to train.*trainable=True"),
        (("hedgehog", ["some", "texts"]), "give their tokenizer"),
        (("hedgehog", []), "empty"),
        (("hedgehog", iter(batches)), "ended after 2 steps.*a list or DataLoader"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert(model, *arguments, steps=5, progress=False)
        assert not mechanisms_of(model)  # softmax, as it was
    for options, message in [
        ({"steps": 0}, "steps must be a positive"),
        ({"batch_size": 0}, "batch_size must be a positive"),
        ({"measure": batches}, "measure must be one batch.*not list"),
        ({"num_features": -1}, "num_features"),
    ]:
        with pytest.raises(ValueError, match=message):
            convert(model, "hedgehog", batches, progress=False, **options)
    late = torn(batches, 2)  # one for the errors, one to train on
    with pytest.raises(ValueError, match="linear mechanism"):  # at once, not when the heads are chosen
        convert(model, {0: "hedgehog", 1: "fmm"}, late, exact_heads=0.25, progress=False)
    patch_model(model, "hedgehog")
    with pytest.raises(ValueError, match="bandwidth would be ignored"):
        convert(model, None, batches, bandwidth=3)
    keep_exact_heads(model, batches[0])
    with pytest.raises(ValueError, match="exact already"):
        convert(model, None, torn(batches, 2), exact_heads=0.25, progress=False)


def _convert_a_share(rank, folder, model, batches):
    torch.set_num_threads(1)
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    shares = [{name: value[rank::2] for name, value in batch.items()} for batch in batches]
    report = convert(model, "hedgehog", shares, measure=batches[0], steps=5, progress=False)
    torch.save((learnt(model), report.steps), f"{folder}/{rank}.pt")
    distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_learn_what_one_learns(tmp_path):
    model, batches = lively(tiny_bert()), make_batches(4)
    for batch in batches:
        batch["attention_mask"][:2] = batch["attention_mask"][0]  # a padded row for each process
    alone = copy.deepcopy(model)
    report = convert(alone, "hedgehog", batches, measure=batches[0], steps=5, progress=False)
    torch.multiprocessing.spawn(_convert_a_share, (str(tmp_path), model, batches), nprocs=2)
    (first, steps), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert same(first, second) and steps == report.steps
    for name, value in learnt(alone).items():
        # Adam makes steps of 0.05 out of gradients of any size, rounded ones too
        torch.testing.assert_close(first[name], value, rtol=0, atol=2e-3)


def test_encoders_with_linear_attention_keep_some_heads_exact_by_default():
    batches = make_batches(2)

    def share(model, attention, **further):
        report = convert(model, attention, batches, steps=1, progress=False, **further)
        return sum(map(len, report.exact_heads.values()))

    assert share(tiny_bert(), "hedgehog") == 1  # of 8
    assert share(tiny_bert(), "hedgehog", layers=[1]) == 0  # too few
    assert share(tiny_bert(), "fmm") == share(tiny_llama(), "hedgehog") == 0
    unmarked = tiny_llama()  # attention modules of some decoders do not say that they are causal
    for layer in unmarked.model.layers:
        layer.self_attn.is_causal = False
    assert share(unmarked, "hedgehog") == 0
