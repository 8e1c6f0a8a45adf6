"""Which configurations are compared while a training goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autotune.knobs import KNOBS, Scope
from autotune.knobs.compile_mode import GUESS_S, mode_of
from autotune.knobs.num_workers import WORKERS, workers_of
from autotune.base.records import Config, Heat, HeatEntrant, Host, LiveSpec, TrialStatus, Value
from autotune.space import Space, canonical, key

#: What may be lost by one thing, as a fraction of the time that the training is expected to take. A compilation, during
#: which nothing trains, is the one that loses much at once.
LOSS = 0.01
#: What is not faster by this is not worth a change.
LEAST_GAIN = 1.01
#: What is slower by itself by more than this is not tried beside something faster.
HOPELESS = 0.8
#: Changes that are faster by themselves, of which combinations of the best are tried, and of those that are not.
MOST = 3
#: Numbers of workers that are tried, and memory of the host that one is expected to need at most.
MOST_WORKERS, WORKER_BYTES = 4, 2**28


def changes(space: Space, own: Config, device: str, spec: LiveSpec) -> tuple[list[dict[str, Value]], list[str]]:
    """Return a configuration with one other value of each knob that it can be switched to between two steps, and in
    words what is left out, with the reason.

    Args:
        device: ``cpu``, or that of a card.
    """
    found: list[dict[str, Value]] = []
    left_out: list[str] = []
    affordable_s = LOSS * spec.expect_s
    for name, value in own.items():
        knob = KNOBS.get(name)
        if knob is None or not knob.switchable or name not in space.choices or name in space.between_launches:
            continue
        for other in space.legal(name):
            config = canonical({**own, name: other})
            if other == value or space.why_apart(own, config) is not None:
                continue
            if device != "cpu" and other == "foreach":
                # Its lists of temporaries are as large as the model, and a step of an optimizer is not repeated.
                left_out.append(f"{knob.phrase(other)}: it needs more memory")
                continue
            # Where the model is compiled, by whomever, it is compiled again for another layout, number format or number
            # of threads.
            mode = mode_of(config) if knob.scope is not Scope.OPTIMIZER else "off"
            if knob.changes_maths and name not in spec.allow:
                left_out.append(f"{knob.phrase(other)}: it changes the maths (`--allow {name}`)")
            elif mode != "off" and GUESS_S[mode] > affordable_s:
                # For as long as that, nothing would train.
                left_out.append(
                    f"{knob.phrase(other)}: it may take {GUESS_S[mode]:.0f} s, in which nothing trains "
                    f"(`--expect {GUESS_S[mode] / LOSS / 3600:.1f}h` or longer allows that)"
                )
            else:
                found.append(config)
    return found, left_out


def together(
    space: Space, own: Config, better: Sequence[Config], others: Sequence[Config] = ()
) -> list[dict[str, Value]]:
    """Return the best changes of a configuration, the fastest first, each by itself and together with those before it;
    and the fastest together with changes that gave nothing by themselves: channels_last may do so only under bf16.

    Args:
        better: the configuration with one change each that is faster, the fastest first. others: with one that is not,
            and not much slower.
    """
    found: dict[str, dict[str, Value]] = {}
    added = dict(own)
    for config in better[:MOST]:
        found.setdefault(key(config), dict(config))
        more = _with_change(space, own, config, added)
        if more is not None:
            added = more
            found.setdefault(key(more), more)
    for config in others[:MOST] if better else ():
        more = _with_change(space, own, config, better[0])
        if more is not None:
            found.setdefault(key(more), more)
    return list(found.values())


def _with_change(space: Space, own: Config, config: Config, other: Config) -> dict[str, Value] | None:
    """Return another configuration with the change that a configuration is, too; ``None`` if that cannot be, or the
    other has changed the same knob already."""
    changed = {n: v for n, v in config.items() if own.get(n) != v}
    if any(other.get(n) != own.get(n) for n in changed):
        return None
    more = canonical({**other, **changed})
    return more if space.refusal(more) is None and space.why_apart(own, more) is None else None


def other_workers(space: Space, waits: float, host: Host) -> list[dict[str, Value]]:
    """Return the script's own configuration with other numbers of workers, around what keeps the device busy.

    Args:
        waits: fraction of the time in which the script waits for its loader.
    """
    own = space.baseline
    now = workers_of(own)
    # Without workers, the loader works while the device waits, and else the whole time.
    needed = max(1.0, (now or waits) / max(1.0 - waits, 0.01))
    affordable = int(host.available_bytes / 2 // WORKER_BYTES)
    counts = [int(n) for n in space.legal(WORKERS) if 0 < int(n) <= affordable and n != now]
    counts.sort(key=lambda n: abs(math.log(n / needed)))
    others = [space.completed({**own, WORKERS: n}) for n in sorted(counts[:MOST_WORKERS])]
    return [config for config in others if space.refusal(config) is None]


def surest_workers(heat: Heat) -> HeatEntrant | None:
    """Return the fastest of those that are surely faster than the reference and have fewer workers than any that have
    failed: what fails in one worker may fail in another, later."""
    failed = [workers_of(e.config) for e in heat.entrants[1:] if e.status is TrialStatus.CRASHED]
    return surest(heat, [e for e in heat.entrants[1:] if not failed or workers_of(e.config) < min(failed)])


def surest(heat: Heat, among: Sequence[HeatEntrant] | None = None) -> HeatEntrant | None:
    """Return the fastest of those that are surely faster than the reference.

    Args:
        among: ``None`` for all.
    """
    sure = [
        e
        for e in (heat.entrants[1:] if among is None else among)
        if e.ratio and e.ratio_ci95 and e.ratio > LEAST_GAIN and e.ratio_ci95[0] > 1
    ]
    return max(sure, key=lambda e: e.ratio or 0.0, default=None)
