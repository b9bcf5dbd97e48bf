"""Numbers for the operator, as Prometheus reads them. They are exact, and not private."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Labels = Mapping[str, str]
Sample = tuple[str, str, str, Labels, float]
"""Name, type, help, labels and value."""


def exposition(samples: Iterable[Sample]) -> str:
    """Prometheus' text format, version 0.0.4.

    >>> print(exposition([("rows_total", "counter", "Rows.", {"query": 'a"b'}, 5)]), end="")
    # HELP rows_total Rows.
    # TYPE rows_total counter
    rows_total{query="a\\"b"} 5
    """
    lines: list[str] = []
    told: set[str] = set()
    for name, kind, about, labels, value in sorted(samples, key=lambda each: each[0]):
        if name not in told:
            lines += [f"# HELP {name} {about}", f"# TYPE {name} {kind}"]
            told.add(name)
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        lines.append(f"{name}{{{inside}}} {value:.17g}" if inside else f"{name} {value:.17g}")
    return "\n".join([*lines, ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
