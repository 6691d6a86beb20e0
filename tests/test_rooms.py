"""The import graph: a room of the package uses those below it, never those above, and lower rooms know torch alone.

Imports are read from the source, wherever they stand: at the top, in a function, or for type checkers.
"""

import ast
import re
import sys
from pathlib import Path

import pytest
import torch
from support.models import tiny_bert, tiny_llama

import hf_rfattn

PACKAGE = Path(hf_rfattn.__file__).parent
RECIPES = PACKAGE.parent / "recipes"

# From below to above. A module belongs to the longest name here that its own begins with.
ROOMS = [
    "install",
    "results",
    "import_hook",
    "ops",
    "features",
    "mrf",
    "mechanisms",
    "integration",
    "conversion",
    "bench",
    "study",
    "hub",
    "cli",
    "__main__",
]
TORCH_ALONE = ("ops", "features", "mrf", "mechanisms")
FOR_RECIPES = ("results", "bench", "study", "hub.scores")  # besides the public names of hf_rfattn


def module_name(path):
    """integration/__init__.py → integration"""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module):
    """Its place in ROOMS, or None."""
    found = [name for name in ROOMS if module == name or module.startswith(f"{name}.")]
    return ROOMS.index(max(found, key=len)) if found else None


def imports(path, package):
    """(line, what is imported) for every import of a file: "torch.nn", "hf_rfattn.ops.tiles", …

    Names that are imported from a module come with it; public names come from where they live.
    """
    homes = hf_rfattn._HOME
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            up = package.split(".")
            above = up[: len(up) - node.level + 1] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                home = homes.get(alias.name, alias.name) if source == "hf_rfattn" else alias.name
                yield node.lineno, f"{source}.{home}"


FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")  # which names all rooms


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_no_room_reaches_into_one_above_it(path):
    own = module_name(path)
    assert room(own) is not None, f"{own} belongs to no room: put it where it belongs in ROOMS, from below to above."
    folder = own if path.name == "__init__.py" else own.rpartition(".")[0]
    for line, imported in imports(path, f"hf_rfattn.{folder}".rstrip(".")):
        inner = imported.removeprefix("hf_rfattn.")
        if imported == inner or inner.startswith("__version__"):
            continue
        assert room(inner) is not None, f"{path.name}:{line} imports {imported}, which belongs to no room in ROOMS."
        assert room(inner) <= room(own), (
            f"{path.relative_to(PACKAGE.parent)}:{line} imports {imported}: {ROOMS[room(own)]!r} lies below "
            f"{ROOMS[room(inner)]!r} and must not know it. Move what both need into the lower room."
        )


@pytest.mark.parametrize("path", [p for p in FILES if module_name(p).startswith(TORCH_ALONE)], ids=module_name)
def test_attention_itself_needs_torch_alone(path):
    allowed = {"hf_rfattn", "torch", *sys.stdlib_module_names}
    if module_name(path) == "ops.fused":
        allowed.add("fla")  # when a kernel of it runs
    for line, imported in imports(path, f"hf_rfattn.{module_name(path)}"):
        assert imported.partition(".")[0] in allowed, (
            f"{path.relative_to(PACKAGE.parent)}:{line} imports {imported}; {', '.join(TORCH_ALONE)} use torch alone."
        )


@pytest.mark.parametrize("path", sorted(RECIPES.rglob("*.py")), ids=lambda path: path.stem)
def test_recipes_use_the_public_api_and_results_alone(path):
    for line, imported in imports(path, "recipes"):
        inner = imported.removeprefix("hf_rfattn.")
        if imported != inner and inner not in hf_rfattn._HOME.values():
            assert inner.startswith(FOR_RECIPES), (
                f"recipes/{path.name}:{line} imports {imported}; take it from hf_rfattn itself, or from its rooms "
                f"{' and '.join(FOR_RECIPES)}."
            )


def test_violations_are_seen(tmp_path):
    """What the tests above rest on: imports are found wherever they stand, and resolved."""
    file = tmp_path / "naughty.py"
    file.write_text(
        "import torch.nn\n"
        "from . import tiles\n"
        "def late():\n"
        "    from ..integration import discovery\n"
        "    from .. import patch_model\n"
        "    from hf_rfattn import publish, __version__\n"
    )
    assert list(imports(file, "hf_rfattn.ops")) == [
        (1, "torch.nn"),
        (2, "hf_rfattn.ops.tiles"),
        (4, "hf_rfattn.integration.discovery"),
        (5, "hf_rfattn.integration"),
        (6, "hf_rfattn.hub.publish"),
        (6, "hf_rfattn.__version__"),
    ]
    assert room("hub.publish") > room("bench.ops") > room("integration") > room("ops.tiles")
    assert room("operators") is None


def test_the_drawing_shows_the_same_rooms():
    """Of CONTRIBUTING.md, from top to bottom."""
    drawing = (PACKAGE.parent / "docs" / "rooms.svg").read_text(encoding="utf-8")
    drawn = ", ".join(re.findall(r'class="room">(.*?)<', drawing)).split(", ")
    assert drawn == ["cli", "__main__", *(name for name in reversed(ROOMS) if name not in ("cli", "__main__"))]


def test_no_test_imports_another():
    """What several tests need is in tests/support."""
    for path in Path(__file__).parent.rglob("*.py"):
        for line, imported in imports(path, path.parent.name):
            module = imported.partition(".")[0]
            assert module != "conftest" and not module.startswith("test_"), (
                f"{path.name}:{line} imports {imported}; put what both need into tests/support."
            )


@pytest.mark.parametrize(
    ("make", "attention", "files", "functions"), [(tiny_bert, "favor+", 7, 25), (tiny_llama, "fmm", 10, 44)]
)
def test_the_way_of_q_k_and_v_is_short(make, attention, files, functions):
    model = hf_rfattn.patch_model(make(num_hidden_layers=1), attention).eval()
    called = set()

    def note(frame, event, argument):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            called.add((code.co_filename, getattr(code, "co_qualname", code.co_name)))

    with torch.no_grad():
        model(torch.arange(1, 41)[None])  # so that what happens once has happened
        sys.setprofile(note)
        try:
            model(torch.arange(1, 41)[None])
        finally:
            sys.setprofile(None)
    assert 0 < len({name for name, _ in called}) <= files and len(called) <= functions, sorted(called)
