"""Commands that take the options of another one, too, and list them in their help."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

#: Settings of such a command: what it does not know itself is left to the other one's parser.
BEYOND = {"allow_extra_args": True, "ignore_unknown_options": True}


def also_takes(other: str, heading: str) -> type[TyperCommand]:
    """Return the class of a command whose help lists the options of another command of the same group.

    Args:
        other: the other command's name.
        heading: stands above its options.
    """

    class Both(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            # What stands behind -- is the other one's, and is left to it with the mark, which a parser would drop.
            at = args.index("--") if "--" in args else len(args)
            left = super().parse_args(ctx, args[:at])
            ctx.args = [*ctx.args, *args[at:]]
            return left

        def format_options(self, ctx: Any, formatter: Any) -> None:
            super().format_options(ctx, formatter)
            own = {one.name for one in self.params}
            beyond = [one for one in ctx.parent.command.commands[other].params if one.name not in own]
            rows = [row for one in beyond if (row := one.get_help_record(ctx)) is not None]
            with formatter.section(heading):
                formatter.write_dl(rows)

    return Both
