"""Counts and bytes with their units."""


def si(count: float) -> str:
    """
    >>> si(12_345_678)
    '12.35 M'
    """
    return _scaled(count, 1000, ("", " k", " M", " G", " T", " P", " E"))


def in_bytes(count: float) -> str:
    """
    >>> in_bytes(3 * 2**20)
    '3 MiB'
    """
    return _scaled(count, 1024, (" B", " KiB", " MiB", " GiB", " TiB", " PiB"))


def _scaled(count: float, base: int, units: tuple[str, ...]) -> str:
    power = 0
    while count >= base and power < len(units) - 1:
        count, power = count / base, power + 1
    return f"{count:.4g}{units[power]}"
