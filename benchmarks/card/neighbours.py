"""Parts on what others leave on a card or do there: a launch killed while it holds much memory, and a stranger."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from autotune.base.records import Beat, MeasurePlan, Phase
from autotune.machine.gpu import gpus
from autotune.machine.host import read_host
from benchmarks.card.launches import base_config, figures_of, launcher, run, spec_for
from benchmarks.card.stage import NO_TIME, ROOT, Stage, wait_until
from benchmarks.launching import workload

HELD = 0.7
#: A card is back at its idle level within this many bytes, and a CPU's memory within that.
NEAR_BYTES, NEAR_ON_CPU = 2**26, 2**27
#: Patience with memory that does not come back, and with a launch that waits for it, in seconds.
BACK_S, WAIT_S = 60.0, 60.0
ENDLESS = MeasurePlan(target_halfwidth=1e-9, max_measure_s=60.0)


def used_bytes(uuid: str | None) -> int:
    """Return the bytes in use on the card; in a rehearsal, of the host's memory."""
    if uuid is None:
        host = read_host()
        return host.memory_bytes - host.available_bytes
    found = gpus()
    cards = found if isinstance(found, list) else []
    return next((card.memory_used_bytes or 0 for card in cards if card.uuid == uuid), 0)


def _card_bytes(stage: Stage) -> int:
    if stage.uuid is None:
        return 2**29
    found = gpus()
    cards = found if isinstance(found, list) else []
    return next(card.memory_bytes or 0 for card in cards if card.uuid == stage.uuid)


def kill(stage: Stage) -> None:
    """Kill a launch that holds most of the card with SIGKILL; measure until memory and launcher are ready again."""
    stage.replaced("the host's memory is held, and not a card's")
    hold_bytes = int(HELD * _card_bytes(stage))
    note = stage.folder / "pid"
    ref = workload("holding", hold_bytes=str(hold_bytes), pid_file=str(note))
    small = {**base_config(stage), "num_workers": 0, "batch_size": 32, "optimizer_impl": "for-loop"}
    idle = used_bytes(stage.uuid)
    seen: dict[str, Any] = {"idle_bytes": idle, "hold_bytes": hold_bytes}

    def beat(found: Beat) -> None:
        if found.phase is Phase.MEASURE and "killed_at" not in seen:
            seen["held_bytes"] = used_bytes(stage.uuid) - idle
            seen["killed_at"] = time.monotonic()
            os.kill(int(note.read_text()), signal.SIGKILL)

    with launcher(stage.waits) as made:
        first = run(made, spec_for(stage, "before", small, workload=workload("holding")))
        stage.note(before=figures_of(first))
        result = run(made, spec_for(stage, "killed", small, workload=ref, plan=ENDLESS), on_beat=beat, limit_s=60)
        returned = time.monotonic()
        killed_at = seen.pop("killed_at", None)
        stage.note(**seen, killed=figures_of(result))
        if killed_at is None:
            raise RuntimeError("the launch ended before it could be killed")
        near = NEAR_ON_CPU if stage.uuid is None else NEAR_BYTES
        back = wait_until(lambda: used_bytes(stage.uuid) <= idle + near, BACK_S)
        stage.note(
            launcher_returned_s=round(returned - killed_at, 3),
            memory_back_s=None if back is None else round(returned - killed_at + back, 3),
        )
        begun: list[float] = []
        after = spec_for(stage, "after", small, workload=workload("holding"))
        began = time.monotonic()
        result = run(made, after, on_beat=lambda found: begun.append(time.monotonic()), limit_s=WAIT_S)
        first_beat_s = round(begun[0] - began, 3) if begun else None
        stage.note(after={**figures_of(result), "first_beat_s": first_beat_s})


def stranger(stage: Stage) -> None:
    """Measure alone, beside an idle process that holds 2 GiB of the card, beside one that computes, and alone again."""
    stage.replaced("the stranger holds host memory and uses one core")
    config = {**base_config(stage), "num_workers": 0, "batch_size": stage.pick(64, 4)}
    plan = stage.pick(MeasurePlan(max_measure_s=4.0, max_warmup_s=4.0), MeasurePlan(max_measure_s=2.0))
    plan = plan.model_copy(update={"busy_cores": 0.1 * read_host().cores})
    with launcher(stage.waits) as made:
        for how in ("alone", "idle", "computing", "alone again"):
            if stage.left_s < 10:
                stage.add("launches", {"stranger": how, "status": NO_TIME})
                continue
            with _stranger(stage, how) if how in ("idle", "computing") else contextlib.nullcontext():
                spec = spec_for(stage, f"stranger-{how.replace(' ', '-')}", config, plan=plan)
                result = run(made, spec, limit_s=min(stage.pick(40.0, 25.0), stage.left_s - 5))
            kept = result.measurement.windows if result.measurement else ()
            seen = Counter(str(w.around.foreign_processes) for w in kept if w.around)
            stage.add("launches", {"stranger": how, **figures_of(result), "strangers_in_windows": dict(seen)})


@contextlib.contextmanager
def _stranger(stage: Stage, how: str) -> Iterator[None]:
    """Keep another process on the card."""
    command = [sys.executable, "-m", "benchmarks.card.other", how, "cpu" if stage.uuid is None else "cuda"]
    env = {**os.environ, **stage.env}
    with subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if not process.stdout or process.stdout.readline().strip() != b"ready":
                raise RuntimeError(f"the stranger ended with {process.wait(5)}")
            yield
        finally:
            process.kill()
