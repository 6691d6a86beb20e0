"""Wraps methods of other libraries."""

import functools
import inspect
from collections.abc import Callable
from typing import Any


def wraps_method(owner: Any, name: str) -> Callable[[Callable], Callable]:
    """Decorator: the function replaces `owner.name` and receives the original method as its first argument."""

    def install(function: Callable) -> Callable:
        found = inspect.getattr_static(owner, name)
        original = found.__func__ if isinstance(found, classmethod) else found

        @functools.wraps(original)
        def method(*args: Any, **kwargs: Any) -> Any:
            return function(original, *args, **kwargs)

        setattr(owner, name, classmethod(method) if isinstance(found, classmethod) else method)
        return function

    return install
