"""The command line in this process."""

from typer.testing import CliRunner

from hf_rfattn.cli import app

# `bench ops` in a second.
QUICK_OPS = ("--heads", 2, "--head-dim", 8, "--repetitions", 2, "--threads", 1)


def run(*arguments, code=0):
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == code, result.output
    return result.stderr if code else result.stdout


def failure(*arguments):
    """What went to stderr of a command that fails with code 2: one line."""
    message = run(*arguments, code=2)
    assert message.startswith("hf-rfattn: ") and message.count("\n") == 1, message
    return message
