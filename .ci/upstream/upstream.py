"""Run transformers' own model and generation tests with every model patched, and compare with expected_failures.yaml.

Each test file runs unpatched, with favor+ and with fmm. A test counts if it passes unpatched and builds a model that
can be patched. The run fails if a test fails that is not listed, or a listed one passes. A full run without such faults
writes recipes/results/upstream.json, and `make readme` makes the tables of docs/reference/upstream.md from it.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import transformers
import typer
import yaml

from hf_rfattn.results.documents import new_result, write_result

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
EXPECTED = HERE / "expected_failures.yaml"
RESULT = ROOT / "recipes" / "results" / "upstream.json"
OUTPUT = ROOT / "upstream_out"
REPOSITORY = "https://github.com/huggingface/transformers"

MODELS = ("bert", "gpt2", "llama", "bart", "distilbert")
SOFTMAX, ATTENTIONS = "softmax", ("favor+", "fmm")
TODO = "TODO"

Outcomes = dict[str, dict[str, Any]]  # of tests, such as "BertModelTest::test_config"


class Failure(NamedTuple):
    attention: str
    test: str


def main(
    checkout: Annotated[Path | None, typer.Option(help="Of transformers; by default its release is cloned.")] = None,
    models: Annotated[str, typer.Option(help="Folders of tests/models.")] = ",".join(MODELS),
    update: Annotated[
        bool, typer.Option("--update", help="Drop listed tests that pass, and list new failures.")
    ] = False,
    note: Annotated[str | None, typer.Option(help="Remark on the checkout for the result file.")] = None,
) -> None:
    """Run transformers' own tests with every model patched."""
    checkout = (checkout or clone()).resolve()
    check_version(checkout)
    result = new_result("upstream", seed=0, packages=("accelerate", "peft"))
    result |= {"command": "make upstream", "checkout": git_state(checkout) | {"note": note}, "rows": []}
    expected = read_expected()
    failed: set[Failure] = set()
    classes: set[str] = set()  # of tests that ran
    for model in models.split(","):
        unpatched, _ = run_tests(checkout, model, SOFTMAX)
        classes |= {class_of(test) for test in unpatched}
        passing = [test for test, found in unpatched.items() if found["outcome"] == "passed"]
        report(model, SOFTMAX, len(passing), len(unpatched))
        for attention in ATTENTIONS:
            patched, refusals = run_tests(checkout, model, attention)
            missed = [test for test in passing if patched[test]["outcome"] != "passed"]
            counted = [test for test in passing if patched[test]["patched"] or test in missed]
            report(model, attention, len(counted) - len(missed), len(counted))
            failed |= {Failure(attention, test) for test in missed}
            row = {"model": model, "attention": attention, "passed_unpatched": len(passing), "counted": len(counted)}
            row |= {"passed": len(counted) - len(missed), "refusals": refusals}
            row["failed"] = {test: expected.get(Failure(attention, test), TODO) for test in sorted(missed)}
            result["rows"].append(row)
    if update:
        expected = {key: why for key, why in expected.items() if key in failed or class_of(key.test) not in classes}
        expected |= {key: TODO for key in sorted(failed - set(expected))}
        write_expected(expected)
    faults = list(find_faults(expected, failed, classes))
    print("\n".join([*faults, f"The output of pytest is in {OUTPUT.name}."]))
    if faults:
        raise SystemExit(f"{len(faults)} outcomes are not as {EXPECTED.name} says.")
    if tuple(models.split(",")) == MODELS:
        write_result(result, RESULT)
        print(f"Wrote {RESULT.relative_to(ROOT)}; now run `make readme`.")


def report(model: str, attention: str, passed: int, tests: int) -> None:
    print(f"{model:<12}{attention:<9}{passed:>4} of {tests} tests pass", flush=True)


def class_of(test: str) -> str:
    return test.partition("::")[0]


def find_faults(expected: dict[Failure, str], failed: set[Failure], classes: set[str]) -> Iterator[str]:
    """What differs between the list and a run of these test classes."""
    for key in sorted(failed):
        if key not in expected:
            yield f"fails, but is not listed: {key.test} with {key.attention}"
        elif expected[key] == TODO:
            yield f"fails, but has no reason: {key.test} with {key.attention}"
    for key in sorted(set(expected) - failed):
        if class_of(key.test) in classes:
            yield f"does not fail, but is listed: {key.test} with {key.attention}"


def run_tests(checkout: Path, model: str, attention: str) -> tuple[Outcomes, dict[str, int]]:
    """(outcomes of a model's tests, how often which model could not be patched)."""
    OUTPUT.mkdir(exist_ok=True)
    outcomes, log = OUTPUT / f"{model}-{attention}.json", OUTPUT / f"{model}-{attention}.log"
    outcomes.unlink(missing_ok=True)
    options = ["-q", "-p", "no:cacheprovider", "-o", "log_cli=0"]
    command = [sys.executable, HERE / "patched_pytest.py", attention, outcomes, *options]
    with tempfile.TemporaryDirectory() as empty, log.open("w", encoding="utf-8") as file:
        # The same tests on every machine: nothing from the Hub, nothing on accelerators. Slow tests include export.
        fixed = {"HF_HUB_OFFLINE": "1", "HF_HOME": empty, "CUDA_VISIBLE_DEVICES": "", "RUN_SLOW": "1"}
        environment = {**os.environ, **fixed, "OMP_NUM_THREADS": "1"}
        tests = f"tests/models/{model}/test_modeling_{model}.py"
        subprocess.run([*command, tests], cwd=checkout, env=environment, stdout=file, check=False)
    if not outcomes.exists():
        raise SystemExit(f"pytest did not finish; see {log}.")
    document = json.loads(outcomes.read_text(encoding="utf-8"))
    found = {test.partition("::")[2]: each for test, each in document["tests"].items()}
    if not found:
        raise SystemExit(f"{tests} has no tests that could be collected; see {log}.")
    return found, document["refusals"]


def clone() -> Path:
    """A shallow clone of the installed release."""
    tag = f"v{transformers.__version__}"
    folder = OUTPUT / f"transformers-{tag}"
    if not folder.exists():
        command = ["git", "clone", "--quiet", "--depth", "1", "--branch", tag, REPOSITORY, str(folder)]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"{tag} of {REPOSITORY} cannot be cloned; give a checkout: make upstream TRANSFORMERS=DIR")
    return folder


def check_version(checkout: Path) -> None:
    source = checkout / "src" / "transformers" / "__init__.py"
    if not source.exists() or not (checkout / "tests" / "models").exists():
        raise SystemExit(f"{checkout} is not a checkout of transformers: it needs src/transformers and tests/models.")
    version = re.search(r'^__version__ = "(.*)"', source.read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    if version != transformers.__version__:
        raise SystemExit(
            f"{checkout} has transformers {version}, but {transformers.__version__} is installed; check out "
            f"v{transformers.__version__}."
        )


def git_state(checkout: Path) -> dict[str, Any]:
    """Commit of the checkout and whether it has changes; nulls for a folder that is no working copy."""

    def git(*words: str) -> str | None:
        done = subprocess.run(["git", "-C", checkout, *words], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else None

    changes = git("status", "--porcelain", "tests")
    return {"commit": git("rev-parse", "HEAD"), "changed": None if changes is None else bool(changes)}


def read_expected() -> dict[Failure, str]:
    """Reasons of expected failures."""
    found: dict[Failure, str] = {}
    for group in yaml.safe_load(EXPECTED.read_text(encoding="utf-8")) or []:
        for test, classes in group["tests"].items():
            for attention in group.get("attention", ATTENTIONS):
                for test_class in classes:
                    key = Failure(attention, f"{test_class}::{test}")
                    if key in found:
                        raise SystemExit(f"{EXPECTED.name} lists {key.test} twice for {attention}.")
                    found[key] = group["reason"]
    return found


def write_expected(expected: dict[Failure, str]) -> None:
    """The same list, grouped; the comment at the top of the file stays."""
    attentions: dict[tuple[str, str], list[str]] = {}
    for key, reason in expected.items():
        attentions.setdefault((reason, key.test), []).append(key.attention)
    groups: dict[tuple[str, tuple[str, ...]], dict[str, list[str]]] = {}
    for (reason, name), names in attentions.items():
        test_class, _, test = name.partition("::")
        groups.setdefault((reason, tuple(sorted(names))), {}).setdefault(test, []).append(test_class)
    document = [
        {"reason": reason}
        | ({} if names == ATTENTIONS else {"attention": list(names)})
        | {"tests": {test: sorted(classes) for test, classes in sorted(tests.items())}}
        for (reason, names), tests in groups.items()
    ]
    comment = re.match(r"(#.*\n)*", EXPECTED.read_text(encoding="utf-8"))[0]
    text = yaml.safe_dump(document, sort_keys=False, width=120, default_flow_style=None, allow_unicode=True)
    EXPECTED.write_text(comment + text, encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
