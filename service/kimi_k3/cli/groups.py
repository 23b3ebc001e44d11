# SPDX-License-Identifier: Apache-2.0
"""A group of commands, as every list of them in ``--help`` is made."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup


class Commands(TyperGroup):
    """Says of each command its whole first sentence, and of an interrupt that it was one.

    The parser's own ways are to cut the sentence off, and to make an exit code of the interrupt.
    """

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of this name, if there is one."""
        command = super().get_command(ctx, cmd_name)
        if command is not None and command.short_help is None and command.help:
            command.short_help = command.help.split("\n\n")[0].replace("\n", " ")
        return command

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was chosen."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Abort from None


def group(about: str) -> typer.Typer:
    """An empty one. Without markup typer does not load rich, and a usage error is text for one line."""
    return typer.Typer(
        cls=Commands,
        help=about,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
