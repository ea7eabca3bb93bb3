"""Finds the implementation of an operation by name: one of ours, or a module of anybody's (DESIGN R4)."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


class LacksOperation(ValueError):
    """A module that is there, and has no function of that name."""


def find(operation: str, name: str, known: Mapping[str, str]) -> Any:
    """The function called `name` in `known` ("module:function"), else function `operation` of the module `name`.

    ValueError if there is neither, with the known names; `LacksOperation` if only the function is missing. What goes
    wrong inside somebody's module is raised as it is.
    """
    if name in known:
        module, _, function = known[name].partition(":")
        return getattr(importlib.import_module(module), function)
    try:
        found = importlib.import_module(name)
    except (ModuleNotFoundError, ValueError, TypeError) as error:
        # Its own imports may fail too, and then their names are what is of use.
        if isinstance(error, ModuleNotFoundError) and not (name == error.name or name.startswith(f"{error.name}.")):
            raise
        choice = ", ".join(known)
        raise ValueError(
            f"unknown {operation} backend {name!r}: expected one of {choice}, or a module that defines {operation}"
        ) from None
    if not hasattr(found, operation):
        raise LacksOperation(f"{operation} backend {name!r} is a module without a function {operation}")
    return getattr(found, operation)
