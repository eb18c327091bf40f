"""Reads attributes of objects without running code of their classes."""

from __future__ import annotations

import types
from typing import Any

from torch import nn

__all__ = ["HasCodeError", "attribute"]

# Classes whose attributes are looked up as those of any object.
_ORDINARY = (object, types.SimpleNamespace)
_DICTIONARIES = (types.GetSetDescriptorType, types.MemberDescriptorType)  # of __dict__, unless a class defines another
_MISSING = object()
_OF_MODULES = ("_parameters", "_buffers", "_modules")


class HasCodeError(Exception):
    """Reading an attribute would run code, or raise."""


def attribute(owner: Any, name: str) -> Any:
    """Return ``owner.name``: a value in the object's dictionary, in a slot or in its class, or a part of a module.

    Raises
    ------
    HasCodeError
        If there is no such attribute, or if it is a method, a property or another descriptor, or if the class changes
        how attributes are looked up.
    """
    of_class: Any = _MISSING
    fallback: Any = None
    dictionary: Any = None
    for base in type(owner).__mro__:
        members = vars(base)
        if base not in _ORDINARY and "__getattribute__" in members:
            raise HasCodeError
        if of_class is _MISSING and name in members:
            of_class = members[name]
        fallback = fallback or members.get("__getattr__")
        dictionary = dictionary or members.get("__dict__")
    if type(of_class) is types.MemberDescriptorType:
        return _in_slot(of_class, owner)
    kind = type(of_class)
    if hasattr(kind, "__set__") or hasattr(kind, "__delete__"):  # these precede the object's own attributes
        raise HasCodeError
    if dictionary is not None and type(dictionary) not in _DICTIONARIES:
        raise HasCodeError
    own: dict[str, Any] = {} if dictionary is None else dictionary.__get__(owner)
    if name in own:
        return own[name]
    if of_class is not _MISSING:
        if hasattr(kind, "__get__"):
            raise HasCodeError
        return of_class
    if fallback is nn.Module.__getattr__:
        for parts in _OF_MODULES:
            if name in own.get(parts, ()):
                return own[parts][name]
    raise HasCodeError


def _in_slot(slot: types.MemberDescriptorType, owner: Any) -> Any:
    try:
        return slot.__get__(owner)
    except AttributeError:
        raise HasCodeError from None
