"""Words by which a script sets a profile's knobs, as `--map` says."""

from __future__ import annotations

from collections.abc import Mapping

from autotune.launcher.entering import flags_of, words_of
from autotune.profile.export.by_hand import by_hand
from autotune.profile.export.format import given_by
from autotune.knobs import spell
from autotune.profile import Profile, printable
from autotune.base.records import CommandRef


def mapped(profile: Profile, flags: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return the words that set a profile's knobs, and a line for each knob that has none.

    Raises:
        UsageError: see `flags_of`.
    """
    config, own = profile.configuration, profile.workload.own
    command = CommandRef(words=("script",), folder=".", flags=dict(flags), own=own)
    told = {(flag.knob, None if flag.value is None else spell(flag.value)) for flag in flags_of(flags)}
    cuda = given_by(profile).cuda
    without = [
        printable(f"{name}={spell(value)} has no words: {by_hand(name, value, cuda=cuda)}")
        for name, value in config.items()
        if not {(name, None), (name, spell(value))} & told and own.get(name) != value
    ]
    return words_of(command, config)[1:], without
