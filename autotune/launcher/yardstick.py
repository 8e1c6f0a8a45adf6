"""The kind of machine that a study on other machines is for."""

from __future__ import annotations

from autotune.launcher.errands import WorkerFacts
from autotune.machine.fingerprint import fingerprint
from autotune.base.records import Fingerprint, Probe, TrialSpec

_DATA = ("data_kind", "data_identity", "data_store")


class Yardstick:
    """Compares the machines of workers. The first worker tells by its probes what machine the study is for.

    Args:
        known: the machine that the study is tied to; ``None`` for a new study.

    Attributes:
        probe: the last probe of the study; ``None`` before the first.
    """

    def __init__(self, known: Fingerprint | None) -> None:
        self.probe: TrialSpec | None = None
        self._machine = known
        # The worker has compared the data, and the search itself compares a study's code with what it was.
        self._apart: tuple[str, ...] = (*_DATA, "workload_sha256")

    def why_not(self, facts: WorkerFacts, found: Probe, spec: TrialSpec | None, *, is_known: bool) -> str | None:
        """Return why a worker is not fit for the study, as a clause; ``None`` if it is.

        Args:
            found: by a probe there.
            spec: of that probe, if it is one of the study, by which others are measured from then on.
            is_known: the worker has been found fit before.
        """
        asked = self.probe if spec is None else spec
        assert asked is not None
        machine = fingerprint(found, facts.host, facts.gpu, asked.data)
        rows = [] if self._machine is None or is_known else self._machine.differences(machine)
        rows = [row for row in rows if row[0] not in self._apart]
        if rows:
            text = "; ".join(f"{name}: {theirs} instead of {ours}" for name, ours, theirs in rows)
            return f"its machine is of another kind ({text})"
        if spec is not None:
            self.probe, self._machine, self._apart = spec, machine, _DATA
        return None
