"""What tuning a training while it goes on has shown, as a profile and as a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from autotune.base.version import __version__
from autotune.base.clock import timestamp
from autotune.space.formatting import describe
from autotune.knobs.num_workers import workers_of
from autotune.machine.fingerprint import fingerprint
from autotune.machine.gpu import Gpu
from autotune.profile import Conditions, Gives, Measured, Profile, ProfileWorkload, Provenance, Versions
from autotune.base.records import Config, DataRef, Heat, Host, LiveSpec, Probe
from autotune.space import Space, key


@dataclass(frozen=True)
class Raced:
    """One race.

    Attributes:
        title: what was compared. waits: fraction of the time in which the script waited for its loader, by entrant.
        whole: that time counts.
    """

    title: str
    heat: Heat
    waits: Sequence[float]
    whole: bool


@dataclass(frozen=True)
class Found:
    """What tuning has shown.

    Attributes:
        config: that stays in force. ratio: ``(ratio, low, high)`` of its rate to the script's own, as the last race
            shows; ``whole``: with waiting for the loader. own_per_s: rate of the script's own, ``(rate, low, high)``,
            with it.
        races: in their order. left_out: what was not tried, and why.
        wait: fraction of the time in which the script waited for its loader, under ``config``.
        epoch_turn_s: that the beginning of an epoch takes under ``config``, which ``whole`` has in it; ``None`` if that
            was not seen.
    """

    config: Config
    ratio: tuple[float, float, float]
    whole: tuple[float, float, float]
    own_per_s: tuple[float, float, float]
    races: Sequence[Raced]
    left_out: Sequence[str]
    wait: float
    epoch_turn_s: float | None = None


def profile_of(
    found: Found,
    spec: LiveSpec,
    space: Space,
    probe: Probe,
    host: Host,
    card: Gpu | None,
    *,
    peak_bytes: int | None,
    elapsed_s: float,
) -> Profile:
    """Return what tuning has shown as a profile.

    Args:
        card: that the script trains on, as NVML knows it. peak_bytes: of device memory. elapsed_s: of tuning.
    """
    cpu = probe.device == "cpu"
    rate, low, high = found.own_per_s
    ratio, ratio_low, ratio_high = found.whole
    turns = [t for race in found.races for e in race.heat.entrants for t in e.turns if t is not None]
    return Profile(
        workload=ProfileWorkload(name=spec.workload.name, sha256=spec.workload.sha256),
        configuration=dict(found.config),
        gives=Gives(
            samples_per_second=rate * ratio,
            ci95=(low * ratio, high * ratio),
            speedup=ratio,
            speedup_ci95=(ratio_low, ratio_high),
            peak_memory_bytes=peak_bytes,
            peak_memory_is="host" if cpu else "device",
            compile_seconds=0.0,
            startup_seconds=0.0,
            loader_wait_fraction=found.wait,
            epoch_turn_seconds=found.epoch_turn_s,
            launches=1,
            same_batch=True,
        ),
        baseline=Measured(configuration=dict(space.baseline), samples_per_second=rate, ci95=(low, high)),
        conditions=Conditions(
            device=probe.device,
            device_name=host.cpu_model if cpu else probe.device_name,
            image_size=None,
            data="none",
            epoch_samples=probe.dataset_samples,
            worker_start_method="fork",
            seed=0,
            allow_busy=True,
        ),
        fingerprint=fingerprint(probe, host, card, DataRef(kind="none")),
        versions=Versions(
            autotune=__version__,
            torch=probe.torch_version,
            torchvision=probe.torchvision_version,
            python=probe.python_version,
            cuda=probe.cuda_version,
            cudnn=probe.cudnn_version,
            driver=None if card is None else card.driver_version,
        ),
        provenance=Provenance(
            study=PurePath(spec.folder).name,
            trial=0,
            objective="throughput",
            trials={},
            measured_seconds=sum(t.seconds for t in turns),
            elapsed_seconds=elapsed_s,
            created=timestamp(),
        ),
    ).sealed()


def sentences(found: Found, own: Config, *, elapsed_s: float, steps_lost: int) -> list[str]:
    """Return the lines of the report, the first of which says what is in force now.

    Args:
        own: the script's own configuration. elapsed_s: of tuning. steps_lost: that were taken with gradients of zero.
    """
    tried = len({key(e.config) for race in found.races for e in race.heat.entrants} - {key(own)})
    if found.config == own:
        first = f"live: nothing was surely faster than the script as it stands, of {tried} changes in {elapsed_s:.0f} s"
    else:
        ratio, low, high = found.whole
        what = describe(found.config, own)
        first = f"live: {what} from now on, {ratio:.2f}× ({low:.2f} to {high:.2f}) as fast"
        if found.epoch_turn_s is None and workers_of(found.config) != workers_of(own):
            first += ", without the starts of its epochs, which were not measured"
    lines = [first, ""]
    for race in found.races:
        heat = race.heat
        beside = heat.reference.config
        than = "" if beside == own else f", beside {describe(beside, own)}"
        lines += [f"{race.title}, {heat.measured_s:.0f} s of turns{than}; {heat.ended}:"]
        for entrant in heat.entrants[1:]:
            if entrant.ratio is not None and entrant.ratio_ci95 is not None:
                low, high = entrant.ratio_ci95
                rate = f"{entrant.ratio:.3f}× ({low:.3f} to {high:.3f}){'' if race.whole else ' without loading'}"
            else:
                rate = f"no figure: {entrant.cause}"
            lines.append(f"- {describe(entrant.config, own)}: {rate}")
        lines.append("")
    if found.left_out:
        lines += ["Not tried:", *(f"- {words}" for words in found.left_out), ""]
    if steps_lost:
        lines += [f"Steps with gradients of zero, because a configuration failed in them: {steps_lost}", ""]
    if found.wait:
        lines += [f"Waiting for the loader: {100 * found.wait:.0f} % of the time", ""]
    return lines
