"""Pages of the site that are not in `docs`: documents from elsewhere in the repository, and the command line."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "recipes/README.md", "recipes/results/README.md")
FOLDER = "project"
COMMANDS = "reference/commands.md"
LINK = re.compile(r"(?<!!)\[([^]\n]*)\]\(([^)#:\s]+)\)")
TARGET = re.compile(r"\]\(([^)#:\s]+)(?=[)#])")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents, the files that they link to, and the reference of the command line."""
    root = Path(config.config_file_path).parent
    for document in DOCUMENTS:
        text = (root / document).read_text(encoding="utf-8")
        linked = [root / document, *((root / document).parent / target for target in TARGET.findall(text))]
        for path in linked:
            relative = path.resolve().relative_to(root.resolve())
            name = f"{FOLDER}/{relative.as_posix()}"
            if path.is_file() and relative.parts[0] != "docs" and files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, COMMANDS, content=_commands(root)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Documents are written for readers of the repository, who see folders, and for a Markdown in which lists and
    tables need no blank line before them.
    """
    if not page.file.src_uri.startswith(f"{FOLDER}/"):
        return markdown
    here = Path(page.file.abs_src_path).parent
    markdown = LINK.sub(lambda link: link[1] if (here / link[2]).is_dir() else link[0], markdown)
    markdown = TARGET.sub(lambda target: f"]({_on_site(here, target[1], page, config)}", markdown)
    return re.sub(r"(?m)^((?!-|  |\|).*\S)\n(?=- |\|)", r"\1\n\n", markdown)


def _on_site(here: Path, target: str, page: Any, config: Any) -> str:
    """A link to a page of `docs`, which the site has at its root."""
    path, docs = (here / target).resolve(), Path(config.docs_dir).resolve()
    if not path.is_relative_to(docs):
        return target
    return os.path.relpath(path.relative_to(docs), Path(page.file.src_uri).parent)


def _commands(root: Path) -> str:
    """What `--help` says of every command."""
    words = ["-m", "typer", "hf_rfattn.cli", "utils", "docs", "--name", "hf-rfattn", "--title", "Command line"]
    text = subprocess.run([sys.executable, *words], cwd=root, check=True, stdout=subprocess.PIPE, text=True).stdout
    return re.sub(r"(?m)^(\* `[a-z]+`): .*\.\.\.$", r"\1", text)  # what typer has cut short stands below anyway
