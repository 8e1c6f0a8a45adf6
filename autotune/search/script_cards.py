"""The cards that a script sees: as many as the launcher in its command starts processes, and otherwise one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

from autotune.base.errors import ImpossibleError
from autotune.space.formatting import count
from autotune.machine.gpu import NvmlUnavailable, gpus, visible
from autotune.profile import Profile

#: What ``--nproc-per-node=gpu`` stands for: a process for each card that is seen.
ALL = 0
#: Options of torchrun and of ``accelerate launch`` that say how many processes there are, in both spellings.
_RANKS = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes)(?:=(.*))?", re.DOTALL)
#: An option of ``accelerate launch``: a process for each card, unless there is a number.
_MULTI = re.compile(r"--multi[-_]gpu")
#: Modules that are launchers. Any other one is what is launched.
_LAUNCHERS = ("torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch")


def ranks_told(words: Sequence[str]) -> int | None:
    """Return how many processes a command's launcher starts, each with a card of its own, as far as its words tell;
    `ALL` for one on each card, ``None`` if they say nothing."""
    told: int | None = None
    several = False
    for word, after in pairwise([*_before_the_script(words), ""]):
        several = several or bool(_MULTI.fullmatch(word))
        found = _RANKS.fullmatch(word)
        if found is None:
            continue
        value = after if found[1] is None else found[1]
        if value in ("gpu", "auto"):
            told = ALL
        elif value.isdecimal() and int(value):
            told = int(value)
    return ALL if told is None and several else told


def _before_the_script(words: Sequence[str]) -> Iterator[str]:
    """Yield the words of a command before those of the script or module that is launched, whose options are its own."""
    for word, after in pairwise([*words, ""]):
        if word.endswith(".py") or (word in ("-m", "--module") and after not in _LAUNCHERS):
            return
        yield word


def refuse_ranks(words: Sequence[str], where: str) -> None:
    """Refuse a command that starts several processes where each launch has one card.

    Raises:
        ImpossibleError: it does.
    """
    told = ranks_told(words) or 1
    if told > 1:
        raise ImpossibleError(
            f"the command starts {told} processes, and {where}", advice="leave --devices, --on and --workers out."
        )


def unlike_the_search(words: Sequence[str], profile: Profile) -> str | None:
    """Return what cards a command gets that its script did not see in the search of a profile, as a clause; ``None`` if
    it gets as many, or the profile is not of cards."""
    then, told = profile.conditions.cards, ranks_told(words)
    if not profile.conditions.device.startswith("cuda"):
        return None
    if told:
        here = f"the command starts {count(told, 'process', 'processes')}"
        return None if told == then else f"{here}, and the search saw {count(then, 'card')}: its rate will be another"
    seen = cards_seen()
    if seen in (0, then):
        return None
    hide = "; CUDA_VISIBLE_DEVICES hides the others" if seen > then else ""
    return (
        f"the script sees {count(seen, 'card')}, and in the search it saw {then}: what uses all was not measured{hide}"
    )


def cards_seen() -> int:
    """Return how many cards a process that is started here sees; 0 if the driver does not tell. Of MIG instances CUDA
    shows one."""
    listed = gpus()
    if isinstance(listed, NvmlUnavailable):
        return 0
    seen = visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))
    return min(1, len(seen)) if any(card.mig or card.profile for card in seen) else len(seen)
