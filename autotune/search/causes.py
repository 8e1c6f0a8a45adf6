"""Why a promise is not kept: what is different now, as far as it was seen."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean

from autotune import stats
from autotune.space.formatting import percent_text, ratio_text
from autotune.machine.gpu import SLOWDOWNS
from autotune.profile import Profile, warnings_for
from autotune.base.records import Measurement, Window

#: Rates of other moments differ by chance, by this many standard deviations of a launch at most.
_SCATTER = 3
#: The part of the windows that a disturbance has to be seen in, to be named.
_OFTEN = 0.1
#: Cores that others use without being named.
_FEW_CORES = 0.1
#: A change of the part of a step that is spent waiting, to be named.
_WAITS = 0.1

Ratio = tuple[float, float, float]


def slack(profile: Profile) -> float:
    """Return the fraction by which a profile's rate may differ between today and another day, by chance alone.

    Where the loader limits a training on a card, it scatters as the CPU does.
    """
    device = profile.conditions.device.partition(":")[0]
    waits = (profile.gives.loader_wait_fraction or 0.0) > _WAITS
    return _SCATTER * stats.PRIORS["cpu" if waits else device].sd


def causes(
    profile: Profile,
    differences: Iterable[tuple[str, str, str]],
    baseline: Ratio | None,
    launches: Sequence[Measurement],
    own: Sequence[Measurement],
) -> Iterator[str]:
    """Tell what may have made a profile slower than promised, one sentence each, the surest first.

    Args:
        differences: rows ``(name, then, now)`` of what is different on this machine.
        baseline: ``(ratio, low, high)`` of the baseline's rate now over its rate then.
        launches: all of now; own: those of the profile's configuration.
    """
    yield from warnings_for(differences)
    yield from _disturbances([w for m in launches for w in (*m.windows, *m.discarded)])
    waited = profile.gives.loader_wait_fraction
    waits = [m.loader_wait_fraction for m in own if m.loader_wait_fraction is not None]
    if waited is not None and waits and fmean(waits) > waited + _WAITS:
        now = percent_text(fmean(waits))
        yield f"it waits for the loader for {now} of a step; when it was measured, {percent_text(waited)}."
    if baseline is None:
        return
    part, low, high = baseline
    allowed = slack(profile)
    if high < 1 - allowed:
        yield f"the machine is slower: the baseline gives only {ratio_text(part)} of its rate then, too."
    elif low > 1 - allowed:
        yield f"the machine is as fast as then, within the usual scatter: the baseline gives {ratio_text(part)}."


def _disturbances(windows: Sequence[Window]) -> Iterator[str]:
    around = [w.around for w in windows if w.around is not None]
    if not around:
        return
    if sum(bool(a.stops) for a in around) > _OFTEN * len(around):
        yield "something keeps stopping and continuing its processes (SIGSTOP, as cpulimit does)."
    foreign = [a.foreign_cores for a in around if a.foreign_cores is not None]
    if foreign and fmean(foreign) > _FEW_CORES:
        yield f"other processes, or the hypervisor, use {fmean(foreign):.1f} cores."
    for bit, name in SLOWDOWNS.items():
        if sum(bool((a.clocks_event_reasons or 0) & bit) for a in around) > _OFTEN * len(around):
            yield f"{name} holds the card's clocks down."
