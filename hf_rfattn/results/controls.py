"""Rows of a table that show what attention itself contributes."""

from collections.abc import Iterable, Sequence

NO_ATTENTION, NEAR, FAR = "control: no attention", "control: window alone", "far field of fmm alone"
CONTROLS = (NO_ATTENTION, NEAR)  # not meant to be used


def control_of(names: Sequence[str], others: Iterable[Sequence[str]]) -> str | None:
    """What a row is a control of, beside others in one table.

    `names`: the mechanisms of a row, as `hf_rfattn.mechanism_names_in` gives them; empty for a row whose layers differ.

    >>> control_of(["average"], []), control_of(["favor+"], [[]]), control_of(["favor+"], [["fmm", "favor+"]])
    ('control: no attention', None, 'far field of fmm alone')
    """
    if list(names) == ["average"]:
        return NO_ATTENTION
    if list(names) == ["band"]:
        return NEAR
    far = {name for other in others if other[:1] == ["fmm"] for name in other[1:]}
    return FAR if len(names) == 1 and names[0] in far else None
