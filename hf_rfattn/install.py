"""How to install this package. Messages and model cards take it from here; a test compares README and docs with it."""

PACKAGE = "."  # the argument of pip; "hf-rfattn" once there is a release on PyPI
WHERE = " in a clone of the hf-rfattn repository"  # empty once there is a release


def install_command(extra: str = "") -> str:
    """Return the command that installs this package, with an extra.

    >>> install_command("gpu")
    "`pip install '.[gpu]'` in a clone of the hf-rfattn repository"
    """
    target = f"'{PACKAGE}[{extra}]'" if extra else PACKAGE
    return f"`pip install {target}`{WHERE}"
