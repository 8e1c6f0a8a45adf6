"""``conditions.json``: the machine and the space that a study is tied to, for when its database has been moved away."""

from __future__ import annotations

from autotune.base.errors import MachineError
from autotune.base.files import read_regular, write_atomic
from autotune.base.layout import StudyFiles
from autotune.base.records import SCHEMA_VERSION, Fingerprint, Record
from autotune.knobs import spell
from autotune.space import Space

#: Key of the baseline in the stored space, next to the knobs' names.
BASELINE = "baseline"
#: Conditions take some kilobytes.
MAX_BYTES = 2**20


class StudyConditions(Record):
    """What must not change between the runs of a study.

    Attributes:
        space: the values of each knob that may be chosen, and the settings of the `BASELINE`, as text.
    """

    schema_version: int = SCHEMA_VERSION
    fingerprint: Fingerprint
    space: dict[str, tuple[str, ...]]

    def differences(self, now: StudyConditions) -> list[tuple[str, str, str]]:
        """Return rows ``(name, then, now)`` for everything that differs."""
        rows = self.fingerprint.differences(now.fingerprint)
        absent = ("absent",)
        return rows + [
            (f"choices of {name}", ", ".join(self.space.get(name, absent)), ", ".join(now.space.get(name, absent)))
            for name in sorted(now.space.keys() | self.space.keys())
            if now.space.get(name) != self.space.get(name)
        ]


def conditions_of(fingerprint: Fingerprint, space: Space) -> StudyConditions:
    """Return the conditions of a study on this machine, in this space."""
    spelled = {name: tuple(spell(v) for v in space.legal(name)) for name in space.choices}
    spelled[BASELINE] = tuple(f"{n}={spell(v)}" for n, v in space.baseline.items())
    return StudyConditions(fingerprint=fingerprint, space=spelled)


def write_conditions(files: StudyFiles, conditions: StudyConditions) -> None:
    """Write ``conditions.json``.

    Raises:
        MachineError: the folder cannot be written.
    """
    write_atomic(files.conditions, conditions.model_dump_json(indent=1))


def read_conditions(files: StudyFiles) -> StudyConditions | None:
    """Return the conditions in ``conditions.json``; ``None`` if there is no such file, as in older studies.

    Raises:
        MachineError: the file cannot be read.
    """
    try:
        return StudyConditions.model_validate_json(read_regular(files.conditions, MAX_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise MachineError(
            f"{files.conditions} cannot be read: {str(error).splitlines()[0]}",
            advice="start a new study: without this file nothing tells where this one was measured.",
        ) from error
