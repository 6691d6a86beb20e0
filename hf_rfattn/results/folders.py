"""Folders that are written as a whole, and disks that are full."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A folder to write to, which becomes the target when all is written; if that fails, nothing stays behind."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already and is not an empty folder; choose another one.")
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        yield partial
        if target.exists():
            target.rmdir()
        os.replace(partial, target)
    except Exception as error:
        if disk_is_full(error, target):
            raise ValueError(
                f"The disk of {target} is full, so nothing was written. Make room, or choose another folder."
            ) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def disk_is_full(error: Exception, folder: Path) -> bool:
    """Whether this is why writing to a folder failed; torch and safetensors each have an error of their own for it."""
    if (isinstance(error, OSError) and error.errno == errno.ENOSPC) or "No space left on device" in str(error):
        return True
    there = next(place for place in [folder.resolve(), *folder.resolve().parents] if place.exists())
    return shutil.disk_usage(there).free < 2**20
