"""What the tour's live part looks like: a table that follows the stream, or lines in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dpstream.cli.demo_live import Found, Scene

_LABELS = {
    "running": ("the engine runs, process {pid}", "green"),
    "killed": ("kill -9 {pid}: the engine is gone; the clicks keep coming", "bold red"),
    "running again": ("the same command again: the engine goes on, process {pid}", "green"),
    "over": ("the last release is out", "green"),
}
_BARS = 28
_LINE_EVERY = 4  # releases between two lines in a pipe


@contextmanager
def watching(console: Console) -> Iterator[Callable[[Scene], None]]:
    """A callback that shows a scene: in place in a terminal, as a few lines elsewhere."""
    if console.is_terminal:
        with Live(console=console, refresh_per_second=8) as live:
            yield lambda scene: live.update(picture(scene))
        return
    told: list[str] = []

    def line(scene: Scene) -> None:
        due = scene.index % _LINE_EVERY == 1 and f"release {scene.index}"
        for news in (scene.state, due):
            if news and news not in told:
                told.append(news)
                text = in_words(scene) if news == due else _label(scene).plain
                console.print(text, soft_wrap=True)

    yield line


def picture(scene: Scene) -> Group:
    """The newest release beside the truth, and what the engine does."""
    head = Text(f"release {scene.index} of {scene.triggers}   {scene.rows:,} clicks so far   ")
    table = Table(box=None, pad_edge=False)
    for title, justify in (("page", "left"), ("visitors", "right"), ("± 2 stddev", "left")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    table.add_column("", width=_BARS)
    table.add_column("truth (demo only)", justify="right", style="dim")
    shown = by_page(scene.release)
    most = max([1.0, *(row["visitors"] for row in shown.values())])
    for page, truth in scene.truth.items():
        row = shown.get(page)
        if row is None:
            cells = [Text(page, style="dim"), Text("hidden", style="dim"), Text(), Text()]
        else:
            value, spread = row["visitors"], 2 * row["visitors_stddev"]
            bar = Text("█" * round(_BARS * max(value, 0) / most), style="cyan")
            cells = [Text(page), Text(f"{value:,.0f}"), Text(f"± {spread:,.0f}"), bar]
        table.add_row(*cells, f"{truth:,}")
    return Group(head + _label(scene), Text(), table)


def in_words(scene: Scene) -> str:
    """A release in one line."""
    rows = sorted(by_page(scene.release).items(), key=lambda item: -item[1]["visitors"])
    first = ", ".join(f"{page} {_value(row)}" for page, row in rows[:3])
    pages = f"{len(rows)} page{'s' * (len(rows) != 1)}"
    return f"release {scene.index} of {scene.triggers}: {pages}; {first}"


def summary(found: Found) -> Table:
    """The last release against the truth."""
    table = Table(box=None, pad_edge=False)
    table.add_column("page")
    table.add_column("published (± 2 stddev)", justify="right")
    table.add_column("truth (demo only)", justify="right", style="dim")
    shown = by_page(found.last)
    for page, truth in found.truth.items():
        row = shown.get(page)
        table.add_row(page, "hidden: too few users" if row is None else _value(row), f"{truth:,}")
    return table


def by_page(release: Any) -> dict[str, dict[str, Any]]:
    """Rows of a release by their page."""
    return {} if release is None else {row["page"]: row for row in release.to_pylist()}


def _value(row: dict[str, Any]) -> str:
    return f"{row['visitors']:,.0f} ± {2 * row['visitors_stddev']:,.0f}"


def _label(scene: Scene) -> Text:
    words, style = _LABELS[scene.state]
    return Text(words.format(pid=scene.pid), style=style)
