"""The parts of README.md, recipes/results/README.md and docs/reference/upstream.md that hold numbers, made from the
result files in recipes/results and from nothing else.

A part stands between `<!-- name:start -->` and `<!-- name:end -->`. To add one, write a function from all result
documents (by file name) and a page to blocks, add it to `PAGES`, and put its markers where it belongs. Plots that a
part shows are drawn beside their result files, unless they were drawn from the same data before. Run it with
`make readme`; again, and nothing changes.
"""

import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import PIL.Image
import typer
from readme import accuracy, speed, studies, upstream
from readme.guide import guide
from readme.pages import Documents, Page

from hf_rfattn.results import Block, as_markdown, read_result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("recipes/results")
MARK = "Data"  # of a PNG: what it was drawn from

Parts = dict[str, Callable[[Documents, Page], list[Block]]]


def which_when(documents: Documents, page: Page) -> list[Block]:
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
    Path("docs/reference/upstream.md"): (Page(f"../../{RESULTS}/"), {"upstream": upstream.whole}),
}


def main(root: Annotated[Path, typer.Option(help="Of the repository whose pages are filled.")] = ROOT) -> None:
    """Fill the marked parts of all pages from result files."""
    documents = read_documents(root / RESULTS)
    draw_plots(documents, root / RESULTS)
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
    return {str(path.relative_to(folder)): read_result(path) for path in paths}


def fill(text: str, documents: Documents, page: Page, parts: Parts) -> str:
    """The same text with every marked part made anew."""
    for name, make in parts.items():
        pattern = re.compile(rf"(<!-- {name}:start -->\n).*?(<!-- {name}:end -->)", flags=re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise ValueError(f"The page must have <!-- {name}:start --> and <!-- {name}:end --> once each.")
        made = as_markdown(make(documents, page), page.address).rstrip("\n")
        text = pattern.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    return text


def draw_plots(documents: Documents, folder: Path) -> list[Path]:
    """Beside result files whose plots the pages show, where there is none or one of other data; which were drawn."""
    drawn = []
    for image, data in (*speed.plots(documents), *accuracy.plots(documents)):
        path, mark = folder / image.name, hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
        if not path.exists() or mark_of(path) != mark:
            image.draw().savefig(path, dpi=150, metadata={MARK: mark, "Software": None})
            drawn.append(path)
    return drawn


def mark_of(path: Path) -> str | None:
    """What a plot says of the data it was drawn from."""
    with PIL.Image.open(path) as image:
        return image.info.get(MARK)


if __name__ == "__main__":
    typer.run(main)
