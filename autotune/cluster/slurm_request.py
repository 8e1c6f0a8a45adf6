"""What a job asks Slurm for, and how submitit is told."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autotune.cluster.slurm_run import WARNING
from autotune.base.errors import UsageError
from autotune.base.parsing import duration_s, duration_text, size_bytes

#: Seconds before the end of a job's time at which it is told. A launch ends within a second, a script within six.
WARNED_S = 90
#: A job with less time could spend all of it on starting.
LEAST_S = 300
#: Beside its budget a search makes data, waits for a quiet device, and proves what it has found.
_BESIDE_S = 1800
_KEY = re.compile(r"[a-z][a-z0-9-]*")
#: Options of sbatch on which the way of a job through the queue depends.
_OURS = frozenset(
    {"array", "error", "job-name", "no-requeue", "ntasks", "nodes", "open-mode", "output", "requeue", "signal", "wrap"}
)
#: Options of sbatch for which `autotune submit` has its own.
_NAMED = {
    "account": "--account",
    "cpus-per-task": "--cpus",
    "gres": "--gres",
    "mem": "--mem",
    "partition": "--partition",
    "qos": "--qos",
    "time": "--time",
}


@dataclass(frozen=True)
class Allocation:
    """What a job asks Slurm for. What is ``None`` is left to the cluster's defaults.

    Attributes:
        time_s: how long one run of the job may take; a search that needs more goes on in the next.
        more: further options of sbatch, without dashes; ``True`` for one without a value.
        environment: variables of the search, on top of those that sbatch takes along.
    """

    partition: str | None = None
    gres: str | None = None
    time_s: float | None = None
    cpus: int | None = None
    memory_bytes: int | None = None
    account: str | None = None
    qos: str | None = None
    more: dict[str, str | bool] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def parameters(self, budget_s: float) -> dict[str, object]:
        """Return the parameters of submitit's executor, but for the job's name.

        Args:
            budget_s: of the search.
        """
        asked = {
            "partition": self.partition,
            "gres": self.gres,
            "cpus_per_task": self.cpus,
            "mem": None if self.memory_bytes is None else f"{math.ceil(self.memory_bytes / 2**20)}M",
            "account": self.account,
            "qos": self.qos,
        }
        return {
            **{name: value for name, value in asked.items() if value is not None},
            "time": math.ceil(self._time_s(budget_s) / 60),
            "stderr_to_stdout": True,
            # srun kills its step as soon as it is signalled itself, so a job that is requeued could not stop cleanly.
            "use_srun": False,
            "additional_parameters": {
                "requeue": True,
                "signal": f"B:{WARNING.name.removeprefix('SIG')}@{WARNED_S}",
                **self.more,
            },
        }

    def restarts(self, budget_s: float) -> int:
        """Return how often a job may run out of time. More than a search can use: each run has at least one minute of
        its own, and those that are preempted do not count."""
        return math.ceil(2 * (budget_s + _BESIDE_S) / (self._time_s(budget_s) - WARNED_S)) + 1

    def _time_s(self, budget_s: float) -> float:
        return self.time_s or budget_s + _BESIDE_S


def allocation(
    *,
    partition: str | None,
    gres: str | None,
    time: str | None,
    cpus: int | None,
    mem: str | None,
    account: str | None,
    qos: str | None,
    sbatch: Iterable[str],
    environment: Mapping[str, str],
) -> Allocation:
    """Return what the options of a command line ask for.

    Raises:
        UsageError: a value is invalid.
    """
    time_s = None if time is None else duration_s(time, "--time")
    if time_s is not None and time_s < LEAST_S:
        raise UsageError(
            f"--time {time} is too short for a job that is told {WARNED_S} s before it is over",
            advice=f"at least {duration_text(LEAST_S)}; a search that needs more goes on in the next run of its job.",
        )
    for flag, text in (("--partition", partition), ("--gres", gres), ("--account", account), ("--qos", qos)):
        _check_value(flag, text)
    return Allocation(
        partition=partition,
        gres=gres,
        time_s=time_s,
        cpus=cpus,
        memory_bytes=None if mem is None else size_bytes(mem, "--mem"),
        account=account,
        qos=qos,
        more=_more(sbatch),
        environment=dict(environment),
    )


def _more(words: Iterable[str]) -> dict[str, str | bool]:
    found: dict[str, str | bool] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not _KEY.fullmatch(key) or (equals and not value):
            raise UsageError(
                f"--sbatch takes KEY=VALUE, or KEY alone, not {word[:60]!r}",
                advice="write an option of sbatch without its dashes: --sbatch constraint=a100.",
            )
        if key in _OURS:
            raise UsageError(
                f"--sbatch {key} is set by autotune, so that the search can stop, go on and be found again"
            )
        if key in _NAMED:
            raise UsageError(f"--sbatch {key} has an option of its own", advice=f"write {_NAMED[key]}.")
        if key in found:
            raise UsageError(f"--sbatch gives {key} twice")
        if equals:
            _check_value(f"--sbatch {key}", value)
        found[key] = value if equals else True
    return found


def _check_value(flag: str, text: str | None) -> None:
    """Refuse what would not stay on its line in the batch script."""
    if text is not None and (not text or not text.isprintable() or text != text.strip()):
        raise UsageError(f"{flag} cannot be {text[:60]!r}")
