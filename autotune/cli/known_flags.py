"""What a script's options are likely to set, by their names: the lines of ``map`` and ``output_flag`` in its file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autotune.cli.help_text import HelpOption
from autotune.knobs import KNOBS, Knob, OwnOption, spell

#: Options that take the folder to write to.
_OUTPUT = OwnOption(
    ("output_dir", "out_dir", "outdir", "output_folder", "save_dir", "work_dir"),
    like=r"out|output|default_root_dir|.*(save|output|log|ckpt|checkpoint).*(dir|path|folder)",
)
#: How the names of switches begin that turn something off.
_NO = ("--no-", "--no_", "--disable-", "--disable_")


@dataclass(frozen=True)
class KnownFlag:
    """One line of a script's file.

    Attributes:
        knob: its name; ``None`` for the option that takes the output folder.
        name: ``KNOB:VALUE`` or ``KNOB``; empty for that option.
        words: what sets it. sure: the option's name leaves no doubt. remark: the option's own help.
    """

    knob: Knob | None
    name: str
    words: str
    sure: bool
    remark: str


def known_flags(options: Sequence[HelpOption]) -> list[KnownFlag]:
    """Return what options are likely to set, of each thing the likeliest, in the order of the knobs."""
    found: dict[str, KnownFlag] = {}
    for knob in (*KNOBS.values(), None):
        for option in options:
            for flag in _output(option) if knob is None else _of(knob, option):
                before = found.get(flag.name)
                if before is None or (flag.sure and not before.sure):
                    found[flag.name] = flag
    # Where an option surely sets a knob, guesses at others would only confuse.
    surely = {flag.knob for flag in found.values() if flag.sure}
    return [flag for flag in found.values() if flag.sure or flag.knob not in surely]


def _of(knob: Knob, option: HelpOption) -> Iterator[KnownFlag]:
    takes_words = bool(option.value) and not option.choices
    # `--bf16 [BF16]` is a switch as well.
    is_switch = not option.value or (takes_words and option.value.startswith("["))
    for own in knob.own_options:
        sure = _is_meant(option, own)
        if sure is None:
            continue
        if own.choices:
            for choice in option.choices:
                if choice in own.choices:
                    name = f"{knob.name}:{spell(own.choices[choice])}"
                    yield KnownFlag(knob, name, f"{option.long} {choice}", sure, option.help)
        elif own.sets is None:
            if takes_words:
                yield KnownFlag(knob, knob.name, f"{option.long} {{{knob.name}}}", sure, option.help)
        elif is_switch and (typed := _switch(option, on=own.sets is not False)) is not None:
            yield KnownFlag(knob, f"{knob.name}:{spell(own.sets)}", typed, sure, option.help)


def _output(option: HelpOption) -> Iterator[KnownFlag]:
    sure = _is_meant(option, _OUTPUT)
    if option.value and not option.choices and sure is not None:
        yield KnownFlag(None, "", option.long, sure, option.help)


def _switch(option: HelpOption, *, on: bool) -> str | None:
    """Return the name of a switch that turns something on or off; ``None`` if it has none, or only a short one."""
    long = [name for name in option.names if name.startswith("--")]
    return next((name for name in long if name.startswith(_NO) != on), None)


def _is_meant(option: HelpOption, own: OwnOption) -> bool | None:
    """Return whether an option surely is one of these; ``None`` if it is none."""
    if set(own.names).intersection(option.keys):
        return True
    return False if any(re.fullmatch(own.like, key) for key in option.keys) else None
