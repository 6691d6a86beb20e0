"""The part on studies: what each command asks, and what it concluded from its own data."""

from typing import NamedTuple

from hf_rfattn.results import Block, Bullets, Heading, Paragraph, Table

from .pages import Documents, Page, measured_on

FOLDER = "studies"
NOTHING = Paragraph("Nothing has been studied yet.")


class Told(NamedTuple):
    title: str
    question: str
    finding: int  # number of the conclusion that the README shows
    options: str = ""  # of the command
    note: str = ""
    figures: tuple[str, ...] = ()  # files that the page shows; by default the one of its name


STUDIES = {
    "gram": Told(
        "Kernels",
        "How fast do random Fourier features approach Gaussian, Laplace and Cauchy Gram matrices?",
        finding=0,
        figures=("gram_matrices", "gram_error"),
    ),
    "mse": Told(
        "Projections",
        "What do orthogonal and Hadamard projections gain for the attention matrix, and how many blocks do the latter "
        "need?",
        finding=3,
        note="Hadamard blocks are multiplied, (H D_k)…(H D_1); the default here is three. The unpublished report that "
        "this project grew from measured one, and prints a sum of several, which is measured here too.",
        figures=("mse_normal", "mse_sparse", "mse_norms"),
    ),
    "time": Told(
        "Time", "From which size on is the fast Walsh-Hadamard transform faster than a matrix product?", finding=1
    ),
    "heads": Told(
        "Heads",
        "Which heads of a pretrained model can each mechanism stand for before training?",
        finding=1,
        options="--model demo",
        figures=("heads_error", "heads_kinds"),
    ),
    "rank": Told(
        "Rank",
        "What rank has attention outside a band around its diagonal?",
        finding=0,
        options="--model demo",
        note="The fast multipole view: attention as a band and a matrix of low rank. The rank for ε is the smallest "
        "whose best approximation of what lies outside the band errs by ε‖A‖ (Frobenius; the CSV has the spectral norm "
        "too).",
    ),
    "mrf": Told(
        "Markov random fields",
        "How well do random features work for linear-chain Markov random fields?",
        finding=3,
        figures=("mrf_error", "mrf_time"),
    ),
}


def whole(documents: Documents, page: Page) -> list[Block]:
    """All conclusions and all figures."""
    blocks: list[Block] = []
    for name, told in STUDIES.items():
        document = documents.get(f"{FOLDER}/{name}.json")
        if document is None:
            continue
        blocks.append(Heading(told.title, 3))
        blocks.append(Paragraph(f"{told.question} `{_command(name)}`, on {measured_on(document)}."))
        blocks += [Paragraph(told.note)] if told.note else []
        blocks.append(Bullets(document["conclusions"]))
        for figure in told.figures or (name,):
            what = f"{told.title}: {figure.replace('_', ' ')}"
            blocks.append(Paragraph(f"![{what}]({page.address(f'{FOLDER}/{figure}.png')})"))
    return blocks or [NOTHING]


def short(documents: Documents, page: Page) -> list[Block]:
    """What each asks, and one thing it found."""
    rows = [
        [f"`{_command(name)}`", told.question, documents[file]["conclusions"][told.finding]]
        for name, told in STUDIES.items()
        if (file := f"{FOLDER}/{name}.json") in documents
    ]
    return [Table("", ["command", "question", "a finding"], rows, aligned=False)] if rows else [NOTHING]


def _command(name: str) -> str:
    return " ".join(filter(None, ["hf-rfattn study", name, STUDIES[name].options, "--full"]))
