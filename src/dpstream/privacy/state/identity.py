"""Names that end up in noise keys are written identities, never names of the code.

A run's fingerprint, and with it every noise key, is a digest of everything that fixes its releases
besides the data. What goes into it is written here:

    class       its `identity`, unique and never changed
    parameter   its key, one of `keys`
    value       as `privacy/state/serial.py` writes it: fractions as n/d, floats as hex, dates as
                ISO, and so on; never a `repr`

So a class, a parameter or a module may get another name, and no release changes by a byte:

    class Sample(HistogramMechanism, identity="sample", keys="share"): share: ...
    class Sampled(HistogramMechanism, identity="sample", keys="share=part"): part: ...

A class that computes anything else than before, from the same parameters, needs a new identity.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, ClassVar

from dpstream.privacy.amounts import as_text
from dpstream.privacy.state.serial import encode, storable


class Identified:
    """Base of dataclasses whose parameters fix releases: mechanisms, queries and their parts.

    A subclass writes its `identity` and, in `keys`, a key for each of its own parameters: the same
    word, or `key=name` where the parameter now has another name. `identity=None` is for a common
    base that is never run itself. Fields with `repr=False` fix nothing and have no key.
    """

    identity: ClassVar[str | None] = None
    written_keys: ClassVar[Mapping[str, str]] = {}
    """The key of every parameter, by the parameter's name."""

    def __init_subclass__(cls, *, identity: str | None = "", keys: str = "", **others: Any) -> None:
        super().__init_subclass__(**others)
        pairs = [word.partition("=") for word in keys.split()]
        own = {name or key: key for key, _, name in pairs}
        inherited: dict[str, str] = {}
        for base in reversed(cls.__mro__[1:]):
            inherited |= getattr(base, "written_keys", {})
        _check(cls, identity, own, inherited)
        cls.identity, cls.written_keys = identity, inherited | own
        if identity is not None:
            storable(identity, keys=cls.written_keys)(cls)

    @classmethod
    def names_of_keys(cls) -> dict[str, str]:
        """What each parameter is called now, by its key."""
        return {key: name for name, key in cls.written_keys.items()}

    def written(self) -> dict[str, Any]:
        """The value of every parameter, by its key."""
        return {key: getattr(self, name) for name, key in self.written_keys.items()}


def _check(cls: type, identity: str | None, own: dict[str, str], inherited: dict[str, str]) -> None:
    """Refuse a class without an identity, or with a parameter that has no key of its own."""
    names = [
        name
        for name, kind in inspect.get_annotations(cls).items()
        if "ClassVar" not in str(kind) and name not in inherited
        if not (isinstance(field := vars(cls).get(name), dataclasses.Field) and not field.repr)
    ]
    bases = ", ".join(base.__name__ for base in cls.__bases__)
    if identity == "":
        keys = f', keys="{" ".join(names)}"' if names else ""
        raise TypeError(
            f"{cls.__name__} has no identity: its noise would depend on the names in its code; "
            f'write class {cls.__name__}({bases}, identity="..."{keys}), with a text that no other '
            "class has and that never changes"
        )
    if missing := [name for name in names if name not in own]:
        raise TypeError(
            f"{cls.__name__} has no key for {', '.join(missing)}; add it to keys, such as "
            f'keys="{" ".join(names)}": a key is what noise depends on, and never changes'
        )
    if unknown := [name for name in own if name not in names]:
        raise TypeError(f"{cls.__name__} has a key for {unknown[0]!r}, which it does not declare")
    keys_of_all = [*inherited.values(), *own.values()]
    if len(set(keys_of_all)) < len(keys_of_all):
        raise TypeError(f"{cls.__name__} has one key for two parameters; got {keys_of_all}")


def canonical(value: object) -> str:
    """The text of a value that digests are made of: equal for equal parameters, for ever.

    >>> from fractions import Fraction
    >>> canonical((1, Fraction(1, 2), None, "a"))
    '{"$":"tuple","is":[1,{"$":"fraction","is":"1/2"},null,"a"]}'
    """
    return json.dumps(encode(value), separators=(",", ":"), sort_keys=True, allow_nan=False)


def readable(text: str | None) -> str:
    """What `canonical` wrote, as people write it.

    >>> from fractions import Fraction
    >>> readable(canonical(Fraction(3, 2))), readable(canonical((Fraction(-1, 3), "x", 0.5)))
    ('1.5', "(-1/3, 'x', 0.5)")
    >>> readable(None)
    'not given'
    """
    return "not given" if text is None else _shown(json.loads(text))


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    if not isinstance(value, dict):
        return repr(value)
    inside: Any = value["is"]
    match value["$"]:
        case "float":
            return repr(float.fromhex(inside))
        case "fraction":
            return as_text(Fraction(inside))
        case "tuple":
            return f"({', '.join(map(_shown, inside))}{',' if len(inside) == 1 else ''})"
        case "dict":
            return "{" + ", ".join(f"{_shown(key)}: {_shown(item)}" for key, item in inside) + "}"
        case "object":
            given = ", ".join(f"{key}={_shown(item)}" for key, item in inside.items())
            return f"{value['class']}({given})"
    return str(inside)
