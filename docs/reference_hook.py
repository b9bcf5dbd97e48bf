"""Reference pages, made from docstrings and from the commands while the site is built.

mkdocs calls `on_files`; `pages()` is what the tests read. Nothing is written into `docs/`.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

import typer.main

import dpstream
from dpstream import errors
from dpstream.cli.app import app
from dpstream.mechanisms import REGISTRY, find

_SECTION = re.compile(r"^(Guarantee|Unit|Delay|Paper):", re.MULTILINE)


def on_files(files: Any, config: Any) -> Any:
    """Add the pages to the site."""
    from mkdocs.structure.files import File

    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path in the site -> Markdown."""
    return {
        "reference/python.md": _python(),
        "reference/mechanisms.md": _mechanisms(),
        "reference/commands.md": _commands(),
    }


def _python() -> str:
    """Every public name of the package, and the errors."""
    parts = ["# Python\n\nWhat `import dpstream as dps` offers, from its docstrings.\n"]
    elsewhere = ("__version__", "errors", "ext", "mechanisms")
    names = sorted((name for name in dpstream.__all__ if name not in elsewhere), key=str.lower)
    parts += [_entry(f"dps.{name}", getattr(dpstream, name)) for name in names]
    parts.append("## `dps.errors`\n\n" + _block(inspect.getdoc(errors) or "", "text"))
    return "\n".join(parts)


def _mechanisms() -> str:
    """Every registered mechanism under its command-line name."""
    parts = [
        "# Mechanisms\n\n`dps.mechanisms.NAME(...)`, and `--mechanism name` on the command line.\n"
    ]
    for name in sorted(REGISTRY):
        cls = find(name)
        parts.append(_entry(f"{name}", cls, f"dps.mechanisms.{cls.__name__}"))
    return "\n".join(parts)


def _entry(title: str, what: Any, call: str | None = None) -> str:
    """Heading, signature, docstring, and the public methods of a class."""
    lines = [f"## `{title}`\n", _block(_signature(call or title, what), "python")]
    lines.append(_prose(inspect.getdoc(what) or ""))
    if inspect.isclass(what) and call is None:
        for name, member in inspect.getmembers(what):
            own = not name.startswith("_") and getattr(member, "__doc__", None)
            if own and name in _declared(what) and not isinstance(member, str | int | tuple):
                lines.append(_member(name, member))
    return "\n".join(lines) + "\n"


def _declared(what: type) -> set[str]:
    """Names defined in dpstream, not by Python, and no fields."""
    fields = {f.name for f in dataclasses.fields(what)} if dataclasses.is_dataclass(what) else set()
    ours = [cls for cls in what.__mro__ if cls.__module__.startswith("dpstream")]
    return {name for cls in ours for name in vars(cls)} - fields


def _member(name: str, member: Any) -> str:
    first = (inspect.getdoc(member) or "").partition("\n\n")[0].replace("\n", " ")
    call = _arguments(member) if callable(member) else ""
    return f"- `{name}{call}`: {first}"


def _signature(call: str, what: Any) -> str:
    return call + _arguments(what, width=88)


def _arguments(what: Any, width: int = 10_000) -> str:
    """Without types, which the docstrings and the type checker have."""
    try:
        found = inspect.signature(what)
    except (TypeError, ValueError):
        return ""
    kept = [p.replace(annotation=p.empty) for p in found.parameters.values() if p.name != "self"]
    text = str(found.replace(parameters=kept, return_annotation=found.empty))
    text = re.sub(r"<[\w. ]+ object at 0x\w+>|<factory>", "...", text)
    if len(text) <= width:
        return text
    lines = [re.sub(r"<[\w. ]+ object at 0x\w+>|<factory>", "...", str(p)) for p in kept]
    stars = [number for number, p in enumerate(kept) if p.kind is p.KEYWORD_ONLY]
    if stars:
        lines.insert(stars[0], "*")
    return "(\n    " + ",\n    ".join(lines) + ",\n)"


def _prose(text: str) -> str:
    """Docstrings are Markdown but for their examples and the sections of a mechanism."""
    prose, arrow, example = text.partition(">>>")
    prose = _SECTION.sub(r"\n**\1.**", prose.rstrip())
    block = _block((arrow + example).rstrip(), "python") if arrow else ""
    return f"{prose}\n\n{block}"


def _block(text: str, language: str) -> str:
    return f"```{language}\n{text}\n```\n"


def _commands() -> str:
    """Usage and options of every command, as `--help` has them."""
    group: Any = typer.main.get_command(app)
    parts = [
        "# Commands\n\nEvery command with its options; [Command line](../cli.md) explains them.\n"
    ]
    for name, command in walk(group):
        parts.append(f"## `{name}`\n\n{command.help or ''}\n")
        rows = [row for row in map(_option, command.params) if row]
        if rows:
            parts.append("| option | meaning | default |\n|---|---|---|\n" + "\n".join(rows) + "\n")
    return "\n".join(parts)


def walk(group: Any, path: str = "dpstream") -> Any:
    """Every command of the tree with its full name."""
    for name, command in group.commands.items():
        real = group.load(name) if hasattr(group, "load") else command
        yield f"{path} {name}", real
        if hasattr(real, "commands"):
            yield from walk(real, f"{path} {name}")


def _option(parameter: Any) -> str:
    if "--help" in parameter.opts:
        return ""
    option = parameter.param_type_name == "option"
    shown = ", ".join(parameter.opts) if option else (parameter.metavar or parameter.name.upper())
    text = str(getattr(parameter, "help", "") or "").replace("|", "\\|")
    default = parameter.default
    plain = default if isinstance(default, str | int | float) and default not in ("", False) else ""
    return f"| `{shown}` | {text} | {plain} |"
