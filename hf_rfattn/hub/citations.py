"""The papers behind the mechanisms, as BibTeX; the entries are in references.bib."""

import json
import re
from importlib.resources import files
from typing import Any

PAPERS = {
    "favor+": ["choromanski2021performers"],
    "rff": ["rahimi2007random", "peng2021random"],
    "linear": ["katharopoulos2020transformers"],
    "hedgehog": ["zhang2024hedgehog"],
    "fmm": ["nguyen2021fmmformer"],
    "band": ["nguyen2021fmmformer"],  # its near field
}
FAVOR_PLUS_PLUS = "likhosherstov2022chefs"


def bibliography() -> dict[str, str]:
    """Every entry by its key."""
    text = files(__package__).joinpath("references.bib").read_text(encoding="utf-8")
    entries = (entry.strip() for entry in re.split(r"(?m)^(?=@)", text))
    return {entry[entry.index("{") + 1 : entry.index(",")]: entry for entry in entries if entry}


def cite(names: list[str], attention: Any) -> list[str]:
    """Entries for mechanisms by name, and for FAVOR++ if it is among the options of `attention`.

    >>> [entry.partition(",")[0] for entry in cite(["fmm", "favor+"], {})]
    ['@inproceedings{nguyen2021fmmformer', '@inproceedings{choromanski2021performers']
    """
    keys = [key for name in names for key in PAPERS.get(name, [])]
    if '"variance": "optimal"' in json.dumps(attention):
        keys.append(FAVOR_PLUS_PLUS)
    entries = bibliography()
    return [entries[key] for key in dict.fromkeys(keys)]
