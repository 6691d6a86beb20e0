"""The parts of README.md and recipes/results/README.md that hold numbers, made from the result files in recipes/results
and from nothing else.

A part stands between `<!-- name:start -->` and `<!-- name:end -->`. To add one, write a function from all result
documents (by file name) and a page to Markdown, add it to `PAGES`, and put its markers where it belongs. Plots that a
part shows and that do not lie beside their result file yet are drawn. Run it with `make readme`; again, and nothing
changes.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.blocks import Image
from readme import accuracy, speed, studies
from readme.guide import guide
from readme.markdown import Documents, Page

from hf_rfattn.bench import decode_report, model_report, ops_report

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("recipes/results")

Parts = dict[str, Callable[[Documents, Page], str]]


def which_when(documents: Documents, page: Page) -> str:
    return guide(accuracy.summary_of("transfer", documents), list(documents.values()))


PAGES: dict[Path, tuple[Page, Parts]] = {
    Path("README.md"): (
        Page(f"{RESULTS}/"),
        {
            "pictures": accuracy.pictures,
            "accuracy": accuracy.short,
            "speed": speed.short,
            "guide": which_when,
            "studies": studies.short,
        },
    ),
    RESULTS / "README.md": (Page(""), {"accuracy": accuracy.whole, "speed": speed.whole, "studies": studies.whole}),
}


def main(root: Annotated[Path, typer.Option(help="Of the repository whose pages are filled.")] = ROOT) -> None:
    """Fill the marked parts of both pages from result files."""
    documents = read_documents(root / RESULTS)
    draw_missing_plots(documents, root / RESULTS)
    for name, (page, parts) in PAGES.items():
        before = (root / name).read_text(encoding="utf-8")
        after = fill(before, documents, page, parts)
        if after != before:
            (root / name).write_text(after, encoding="utf-8")
        print(f"{name}: {'as it was' if after == before else 'filled anew'}, from {len(documents)} result files")


def read_documents(folder: Path) -> Documents:
    """By file name; those of comparisons and studies lie in folders of their own."""
    folders = [folder, *(folder / name for name in (*accuracy.COMPARISONS, studies.FOLDER))]
    paths = [path for each in folders for path in sorted(each.glob("*.json"))]
    return {str(path.relative_to(folder)): json.loads(path.read_text(encoding="utf-8")) for path in paths}


def fill(text: str, documents: Documents, page: Page, parts: Parts) -> str:
    """The same text with every marked part made anew."""
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"The page must have <!-- {name}:start --> and <!-- {name}:end --> once each.")
        made = make(documents, page).rstrip("\n")
        text = pattern.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    return text


def draw_missing_plots(documents: Documents, folder: Path) -> None:
    """Beside result files whose plots the pages show."""
    draw: dict[str, Callable[[Any], Any]] = {
        "bench ops": lambda document: ops_report.plot(document, document["dtypes"][0]),
        "bench model": model_report.plot,
        "bench decode": decode_report.plot,
    }
    for name, document in documents.items():
        path = (folder / name).with_suffix(".png")
        if document["kind"] in draw and not path.exists():
            draw[document["kind"]](document).savefig(path, dpi=150)
    for name in accuracy.COMPARISONS:
        for block in accuracy.comparison(name, documents, Page("")):
            if isinstance(block, Image) and not (folder / name / block.name).exists():
                block.figure.savefig(folder / name / block.name, dpi=150)


if __name__ == "__main__":
    typer.run(main)
