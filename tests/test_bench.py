"""Benchmarks at toy size: what they time, in which order, what they count and write. Nothing here asserts a time."""

import json
from collections import Counter

import pytest
import torch
import transformers
from support.commands import failure, run
from support.models import tiny_gpt2, tiny_llama

from hf_rfattn import mechanism_names, patch_model
from hf_rfattn.bench import decode, loading, measuring
from hf_rfattn.bench.decode import Decoder, cache_bytes
from hf_rfattn.bench.measuring import Competitor, Row, interleave, median_ratio, race, spread, threads
from hf_rfattn.bench.settings import DecodeSettings
from hf_rfattn.integration.cache import RecurrentLayer
from hf_rfattn.integration.cost import attention_cost
from hf_rfattn.mechanisms import resolve_config
from hf_rfattn.mechanisms.registry import mechanism_class
from hf_rfattn.results import documents

QUICK = ("--batch", 2, "--repetitions", 2, "--tokens", 2)
EVERY = ",".join(mechanism_names())


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpt2")
    tiny_gpt2().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def result(gpt2, tmp_path_factory):
    """One run over every mechanism, through the command line."""
    output = tmp_path_factory.mktemp("bench") / "new" / "folder"
    text = run(
        "bench",
        "decode",
        "--model",
        gpt2,
        "--contexts",
        "64,32",
        *QUICK,
        "--attention",
        EVERY,
        "--threads",
        1,
        "--output",
        output,
    )
    return json.loads((output / "decode.json").read_text()) | {"text": text, "output": output}


class Clock:
    """Stands still unless something runs."""

    def __init__(self):
        self.now, self.log = 0.0, []

    def __call__(self):
        self.log.append("read")
        return self.now

    def spend(self, name, seconds):
        self.log.append(name)
        self.now += seconds


def test_competitors_are_interleaved():
    clock = Clock()
    costs = {"a": 1.0, "b": 2.0, "c": 4.0}
    competitors = {
        name: Competitor(
            run=lambda n=name, s=seconds: clock.spend(n, s), prepare=lambda n=name: clock.spend(f"prepare {n}", 100)
        )
        for name, seconds in costs.items()
    }
    wait = lambda: clock.log.append("wait")  # noqa: E731
    seconds = interleave(competitors, repetitions=5, warmup=2, synchronise=wait, clock=clock)
    assert seconds == {name: [cost] * 5 for name, cost in costs.items()}  # what prepares is off the clock
    finished = [entry for entry in clock.log if entry in costs]
    units = [clock.log[i : i + 6] for i in range(0, len(clock.log), 6)]
    assert units == [[f"prepare {name}", "wait", "read", name, "wait", "read"] for name in finished]
    rounds = ["".join(finished[i : i + 3]) for i in range(0, len(finished), 3)]
    assert len(rounds) == 7 and all(Counter(order) == Counter("abc") for order in rounds)
    assert len(set(rounds)) > 1
    clock.log.clear()
    interleave(competitors, repetitions=5, warmup=2, clock=clock)
    assert [entry for entry in clock.log if entry in costs] == finished


def test_rows_that_do_not_fit_into_a_gpu_are_left_out(monkeypatch):
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory.\n Tried to allocate 40 GiB")

    monkeypatch.setattr(measuring, "synchroniser", lambda device: measuring.nothing)
    softmax, own = Row("softmax"), Row("favor+")
    settings = DecodeSettings(device="cuda", repetitions=2)
    found = race({softmax: Competitor(too_large), own: Competitor(measuring.nothing)}, settings)
    assert found.left_out == {softmax: "OutOfMemoryError: CUDA out of memory. Tried to allocate 40 GiB"}
    assert found.times(own)["speed_over_softmax"] is None and "first_call_seconds" not in found.times(own)


def test_warmup_is_not_counted():
    clock = Clock()
    costs = iter([100, 1, 2, 3])
    seconds = interleave({"a": Competitor(lambda: clock.spend("a", next(costs)))}, repetitions=3, clock=clock)
    assert seconds == {"a": [1, 2, 3]}


def test_spread_and_ratio():
    assert spread([7.0]) == {"median": 7, "lower": 7, "upper": 7, "count": 1}
    assert spread([5, 1, 2, 3, 4]) == {"median": 3, "lower": 2, "upper": 4, "count": 5}
    assert spread([1 / 3])["median"] == 0.3333
    assert median_ratio([1, 10, 30], [1, 5, 10]) == 2


def test_threads_are_put_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError), threads(2) as count:
        assert count == torch.get_num_threads() == 2
        raise KeyError
    assert torch.get_num_threads() == before
    with threads(None) as count:
        assert count == before


def test_a_result_says_where_it_comes_from(tmp_path, monkeypatch):
    found = documents.new_result("test", seed=3, packages=["no-such-package"])
    assert found["schema_version"] == documents.SCHEMA_VERSION and found["kind"] == "test" and found["seed"] == 3
    assert found["versions"]["torch"] == torch.__version__ and found["versions"]["no-such-package"] is None
    assert found["hardware"]["threads"] == torch.get_num_threads() and found["hardware"]["memory_bytes"] > 2**28
    monkeypatch.setattr(documents, "PACKAGE", tmp_path)
    assert documents.git_state() == {"commit": None, "changed": None}


def test_a_result_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "new" / "result.json"
    documents.write_result({"name": "favor+", "ü": 1}, path)
    assert json.loads(path.read_text(encoding="utf-8")) == {"name": "favor+", "ü": 1}
    with pytest.raises(TypeError):
        documents.write_result({"name": object()}, path)
    assert json.loads(path.read_text(encoding="utf-8"))["ü"] == 1
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]


def test_decode_writes_a_result(result):
    assert result["kind"] == "bench decode" and result["schema_version"] == documents.SCHEMA_VERSION
    assert result["model"]["type"] == "gpt2" and result["model"]["layers"] == 2 and result["model"]["head_dim"] == 8
    assert result["hardware"]["threads"] == 1 and result["settings"]["tokens"] == 2
    assert result["settings"]["contexts"] == [32, 64] and result["settings"]["model"] != str(result["output"])
    assert result["command"].startswith("hf-rfattn bench decode --model gpt2")
    assert " --contexts 64,32 --batch 2 " in result["command"] and "output" not in result["command"]
    assert result["attention"] == {name: resolve_config(name).to_dict() for name in mechanism_names()}
    cells = {(c["attention"], c["batch"], c["length"]) for c in result["cells"]}
    names = ["softmax", decode.STATIC, *mechanism_names()]
    assert cells == {(name, 2, context) for name in names for context in (32, 64)}
    assert len(cells) == len(result["cells"]) and not result["left_out"]
    for cell in result["cells"]:
        spread = cell["milliseconds"]
        assert 0 < spread["lower"] <= spread["median"] <= spread["upper"] and spread["count"] == 2
        assert cell["speed_over_softmax"] == 1 or cell["attention"] != "softmax"
        assert cell["path"] == "torch" and "first_call_seconds" not in cell
    assert (result["output"] / "decode.png").read_bytes().startswith(b"\x89PNG")
    for name in names:
        assert name in result["text"]
    assert "KiB" in result["text"] and str(result["output"] / "decode.json") in result["text"]


def test_bytes_of_caches(result):
    for cell in result["cells"]:
        if cell["attention"] == "softmax":  # layers, keys and values, width, float32
            assert cell["cache_bytes"] == cell["batch"] * cell["length"] * 2 * 2 * 32 * 4
    held = {(c["attention"], c["length"]): c["cache_bytes"] for c in result["cells"]}
    for name in mechanism_names():
        longer = held[name, 64] - held[name, 32]
        assert (longer > 0) == mechanism_class(resolve_config(name)).holds_all_keys
    assert held["softmax", 64] == 2 * held["softmax", 32]
    assert held[decode.STATIC, 64] == held["softmax", 64] * 66 // 64  # with room for the tokens that are timed


@pytest.mark.parametrize("name", ["softmax", *mechanism_names()])
def test_a_lengthened_cache_is_that_of_a_real_prompt(name):
    """Grouped queries: bytes, shapes and lengths after the shortcut are those after prefilling the whole context."""
    model = tiny_llama()
    site = next(m for n, m in model.named_modules() if n.endswith("self_attn"))
    if name != "softmax":
        patch_model(model, name)
    context, batch = 100, 2
    decoder = Decoder(model, batch, context, tokens=3, seed=0)
    decoder.prepare()
    real = model(torch.randint(50, (batch, context)), use_cache=True).past_key_values
    assert decoder.cache.get_seq_length() == real.get_seq_length() == context
    for mine, theirs in zip(decoder.cache.layers, real.layers, strict=True):
        assert type(mine) is type(theirs)
        if isinstance(mine, RecurrentLayer):
            assert [x.shape for x in mine.state.tensors()] == [x.shape for x in theirs.state.tensors()]
        else:
            assert mine.keys.shape == theirs.keys.shape and mine.values.is_contiguous()
    assert cache_bytes(decoder.cache) == cache_bytes(real)
    if name != "softmax":
        cost = attention_cost(site.rf, context, causal=True)
        room = (context,) if site.rf.holds_all_keys else ()
        state = site.rf.new_state(batch, site.rf.head_dim, torch.float32, "meta", *room)
        assert cache_bytes(real) == 2 * batch * cost.memory == 2 * sum(x.nbytes for x in state.tensors())


@pytest.mark.parametrize("name", ["softmax", decode.STATIC, "fmm"])
def test_every_row_of_steps_starts_after_the_context(name):
    model = patch_model(tiny_gpt2(), name) if name == "fmm" else tiny_gpt2()
    decoder = Decoder(model, batch=2, context=40, tokens=3, seed=0, static=name == decode.STATIC)
    positions = []
    model.transformer.wpe.register_forward_pre_hook(lambda module, args: positions.append(args[0].flatten().tolist()))
    for _ in range(2):
        decoder.prepare()
        assert decoder.cache.get_seq_length() == 40
        decoder.run()
        assert decoder.cache.get_seq_length() == 43
    assert [p[0] for p in positions] == [39, 40, 41, 42] * 2


def test_competitors_share_their_weights():
    model = tiny_gpt2()
    models = loading.share_weights(model, {name: resolve_config(name) for name in ("favor+", "band")}, seed=0)
    assert models["softmax"] is model and model.config._attn_implementation == "sdpa"
    for name in ("favor+", "band"):
        assert models[name].transformer.h[0].attn.c_attn.weight is model.transformer.h[0].attn.c_attn.weight
        assert models[name].transformer.h[0].attn.rf.config.name == name
    assert not hasattr(model.transformer.h[0].attn, "rf")


def test_windows_and_layers_left_alone():
    """A model with a sliding window in every other layer: filled to its window, no prediction."""
    config = transformers.Gemma3TextConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8,
        intermediate_size=48, sliding_window=16, layer_types=["sliding_attention", "full_attention"], pad_token_id=0,
    )  # fmt: skip
    for name in ("softmax", "favor+"):
        model = transformers.Gemma3ForCausalLM(config).eval()
        if name != "softmax":
            with pytest.warns(UserWarning):
                patch_model(model, name)
        decoder = Decoder(model, batch=1, context=40, tokens=2, seed=0)
        for _ in range(2):
            decoder.prepare()
            decoder.run()
        assert decoder.cache.layers[0].keys.shape[2] == 15
        assert decoder.cache.layers[1].get_seq_length() == 42


def test_some_mechanisms_only_and_the_default_model(monkeypatch, tmp_path):
    """Names between commas or one by one; without --model a random gpt2, here a small one."""
    small = dict(n_embd=16, n_layer=1, n_head=2, vocab_size=30, bos_token_id=0, eos_token_id=0)
    made = lambda length: transformers.GPT2LMHeadModel(transformers.GPT2Config(**small, n_positions=length))  # noqa: E731
    monkeypatch.setitem(loading.SHAPES, "gpt2", made)
    arguments = ("--attention", "performer,band", "--attention", "softmax", "--attention", "linear")
    run("bench", "decode", "--contexts", "32", *QUICK, *arguments, "--output", tmp_path, "--dtype", "bfloat16")
    result = json.loads((tmp_path / "decode.json").read_text())
    assert list(result["attention"]) == ["favor+", "band", "linear"]
    assert result["model"]["name"] == "gpt2-shaped, random weights" and result["model"]["dtype"] == "bfloat16"
    softmax = next(c for c in result["cells"] if c["attention"] == "softmax")
    assert softmax["cache_bytes"] == 2 * 32 * 2 * 16 * 2


def test_plot_and_tables_need_the_document_alone(result):
    document = json.loads((result["output"] / "decode.json").read_text())
    table, image = decode.report(document, "decode")
    figure = image.draw()
    assert len(figure.axes) == 2 and figure.axes[0].get_xscale() == figure.axes[1].get_yscale() == "log"
    lines = {line.get_label(): line for line in figure.axes[0].lines}
    softmax = [c for c in document["cells"] if c["attention"] == "softmax"]
    assert list(lines["softmax"].get_ydata()) == [c["milliseconds"]["median"] for c in softmax]
    assert len(table.rows) == 2 + len(mechanism_names())  # softmax has two caches


def test_the_global_generator_is_left_alone(gpt2):
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    quick = {"contexts": [8], "repetitions": 1, "tokens": 1}
    decode.measure(DecodeSettings(attention=["favor+"], model=str(gpt2), **quick))
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--contexts", "many"), "--contexts 'many' must be positive integers separated by commas, such as 1024,4096"),
        (("--contexts", "1"), "at least 2 tokens"),
        (("--contexts", "160"), "This gpt2 model has 160 positions, too few for 164 tokens"),
        (("--paths", "slow"), "--paths: unknown value 'slow'; choose from torch, compiled, fused."),
        (("--attention", "favr"), "Unknown attention 'favr'"),
        (("--dtype", "float8"), "Unknown dtype 'float8'; choose one of float32, bfloat16, float16."),
        (("--device", "abacus"), "The device 'abacus' is not available."),
        (("--model", "/there/is/none"), "There is no folder '/there/is/none'."),
    ],
)
def test_mistakes(gpt2, tmp_path, arguments, message):
    given = ("--model", gpt2) if "--model" not in arguments else ()
    assert message in failure("bench", "decode", *given, "--output", tmp_path / "none", *arguments)
    assert not (tmp_path / "none").exists()
