"""The schema of a profile: nested records, and the constraints on each key."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SerializerFunctionWrapHandler, model_serializer

from autotune.base.errors import UnknownNameError
from autotune.base.records import LARGEST, LARGEST_IMAGE, Fingerprint, Record, TrialStatus, Value
from autotune.knobs import KNOBS, spell
from autotune.space import canonical
from autotune.workload.catalog import is_named

#: The schema version that is written, and the newest that can be read.
SCHEMA_VERSION = 1
EXPORT_AGAIN = "write it again with `autotune export STUDY -o FILE`."


def shown(value: object, limit: int = 60, *, quoted: bool = True) -> str:
    """Format ``value`` for a sentence or a comment: printable, on one line, at most ``limit`` characters."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    text = printable(repr(value) if quoted or not isinstance(value, str) else value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def printable(text: str) -> str:
    """Return ``text`` on one line, with everything escaped that could end a comment or move a cursor."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class Wrong(ValueError):
    """An invalid value of a kind that pydantic cannot detect.

    Attributes:
        sentence: continues a sentence that starts with the key's name ("must be …").
        key: the key within the section being checked, or "" for the section itself.
        advice: what to change; ``None`` if the sentence says it.
    """

    def __init__(self, sentence: str, *, key: str = "", advice: str | None = None) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.key = key
        self.advice = advice


def _significant(value: float) -> float:
    # A rate known to some tenths of a percent does not need 17 digits. Rounding happens here and not in `dump`, so that
    # the object and its file are equal.
    return float(f"{value:.6g}")


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, int) or math.isfinite(value)


def _interval(value: Any) -> tuple[float, float]:
    if isinstance(value, list | tuple) and len(value) == 2 and all(map(_is_number, value)) and value[0] <= value[1]:
        with contextlib.suppress(OverflowError):  # an integer too large for a float
            return _significant(float(value[0])), _significant(float(value[1]))
    raise Wrong(f"must be two numbers, [low, high], not {shown(value)}")


def _moment(value: str) -> str:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        raise Wrong(f"must be a time in ISO 8601, not {shown(value)}") from None
    return value


def _statuses(value: dict[str, int]) -> dict[str, int]:
    for name in value:
        if name not in list(TrialStatus):
            advice = UnknownNameError("status", name, TrialStatus).advice
            raise Wrong(f"has an unknown status {shown(name)}", advice=advice)
    return value


def _configuration(value: Any) -> Any:
    """Check a configuration against the contract's spelling, and sort it in the contract's order."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return value  # pydantic rejects it with its own message
    for name, setting in value.items():
        _setting(name, setting)
    if "batch_size" not in value:
        raise Wrong("is missing", key="batch_size", advice=EXPORT_AGAIN)
    active = canonical(value)
    for name in value:
        if name not in active:
            required_knob = KNOBS[name].needs or ""
            raise Wrong(
                f"means nothing with {required_knob} {spell(value[required_knob])}",
                key=name,
                advice="remove that line.",
            )
    return active


def _settings(value: Any) -> Any:
    """Check values of knobs against the contract's spelling."""
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        for name, setting in value.items():
            _setting(name, setting)
    return value


def _setting(name: str, value: Any) -> None:
    if name.startswith("workload.") and name != "workload.":
        if not (isinstance(value, bool | str) or _is_number(value)):
            raise Wrong(f"must be text, a finite number, true or false, not {shown(value)}", key=name)
        return
    if name not in KNOBS:
        raise Wrong(f"has an unknown knob {shown(name)}", advice=UnknownNameError("knob", name, KNOBS).advice)
    knob = KNOBS[name]
    if knob.values is None:
        if type(value) is not int or not knob.minimum <= value <= knob.maximum:
            raise Wrong(f"must be a whole number from {knob.minimum} to {knob.maximum}, not {shown(value)}", key=name)
    elif not any(value == allowed and type(value) is type(allowed) for allowed in knob.values):
        raise Wrong(f"must be one of {', '.join(map(spell, knob.values))}, not {shown(value)}", key=name)


Whole = Annotated[int, Field(strict=True, ge=0, le=LARGEST)]
Count = Annotated[int, Field(strict=True, ge=1, le=LARGEST)]
Pixels = Annotated[int, Field(strict=True, ge=1, le=LARGEST_IMAGE)]
Flag = Annotated[bool, Field(strict=True)]
Rate = Annotated[float, Field(strict=True, gt=0), AfterValidator(_significant)]
Seconds = Annotated[float, Field(strict=True, ge=0), AfterValidator(_significant)]
Score = Annotated[float, Field(strict=True), AfterValidator(_significant)]
Fraction = Annotated[float, Field(strict=True, ge=0, le=1), AfterValidator(_significant)]
LearningRate = Annotated[float, Field(strict=True, ge=0), AfterValidator(_significant)]
Interval = Annotated[tuple[float, float], BeforeValidator(_interval)]
Configuration = Annotated[dict[str, Value], BeforeValidator(_configuration)]


class _Section(Record):
    """A part of a profile. Keys added later are not written at their defaults, so that versions that do not know them
    can read the profiles of most trainings."""

    _later: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        data: dict[str, Any] = write(self)
        fields = type(self).model_fields
        usual = {n for n in self._later if getattr(self, n) == fields[n].get_default(call_default_factory=True)}
        return {key: value for key, value in data.items() if key not in usual}


class ProfileWorkload(_Section):
    """What is trained.

    ``path`` and ``module`` (``package.module:NAME``) only say where it was found; the profile is valid for any workload
    with this ``sha256``. Both are ``None`` for a workload of the catalog.

    ``flags`` only record the values given to ``--map``; a profile adds no words to a command. Without such words, the
    script uses the values in ``own``, as far as they are known.
    """

    name: str
    path: str | None = None
    module: str | None = None
    args: dict[str, str] = Field(default_factory=dict)
    flags: dict[str, str] = Field(default_factory=dict)
    own: Annotated[dict[str, Value], BeforeValidator(_settings)] = Field(default_factory=dict)
    sha256: str

    _later = ("flags", "own")

    @property
    def model(self) -> str:
        """The value of ``--model`` that finds the workload again."""
        return self.module or self.path or self.name

    @property
    def is_script(self) -> bool:
        """Whether it is a script of the user's, which no ``--model`` names."""
        return self.path is None and self.module is None and not is_named(self.name)


class Measured(_Section):
    """A configuration and its rate in samples/s, with the rate's 95 % interval ``(low, high)``.

    ``learning_rate`` is that of the optimizer's first parameter group; ``None`` if it is unknown.
    """

    configuration: Configuration
    samples_per_second: Rate
    ci95: Interval
    learning_rate: LearningRate | None = None

    _later = ("learning_rate",)


class Compared(Measured):
    """A measured configuration compared with the baseline: ``speedup`` is its rate divided by the baseline's."""

    speedup: Rate
    speedup_ci95: Interval


class Gives(_Section):
    """The measured performance of the configuration.

    Attributes:
        samples_per_second: rate including epoch turns. ci95, speedup_ci95: 95 % intervals ``(low, high)``.
        speedup: over the baseline; ``None`` if it was not launched in turns with it.
        peak_memory_bytes: peak of device memory, or of host memory on a CPU (see `peak_memory_is`).
        compile_seconds: duration of the first step; startup_seconds: from the launch to that step. Both are not part of
            the rate.
        loader_wait_fraction: fraction of a step spent waiting for the loader, 0 to 1; ``None`` if unknown.
        epoch_turn_seconds: extra time between two epochs; ``None`` if it could not be measured.
        launches: number of independent processes that the figures are based on.
        same_batch: whether the configuration has the baseline's batch size.
        trains_like_fp32: whether its losses match those of eager fp32 from the same weights and batches; ``None`` if
            not checked.
        same_data: whether its loader delivers the same data as the baseline's; ``None`` if not compared.
        memory_headroom: fraction of the memory that stayed free in a longer run with an evaluation pass, 0 to 1;
            ``None`` if not checked.
        sustained_samples_per_second: CUDA: the rate in that longer run, at the clocks that the card holds; ``None`` if
            not measured.
        learning_rate: of the optimizer's first parameter group; ``None`` if it is unknown.
        unproven: what the speedup is if separate launches in turns have not proven it, as a clause; ``None`` if they
            have.
    """

    samples_per_second: Rate
    ci95: Interval
    speedup: Rate | None
    speedup_ci95: Interval | None
    peak_memory_bytes: Whole | None
    peak_memory_is: Literal["device", "host"]
    compile_seconds: Seconds
    startup_seconds: Seconds
    loader_wait_fraction: Fraction | None
    epoch_turn_seconds: Seconds | None
    launches: Count
    same_batch: Flag
    trains_like_fp32: Flag | None = None
    same_data: Flag | None = None
    memory_headroom: Fraction | None = None
    sustained_samples_per_second: Rate | None = None
    learning_rate: LearningRate | None = None
    unproven: str | None = None

    _later = ("learning_rate", "same_data", "unproven")


class Conditions(_Section):
    """The conditions of the measurement.

    ``image_size`` is in pixels (``None`` without images), ``data`` is the kind of data. ``page_cache`` says whether its
    files were read from memory (``warm``) or perhaps from the disk (``cold``); it is ``None`` without files and in
    profiles of older versions. With ``allow_busy``, the figures include the effects of other processes on the machine.
    ``ranks`` processes train together; the batch size is that of each, rates are of all together. A script saw
    ``cards`` cards. With ``keeps_batch_size``, no other batch size was searched, because none was wanted. Rates count
    ``samples``, or ``steps`` of a script that does not report its samples.
    """

    device: str
    device_name: str
    image_size: Pixels | None
    data: Literal["generated", "synthetic", "folder", "none"]
    page_cache: Literal["warm", "cold", "unknown"] | None = None
    epoch_samples: Count | None
    worker_start_method: Literal["fork", "forkserver", "spawn"]
    seed: Whole
    allow_busy: Flag = False
    ranks: Count = 1
    cards: Count = 1
    keeps_batch_size: Flag = False
    counts: Literal["samples", "steps"] = "samples"

    _later = ("ranks", "cards", "keeps_batch_size", "counts")


class Versions(Record):
    """Version strings of the software; ``None`` for what the machine does not have."""

    autotune: str
    torch: str | None = None
    torchvision: str | None = None
    optuna: str | None = None
    python: str | None = None
    cuda: str | None = None
    cudnn: str | None = None
    driver: str | None = None


class Provenance(_Section):
    """Where the figures come from.

    ``score`` is the objective's, ``trials`` counts trials by status, ``measured_seconds`` counts kept windows only.
    ``sha256`` is that of everything else in the profile (see `Profile.sealed`), so that a change by hand is noticed;
    ``None`` in profiles of older versions. ``created`` is in ISO 8601; it is the last line, so that a truncated file is
    detected.
    """

    study: str
    trial: Whole
    objective: str
    score: Score | None = None
    trials: Annotated[dict[str, Whole], AfterValidator(_statuses)]
    measured_seconds: Seconds
    elapsed_seconds: Seconds
    sha256: str | None = None
    created: Annotated[str, AfterValidator(_moment)]

    _later = ("sha256",)


class Profile(Record):
    """A configuration, its performance, and where these figures are valid. Floats have six significant digits."""

    schema_version: Literal[1] = 1
    workload: ProfileWorkload
    configuration: Configuration
    gives: Gives
    baseline: Measured
    best_same_batch: Compared | None = None
    conditions: Conditions
    fingerprint: Fingerprint
    versions: Versions
    provenance: Provenance

    @property
    def unit(self) -> str:
        """The unit of its rates."""
        return f"{self.conditions.counts}/s"

    @property
    def behind_store(self) -> str | None:
        """The slow store that the search put in front of the data, in words; ``None`` if there was none."""
        store = self.fingerprint.values.get("data_store")
        return None if store is None else str(store)

    def sealed(self) -> Profile:
        """Return this profile with the hash of its content, which must be as it was measured."""
        provenance = self.provenance.model_copy(update={"sha256": self._sha256()})
        return self.model_copy(update={"provenance": provenance})

    @property
    def altered(self) -> bool:
        """Whether it was changed after it was written. The hash of the content is no signature: it detects accidents,
        not malice."""
        return self.provenance.sha256 not in (None, self._sha256())

    def _sha256(self) -> str:
        # Leave out keys at their defaults: those that a later version adds must not change the hash.
        data = self.model_dump(mode="json", exclude_defaults=True, exclude={"provenance": {"sha256"}})
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={spell(value)}" for name, value in self.configuration.items())
        return f"<Profile of {self.workload.name}, study {self.provenance.study}: {values}>"

    __str__ = __repr__
