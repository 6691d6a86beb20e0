"""The fields of a run: the command line, files, and what is refused."""

import dataclasses

import pytest
from finetune_glue import GlueOptions
from finetune_lm import LanguageOptions
from finetune_squad import SquadOptions
from training.models import set_attention
from training.options import RunOptions, fields_as_arguments, flag, parse_options

from hf_rfattn import FavorConfig
from hf_rfattn.mechanisms import parse_attention


@pytest.mark.parametrize("options", [RunOptions, GlueOptions, SquadOptions, LanguageOptions])
def test_help_explains_every_field(options, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_options(options, ["--help"], "What it is for.")
    assert stop.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(options):
        assert flag(field.name) in shown and len(field.metadata["help"]) > 10


def mechanism_of(options):
    return parse_attention(options.attention, options.attention_options)


def test_the_command_line_of_the_readme():
    line = "--model google-bert/bert-base-uncased --task sst2 --attention favor+ --attention-options num_features=128"
    options = parse_options(GlueOptions, line.split())
    assert mechanism_of(options) == FavorConfig(num_features=128)
    assert (options.task, options.batch_size, options.resume) == ("sst2", 32, False)


def test_fields_are_spelt_as_the_command_line_does():
    line = '--model m --task mrpc --attention fmm --attention-options bandwidth=16 far=["elu"] --seed 3 --warmup 10'
    expected = parse_options(GlueOptions, [*line.split(), "--resume"])
    fields = {
        "model": "m", "task": "mrpc", "attention": "fmm", "attention-options": {"bandwidth": 16, "far": ["elu"]},
        "seed": 3, "resume": True, "warmup": 10, "overwrite": False, "layers": None,
    }  # fmt: skip
    assert parse_options(GlueOptions, fields_as_arguments(fields)) == expected
    with pytest.raises(ValueError, match=r"Unknown option '--learning-rte=1' \(did you mean '--learning-rate'\?\)"):
        parse_options(GlueOptions, fields_as_arguments({"learning-rte": 1}))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning-rat", "1"], "did you mean '--learning-rate'"),
        (["--batch-size", "0", "--modle", "m"], "did you mean '--model'"),  # what is misspelt comes first
        (["--batch-size", "many"], "invalid int value"),
        (["--scheduler", "triangle"], "invalid choice"),
        (["--batch-size", "0"], "--batch-size must be above 0, not 0"),
        (["--learning-rate", "-1"], "--learning-rate must be above 0"),
        (["--weight-decay", "-1"], "--weight-decay must be at least 0"),
        (
            ["--exact-heads", "1", "--transfer-steps", "2"],
            "--exact-heads is a fraction of all heads and must be below 1",
        ),
        (["--resume", "--overwrite"], "cannot be combined"),
        (["--eval-split", "train"], "trained on this split"),
        (["--attention", "softmax", "--layers", "0"], "--layers needs a mechanism; choose one"),
        (["--attention-options", "a=1"], "--attention-options needs a mechanism"),
        (["--attention", "softmax", "--redraw-every", "3"], "--redraw-every needs a mechanism"),
        (["--sequence-parallel", "2", "--distill", "self"], "do not work with --sequence-parallel"),
    ],
)
def test_what_is_refused(words, message):
    with pytest.raises(ValueError, match=message):
        parse_options(RunOptions, words)


def test_attention_options_are_checked():
    for given, message in ((["a"], "write NAME=VALUE"), (["a=1", "a=2"], "'a' is given twice")):
        with pytest.raises(ValueError, match=message):
            set_attention(None, RunOptions(model="m", attention="favor+", attention_options=given))
    assert RunOptions(model="m", early_stop=2).keep == "best"
