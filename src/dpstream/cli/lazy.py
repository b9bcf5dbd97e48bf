"""A command tree whose commands are imported when they run: `--help` needs no Numba."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from typing import Any, ClassVar

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class LazyGroup(TyperGroup):
    """Knows its commands by name and by one line; `load` imports the real one."""

    homes: ClassVar[Mapping[str, tuple[str, str]]]
    """Name -> where the command is ("module:function" or "module:app"), and what it does."""

    def __init__(self, **settings: Any) -> None:
        lines = {name: line for name, (_, line) in self.homes.items()}
        outlines = {name: TyperCommand(name=name, help=line) for name, line in lines.items()}
        super().__init__(**settings | {"commands": outlines})
        _plain_flags(self)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is about to run, or to complete its options, in full."""
        name, outline, rest = super().resolve_command(ctx, args)
        return name, outline and self.load(str(name)), rest

    def load(self, name: str) -> Any:
        """Import the command `name`."""
        module, _, member = self.homes[name][0].partition(":")
        found = getattr(import_module(module), member)
        if not isinstance(found, typer.Typer):
            alone = typer.Typer(add_completion=False)
            alone.command(name)(found)
            found = alone
        found._add_completion = False  # the whole tree has it once
        return _plain_flags(get_command(found))


def _plain_flags(command: Any) -> Any:
    """Help shows `--json`, not `--json <bool>`: a flag takes no value."""
    for each in (command, *getattr(command, "commands", {}).values()):
        for option in each.params:
            if getattr(option, "is_flag", False):
                option.metavar = ""
        each.get_help_option = partial(_plain_help, each.get_help_option)
    return command


def _plain_help(made: Callable[[Any], Any], context: Any) -> Any:
    option = made(context)
    if option is not None:
        option.metavar = ""
    return option
