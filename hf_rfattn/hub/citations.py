"""The papers behind the mechanisms, as BibTeX; the entries are in references.bib."""

import re
from importlib.resources import files
from typing import Any

from ..mechanisms.naming import mechanism_names_in, mechanisms_in

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


def cite(attention: Any) -> list[str]:
    """Entries for the mechanisms of a result's `attention`, FAVOR++ among them if its options ask for it.

    >>> [entry.partition(",")[0] for entry in cite({"mechanism": "fmm", "far": ["favor+"]})]
    ['@inproceedings{nguyen2021fmmformer', '@inproceedings{choromanski2021performers']
    >>> [entry.partition(",")[0] for entry in cite({"mechanism": "favor+", "variance": "optimal"})]
    ['@inproceedings{choromanski2021performers', '@inproceedings{likhosherstov2022chefs']
    """
    keys = [key for name in mechanism_names_in(attention) for key in PAPERS.get(name, [])]
    if any(config.get("variance") == "optimal" for config in mechanisms_in(attention)):
        keys.append(FAVOR_PLUS_PLUS)
    entries = bibliography()
    return [entries[key] for key in dict.fromkeys(keys)]
