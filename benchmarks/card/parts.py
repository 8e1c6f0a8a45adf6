"""The parts of the command, the most informative first, and which of them fit into the time left. Imports nothing
beyond the standard library, so that they can be listed on a bare machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

#: A part that takes what time is left begins only if there is at least this much, in seconds.
LEAST_S = 60.0
#: A part is ended when it has taken this many times its estimate, and not before `LEAST_S`.
PATIENCE = 2.0


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        function: ``module.function`` in `benchmarks.card`, imported only by the part's own process.
        about: what it shows, in one clause.
        estimate_s: seconds it takes on a card. rehearsal_s: in a rehearsal.
        elastic: it uses all the time left, and continues where it was when it runs again.
        after: a part that leaves what it needs. It does not run before that one, if both are to run.
    """

    name: str
    function: str
    about: str
    estimate_s: float
    rehearsal_s: float
    elastic: bool = False
    after: str | None = None

    def seconds(self, rehearsal: bool) -> float:
        """Return the estimate that applies."""
        return self.rehearsal_s if rehearsal else self.estimate_s

    def limit_s(self, left_s: float, rehearsal: bool) -> float:
        """Return the seconds after which the part is ended, with ``left_s`` left for everything."""
        own_s = max(LEAST_S, PATIENCE * self.seconds(rehearsal))
        return left_s if self.elastic else min(left_s, own_s)


#: The search whose profile later parts use.
_SEARCH = "search-synthetic"
PARTS = (
    Part("facts", "machine.facts", "what NVML, torch, CUDA and the system say", 50, 30),
    Part("doctor", "machine.doctor", "`autotune doctor`", 10, 10),
    Part("matrix", "trials.matrix", "single trials: precision, loader, allocator, graphs, out of memory", 150, 120),
    Part("tests", "machine.tests", "the tests marked `gpu`", 100, 60),
    Part("ranks", "ranks.ranks", "two ranks on two cards, and a script of two ranks; skipped on one card", 115, 100),
    Part("kill", "neighbours.kill", "kill -9 of a launch that holds 70 % of the card's memory", 45, 30),
    Part("fixed", "trials.fixed", "the fixed cost of a launch, forked and spawned", 60, 60),
    Part(_SEARCH, "searches.synthetic", "a search of ResNet-50, data in memory", 280, 75),
    Part(
        "promise",
        "searches.promise",
        "1,500 steps with its profile, against its promise",
        120,
        40,
        after=_SEARCH,
    ),
    Part("plain", "plain.plain", "its configuration against a plain loop written by hand", 105, 60, after=_SEARCH),
    Part("graphs", "graphs.graphs", "CUDA graphs with an evaluation between epochs", 150, 60),
    Part("stranger", "neighbours.stranger", "another process on the card: idle, then computing", 100, 60),
    Part("max-autotune", "trials.max_autotune", "compiling with max-autotune, cache cold and warm", 250, 90),
    Part("search-generated", "searches.generated", "a search of ResNet-50, data from JPEG files", 345, 75),
    Part("surface", "searches.surface", "a surface of ResNet-50, 100 configurations", 3600, 90, elastic=True),
)
BY_NAME = {part.name: part for part in PARTS}


def next_part(todo: Sequence[Part], left_s: float, rehearsal: bool) -> Part | None:
    """Return the first part that fits into the time left; ``None`` if none does."""
    waiting = {part.name for part in todo}
    for part in todo:
        if part.after not in waiting and (LEAST_S if part.elastic else part.seconds(rehearsal)) <= left_s:
            return part
    return None


def planned(todo: Sequence[Part], left_s: float, rehearsal: bool) -> list[Part]:
    """Return the parts that would run if each took as long as estimated."""
    waiting, chosen = list(todo), []
    while part := next_part(waiting, left_s, rehearsal):
        waiting.remove(part)
        chosen.append(part)
        left_s -= left_s if part.elastic else part.seconds(rehearsal)
    return chosen


def in_order(asked: Sequence[str], status_of: Callable[[str], str | None]) -> list[Part]:
    """Return the parts to run.

    Args:
        asked: names, in the order in which to run them; if empty, every part that is not done.
        status_of: the status of a part's last result on this machine with this code; ``None`` if there is none.
    """
    if asked:
        return [BY_NAME[name] for name in dict.fromkeys(asked)]
    # What failed before comes late, so that it does not take the time of what has never run; what takes all the time
    # comes last, and is never known to be done.
    open_ = [part for part in PARTS if part.elastic or status_of(part.name) != "ok"]
    return sorted(open_, key=lambda part: (part.elastic, status_of(part.name) is not None))
