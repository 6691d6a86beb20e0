"""Packages that not everybody needs come with extras; where one is missing, the error names its extra."""

from collections.abc import Iterator
from contextlib import contextmanager

EXTRAS = {
    "matplotlib": "plots",
    "psutil": "bench",
    "rich": "bench",
    "accelerate": "recipes",
    "datasets": "recipes",
}


@contextmanager
def naming_the_extra() -> Iterator[None]:
    """Turn the error of a missing optional package into one that says how to install it.

    >>> with naming_the_extra():
    ...     raise ModuleNotFoundError("No module named 'psutil'", name="psutil")
    Traceback (most recent call last):
    ImportError: This needs the package psutil: pip install 'hf-rfattn[bench]'
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ImportError(f"This needs the package {package}: pip install 'hf-rfattn[{EXTRAS[package]}]'") from error
