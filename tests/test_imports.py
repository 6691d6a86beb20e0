"""What importing this package imports, seen in fresh processes, and that the import hook does its work there."""

import json
import subprocess
import sys
from importlib import import_module, invalidate_caches
from pathlib import Path

import pytest

import hf_rfattn
from hf_rfattn import import_hook

UNNEEDED = {
    "accelerate", "datasets", "evaluate", "hf_rfattn.bench", "hf_rfattn.hub", "jinja2", "matplotlib", "rich", "typer",
}  # fmt: skip
HEAVY = {"huggingface_hub", "torch", "transformers"}


def run(code, *arguments):
    """What a fresh process that imports our package from where we did prints as JSON in its last line."""
    root = str(Path(hf_rfattn.__file__).parent.parent)
    code = f"import json, sys; sys.path.insert(0, {root!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_import_imports_nothing_heavy():
    imported = set(run("import hf_rfattn; print(json.dumps(list(sys.modules)))"))
    assert "hf_rfattn" in imported
    assert not imported & (UNNEEDED | HEAVY)


def test_mechanisms_do_not_need_transformers():
    imported = set(run("import hf_rfattn; hf_rfattn.build_mechanism; print(json.dumps(list(sys.modules)))"))
    assert "torch" in imported
    assert not imported & (UNNEEDED | {"transformers"})


def test_patching_imports_no_more_than_the_model_itself():
    plain = """
from transformers import BertConfig, BertModel
model = BertModel(BertConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
"""
    patched = plain + 'import hf_rfattn; hf_rfattn.patch_model(model, "favor+")'
    forward = "\nimport torch; model(torch.ones(1, 9, dtype=torch.long)); print(json.dumps(list(sys.modules)))"
    of_transformers, imported = set(run(plain + forward)), set(run(patched + forward))
    assert "hf_rfattn.integration" in imported
    assert not (imported - of_transformers) & UNNEEDED


def test_help_does_not_import_torch():
    loop = """
from hf_rfattn.cli import app
for command in ([], *([name] for name in sys.argv[1:])):
    try:
        app([*command, "--help"])
    except SystemExit as end:
        if end.code:
            raise
print(json.dumps(list(sys.modules)))
"""
    imported = set(run(loop, "list", "inspect", "patch", "unpatch", "bench", "card", "publish"))
    assert "hf_rfattn.cli" in imported
    assert not imported & (HEAVY | {"matplotlib", "jinja2"})


@pytest.fixture
def modules_here(monkeypatch, tmp_path):
    """A folder for the modules that the hook watches and imports, in place of transformers' and ours."""
    monkeypatch.setattr(import_hook, "FOLLOWS", {"modeling_here": "integration_here"})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("modeling_here", "integration_here"):
        sys.modules.pop(name, None)


def test_the_hook_follows_an_import_even_if_it_failed_once(modules_here):
    """That it follows transformers and PEFT is seen in fresh processes, in test_checkpoint.py and test_adapters.py."""
    (modules_here / "modeling_here.py").write_text("raise RuntimeError('not this time')")
    (modules_here / "integration_here.py").write_text("import modeling_here; complete = modeling_here.complete")
    import_hook.follow_transformers()
    with pytest.raises(RuntimeError, match="not this time"):
        import_module("modeling_here")
    assert "integration_here" not in sys.modules
    (modules_here / "modeling_here.py").write_text("complete = True  # now")
    invalidate_caches()
    import_module("modeling_here")
    assert sys.modules["integration_here"].complete
    del sys.modules["integration_here"]
    import_hook.follow_transformers()  # what it would follow is there already
    assert sys.modules["integration_here"].complete


def test_public_names():
    """What the stub names can be imported, under the name it has in its module."""
    assert "patch_model" in hf_rfattn.__all__ and set(hf_rfattn.__all__) <= set(dir(hf_rfattn))
    assert all(getattr(hf_rfattn, name).__name__ == name for name in hf_rfattn.__all__)


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match="has no attribute 'patch_modle'"):
        hf_rfattn.patch_modle  # noqa: B018
