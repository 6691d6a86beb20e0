"""The command line on tiny models in a folder: what it prints, where, and with which exit code."""

import json
import shlex
import shutil

import pytest
import torch
import transformers
import typer
from support.commands import QUICK_OPS, failure, run
from support.word_tokenizers import TEXT, save_with_tokenizer
from typer.testing import CliRunner

import hf_rfattn
from hf_rfattn import attention_error, extend_positions, mechanism_names, patch_model
from hf_rfattn.cli import app
from hf_rfattn.integration.reading import model_class
from hf_rfattn.mechanisms import describe_options, resolve_config
from hf_rfattn.mechanisms.registry import mechanism_aliases

SIZE = dict(vocab_size=20, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZE, max_position_embeddings=64)
    return save_with_tokenizer(transformers.BertForMaskedLM(config), tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZE, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    return save_with_tokenizer(model, tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def modernbert(tmp_path_factory):
    """Two layers that see everything and two that see a window."""
    config = transformers.ModernBertConfig(**SIZE | {"num_hidden_layers": 4}, pad_token_id=0)
    folder = tmp_path_factory.mktemp("modernbert")
    config.architectures = ["ModernBertModel"]
    config.save_pretrained(folder)
    return folder


def test_a_config_names_models_only():
    """Whatever a folder's config.json says, no other object of transformers is called."""
    named = [transformers.BertConfig(architectures=[name]) for name in ("pipeline", "Trainer", "nothing", "BertModel")]
    assert [model_class(config).__name__ for config in named] == ["AutoModel"] * 3 + ["BertModel"]


def test_version_needs_no_command():
    assert run("--version") == f"hf-rfattn {hf_rfattn.__version__}\n"


def commands(group, *above):
    """(words, command) of all commands, those of groups included."""
    for name, command in group.commands.items():
        yield (*above, name), command
        yield from commands(command, *above, name) if hasattr(command, "commands") else ()


COMMANDS = dict(commands(typer.main.get_command(app)))


def test_help_fits_one_screen():
    lines = CliRunner().invoke(app, ["--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output.splitlines()
    assert len(lines) < 24 and max(map(len, lines)) <= 80  # one line is left for the prompt
    for name, command in typer.main.get_command(app).commands.items():
        line = next(line for line in lines if line.startswith(f"  {name} "))
        assert line.split(maxsplit=1)[1] == command.help.partition("\n")[0]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example_with_options_that_exist(words):
    shown = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80", "TERM": "dumb"}).output
    example = shlex.split(shown.partition("Example:\n")[2])
    assert example[: len(words) + 1] == ["hf-rfattn", *words]
    assert all(word in shown.partition("Example:")[0] for word in example if word.startswith("-"))


def test_list_as_json():
    listed = json.loads(run("list", "--json"))
    assert list(listed) == mechanism_names() and listed["linear"]["aliases"]["elu-"] == {"feature_map": "elu-"}
    assert listed["favor+"]["options"][0]["name"] == "num_features"


def test_list_names_every_mechanism_alias_and_option():
    out = run("list")
    for name in mechanism_names():
        assert f"\n{name}  " in f"\n{out}"
        for option in describe_options(type(resolve_config(name))):
            assert f"  {option.name} " in out and option.help
            assert f"{option.name} = {option.default}: {option.help}" in type(resolve_config(name)).__doc__
    for alias in mechanism_aliases():
        assert alias in out
    assert "num_features     = null        Number of random features M. Default: the head size." in out
    assert "projection       = orthogonal  (iid | orthogonal | hadamard)" in out
    assert 'far            = ["favor+"]' in out
    assert "elu- (feature_map=elu-)" in out


def test_inspect_an_encoder(bert):
    out = run("inspect", bert, "num_features=16", "projection=hadamard", "--lengths", "64,4096")
    assert "BertForMaskedLM, float32" in out
    assert "num_features=16, projection=hadamard" in out
    row = next(line for line in out.splitlines() if "attention.self" in line)
    assert row.split() == ["bert.encoder.layer.*.attention.self", "0-2", "all", "4", "4", "8", "favor+", "16"]
    assert "KV cache" not in out
    assert [line.split()[0] for line in out.splitlines() if line.strip().startswith(("64 ", "4096 "))] == ["64", "4096"]
    assert "Break-even sequence length in multiply-adds: 35." in out
    assert "learned positions for 64 tokens" in out
    assert "error" not in out.lower()


def test_inspect_json_counts(bert):
    report = json.loads(run("inspect", bert, "num_features=16", "--lengths", "100", "--json"))
    assert report["model_type"] == "bert" and report["attention"]["num_features"] == 16
    assert [m["name"] for m in report["modules"]] == [f"bert.encoder.layer.{i}.attention.self" for i in range(3)]
    assert {m["kind"] for m in report["modules"]} == {"bidirectional"}
    (cost,) = report["costs"]
    layers, heads, features, size = 3, 4, 16, 8
    assert cost["softmax_multiply_adds"] == layers * heads * 2 * 100 * 100 * size
    assert cost["multiply_adds"] == layers * heads * 2 * 100 * (features * size + features * (size + 1))
    assert report["crossover_length"] == 35  # 2 · L · 272 against 2 · L² · 8
    assert report["learned_positions"] == 64
    assert "error" not in report


def test_inspect_a_decoder(llama):
    arguments = (
        "inspect",
        llama,
        "--attention",
        "fmm",
        "bandwidth=16",
        "global_tokens=0",
        'far=["elu","elu-"]',
    )
    report = json.loads(run(*arguments, "--lengths", "128,512", "--json"))
    assert report["attention"]["far"] == ["elu", "elu-"] and report["dtype"] == "bfloat16"
    assert {(m["kind"], m["num_heads"], m["num_kv_heads"]) for m in report["modules"]} == {("causal", 4, 2)}
    short, long = report["costs"]
    assert long["kv_cache_bytes"] == 4 * short["kv_cache_bytes"] == 3 * 2 * 512 * 2 * 8 * 2
    assert long["state_bytes"] == short["state_bytes"] == 3 * (2 * (16 * (8 + 2) * 4 + 17 * 2 * 8 * 4) + 17 + 8)
    out = run(*arguments)
    assert "softmax: KV cache" in out and "fmm: state" in out and "the past" in out
    assert "learned positions" not in out


def test_inspect_says_what_stays_softmax(modernbert):
    out = run("inspect", modernbert)
    assert "stays softmax: it sees a window of" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("layers.*.attn  ")]
    assert rows == [
        ["layers.*.attn", "0,", "3", "all", "4", "4", "8", "favor+", "8"],
        ["layers.*.attn", "1-2", "all", "4", "4", "8", "softmax"],
    ]


@pytest.mark.parametrize("name", mechanism_names())
def test_every_mechanism_can_be_inspected(bert, llama, name):
    for folder in (bert, llama):
        report = json.loads(run("inspect", folder, "--attention", name, "--json"))
        assert {m["attention"] for m in report["modules"]} == {name}
        assert report["crossover_length"] > 1


def test_error_on_a_text_is_that_of_attention_error(bert, tmp_path):
    model = transformers.BertForMaskedLM.from_pretrained(bert)
    batch = transformers.AutoTokenizer.from_pretrained(bert)(TEXT, return_tensors="pt")
    expected = attention_error(patch_model(model, "favor+"), batch)
    report = json.loads(run("inspect", bert, "--text", TEXT, "--json"))
    assert report["tokens"] == len(TEXT.split())
    assert report["error"]["layers"] == expected.layers
    assert report["error"]["overall"] == pytest.approx(expected.overall, rel=1e-4)
    (tmp_path / "text.txt").write_text(TEXT)
    out = run("inspect", bert, "--text-file", tmp_path / "text.txt")
    assert str(expected) in out


def test_a_long_text_is_cut_to_what_the_model_takes(bert):
    report = json.loads(run("inspect", bert, "--text", "the cat " * 200, "--json"))
    assert report["tokens"] == 64


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--attention", "favr"), "did you mean 'favor'"),
        (("num_feature=3",), "'favor+' has no option 'num_feature' (did you mean 'num_features'?)"),
        (("num_features=many",), "num_features must be an integer, not 'many'."),
        (("num_features=1.5",), "num_features must be an integer, not 1.5."),
        (("fmm",), "Unexpected argument 'fmm'; write --attention fmm."),
        (("num_features",), "Cannot parse the option 'num_features'; write NAME=VALUE"),
        (("num_features=8", "num_features=16"), "'num_features' is given twice"),
        (("antithetic=true", "num_features=7"), "num_features=7 is odd"),
        (("--attention", "fmm", "far=band"), "far must be linear mechanisms"),
        (("--lengths", "128,many"), "must be positive integers"),
        (("--lengths", "0"), "must be positive integers"),
        (("--text", "a", "--text-file", "b"), "not both"),
        (("--text", " "), "The text is empty"),
        (("--text-file", "there/is/none"), "There is no file or folder 'there/is/none'."),
    ],
)
def test_mistakes(bert, arguments, message):
    assert message in failure("inspect", bert, *arguments)


def test_not_a_model(tmp_path):
    assert "There is no folder" in failure("inspect", tmp_path / "nothing")
    assert "it has no config.json" in failure("inspect", tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "model_type" in failure("inspect", tmp_path)


def test_refused_models(tmp_path):
    t5 = transformers.T5Config(vocab_size=20, d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=32)
    t5.save_pretrained(tmp_path / "t5")
    assert "relative position bias" in failure("inspect", tmp_path / "t5")
    transformers.DebertaConfig(**SIZE).save_pretrained(tmp_path / "deberta")
    assert "does not go through transformers' attention interface" in failure("inspect", tmp_path / "deberta")


def test_weights_are_needed_for_a_text_only(bert, tmp_path):
    transformers.AutoConfig.from_pretrained(bert).save_pretrained(tmp_path)
    run("inspect", tmp_path)
    assert "model.safetensors" in failure("inspect", tmp_path, "--text", TEXT)


def test_patch_and_unpatch(bert, tmp_path):
    original = transformers.AutoModelForMaskedLM.from_pretrained(bert)
    out = run("patch", bert, "fmm", "bandwidth=3", "far=elu", "-o", tmp_path / "fmm", "--layers", "0-1", "--seed", "4")
    assert out.startswith(f"Written: {tmp_path / 'fmm'}")
    patched = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "fmm")
    expected = patch_model(original, "fmm", bandwidth=3, far="elu", layers="0-1", seed=4)
    tokens = transformers.AutoTokenizer.from_pretrained(tmp_path / "fmm")(TEXT, return_tensors="pt")["input_ids"]
    assert torch.equal(patched(tokens).logits, expected(tokens).logits)
    run("unpatch", tmp_path / "fmm", "-o", tmp_path / "plain")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "plain")
    fresh = transformers.AutoModelForMaskedLM.from_pretrained(bert)
    assert torch.equal(again(tokens).logits, fresh(tokens).logits)
    assert again.state_dict().keys() == fresh.state_dict().keys() and not hasattr(again.config, "rfattn")


def test_patch_for_longer_inputs(bert, tmp_path):
    run("patch", bert, "favor+", "-o", tmp_path / "long", "--max-length", "200", "--positions", "tile")
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "long").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "long")
    assert model.config.max_position_embeddings == tokenizer.model_max_length == 200
    tokens = tokenizer("the cat " * 200, return_tensors="pt", truncation=True)["input_ids"]
    assert tokens.shape == (1, 200)
    softmax = transformers.AutoModelForMaskedLM.from_pretrained(bert)
    expected = extend_positions(patch_model(softmax, "favor+"), 200, method="tile").eval()
    assert torch.equal(model(tokens).logits, expected(tokens).logits)


def test_patch_for_longer_inputs_refuses(bert, llama, tmp_path):
    target = ("-o", tmp_path / "new")
    assert "Unknown method" in run(
        "patch", bert, "favor+", *target, "--max-length", "99", "--positions", "slide", code=2
    )
    assert "already has positions for 64 tokens" in run("patch", bert, "favor+", *target, "--max-length", "9", code=2)
    assert "--positions needs --max-length" in run("patch", bert, "favor+", *target, "--positions", "tile", code=2)
    assert "rotary" in run("patch", llama, "favor+", *target, "--max-length", "4096", code=2)
    assert not (tmp_path / "new").exists()


def test_patch_and_unpatch_refuse(bert, tmp_path):
    assert "did you mean" in failure("patch", bert, "favour+", "-o", tmp_path / "a")
    assert "no layer 9" in run("patch", bert, "favor+", "-o", tmp_path / "a", "--layers", "9", code=2)
    assert not (tmp_path / "a").exists()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "precious.txt").write_text("mine")
    assert "already exists" in failure("patch", bert, "favor+", "-o", tmp_path / "full")
    assert "is not patched" in run("unpatch", bert, "-o", tmp_path / "b", code=2)
    assert "no folder" in failure("unpatch", tmp_path / "nowhere", "-o", tmp_path / "b")


@pytest.mark.parametrize(
    "words", [("patch", "bert", "fmm", "-o"), ("convert", "bert", "fmm", "--data", "texts.txt", "-o"),
              ("bench", "ops", "--output"), ("study", "mse", "--output")], ids=lambda words: words[0]
)  # fmt: skip
def test_an_output_that_cannot_be_written_is_refused_first(tmp_path, words):
    (tmp_path / "file").write_text("mine")
    assert "file: it is a file. Choose another folder." in failure(*words, tmp_path / "file" / "out")


def test_an_encoder_does_not_generate(bert, tmp_path):
    said = run("bench", "decode", "--model", bert, "--contexts", 8, "--tokens", 1, "--output", tmp_path / "out", code=2)
    assert "is an encoder (bert), and cannot generate. Choose a decoder." in said


def test_a_damaged_checkpoint(bert, tmp_path):
    shutil.copytree(bert, tmp_path / "damaged")
    weights = tmp_path / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    said = run("patch", tmp_path / "damaged", "fmm", "-o", tmp_path / "out", code=2)
    assert "A weights file of the model is damaged; download or copy the model again." in said.splitlines()[-1]


def test_measurements_as_json(bert, tmp_path):
    words = ("--lengths", 16, "--passes", "forward", "--directions", "causal", "--attention", "average", *QUICK_OPS)
    shown = json.loads(run("bench", "ops", *words, "--output", tmp_path, "--json"))
    assert shown == json.loads((tmp_path / "ops.json").read_text()) and shown["kind"] == "bench ops"
    assert shown["command"].startswith("hf-rfattn bench ops --lengths 16") and "--json" not in shown["command"]
    quick = ("--lengths", 16, "--passes", "forward", "--attention", "average", "--repetitions", 2, "--threads", 1)
    shown = json.loads(run("bench", "model", "--model", bert, *quick, "--output", tmp_path, "--json"))
    assert shown == json.loads((tmp_path / "model_bert.json").read_text()) and shown["kind"] == "bench model"
    assert json.loads((tmp_path / "speed_bert_average.json").read_text())["command"] == shown["command"]
    shown = json.loads(run("study", "mrf", "--output", tmp_path, "--json"))
    assert shown == json.loads((tmp_path / "mrf.json").read_text())
