"""Pages of the site that are not in `docs`: documents from elsewhere in the repository, and the command line.

All links are written for readers of the repository, where GitHub follows them; here they are changed to those of the
site. Files outside `docs` are below `project` there.
"""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md", "recipes/results/README.md")
FOLDER = "project"
COMMANDS = "reference/commands.md"
LINK = re.compile(r"(?<!!)\[([^]\n]*)\]\(([^)#:\s]+)\)")
TARGET = re.compile(r"\]\(([^)#:\s]+)(?=[)#])")
IMAGE = re.compile(r"(?m)^!\[[^]\n]*\]\(([^)\s]+)\)$")
CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
UNIT = re.compile(r"(?<=\d) (?=×|%|ms\b|[KMG]iB\b)")
NAME = re.compile(r"<code>(?=(?:[^\s<]{1,28}|--[^\n<]{1,22}|[^\n<]{1,18})</code>)")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents, the files outside `docs` that any page links to, and the reference of the command line."""
    root = Path(config.config_file_path).parent.resolve()
    own = [Path(file.abs_src_path) for file in files.documentation_pages()]
    for document in [*(root / name for name in DOCUMENTS), *own]:
        targets = TARGET.findall(document.read_text(encoding="utf-8"))
        for path in (document, *(document.parent / target for target in targets)):
            name = _place(path, root)
            if path.is_file() and name.startswith(f"{FOLDER}/") and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, COMMANDS, content=_commands(root)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Links as the site needs them; plots and drawings open in full size, since small screens make them small.

    Documents from elsewhere are written for a Markdown in which lists and tables need no blank line before them.
    """
    if page.file.abs_src_path is None:
        return markdown
    root, here = Path(config.config_file_path).parent.resolve(), Path(page.file.abs_src_path).parent
    markdown = LINK.sub(lambda link: link[1] if (here / link[2]).is_dir() else link[0], markdown)
    folder = Path(page.file.src_uri).parent
    markdown = TARGET.sub(lambda target: f"]({os.path.relpath(_place(here / target[1], root), folder)}", markdown)
    markdown = IMAGE.sub(r"[\g<0>](\1)", markdown)
    if not page.file.src_uri.startswith(f"{FOLDER}/"):
        return markdown
    return re.sub(r"(?m)^((?!-|  |\|).*\S)\n(?=- |\|)", r"\1\n\n", markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Keep numbers and their units, and the parts of a name or option, on one line."""
    html = CELL.sub(lambda cell: UNIT.sub("&nbsp;", cell[0]), html)
    return NAME.sub('<code class="name">', html)


def _place(path: Path, root: Path) -> str:
    """Where the site has a file of the repository."""
    relative = path.resolve().relative_to(root)
    if relative.parts[0] == "docs":
        return relative.relative_to("docs").as_posix()
    return f"{FOLDER}/{relative.as_posix()}"


def _commands(root: Path) -> str:
    """What `--help` says of every command. typer's own list of commands is not grouped, and cuts descriptions short; it
    does not know of examples.
    """
    words = ["-m", "typer", "hf_rfattn.cli", "utils", "docs", "--name", "hf-rfattn", "--title", "Command line"]
    text = subprocess.run([sys.executable, *words], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    first = dict(re.findall(r"(?m)^##+ `hf-rfattn (?:\w+ )?(\w+)`\n\n(.+)$", text))
    text = re.sub(r"(?m)^\* `([a-z]+)`: .*$", lambda found: f"* `{found[1]}`: {first[found[1]]}", text)
    words = [sys.executable, "-m", "hf_rfattn", "--help"]
    shown = subprocess.run(words, cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    groups = [
        f"**{title}**:\n\n" + "".join(f"* `{name}`: {first[name]}\n" for name in re.findall(r"(?m)^  (\w+)", rows))
        for title, rows in re.findall(r"(?m)^(\w.*):\n((?:  +\w.*\n?)+)", shown)
    ]
    text = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+", lambda found: "\n".join(groups), text, count=1)
    example = r"\x08\nExample:\n((?:  .*\n?)+)"
    return re.sub(example, lambda found: f"**Example**:\n\n```\n{textwrap.dedent(found[1])}```\n", text)
