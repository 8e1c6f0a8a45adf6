"""The request for a search."""

from __future__ import annotations

from pydantic import Field

from autotune.base.records.base import SCHEMA_VERSION, Record
from autotune.base.records.launch import CommandRef, SlowStore
from autotune.base.records.measurement import Goal

#: The largest whole number in a request or a profile: torch takes no larger seed, and SQLite stores no larger number.
LARGEST = 2**63 - 1
#: The largest side of an image: memory grows with the square, and no network trains on larger ones.
LARGEST_IMAGE = 2**14


class StudySpec(Record):
    """A request for a search, stored in ``study.yaml``. Resuming reads it back and repeats the request.

    Attributes:
        mark: unique to the request. The mark of the study's processes begins with it.
        device: ``auto`` or a contract name. devices: several, on which trials run side by side, as they were typed.
        on: the cluster on whose nodes launches run: ``ray://HOST:PORT``, or ``ray`` for the one of this machine;
            ``None``: here. on_resources: what each worker asks for there.
        workers: how many work there at most.
        command: the script to tune as it stands; ``None`` for a workload. `model` is then what it is called.
        samples_per_step: of a script, where they cannot be seen; ``None``: as its loader tells.
        flags, output_flag, scratch: of a script, ``--map`` and where it writes; see `CommandRef`.
        rate, rate_file: of a program that tells its own rate; see `CommandRef`.
        data: the value of ``--data``. store_latency_s, store_bytes_per_s: of a slow store that is put in front of it;
            store_cache_bytes: of a cache in front of that. epochs: how many of them the training has, if stated.
        samples: how many it reads in all, if that is stated instead. price_per_hour: of the machine, in the user's
            currency.
        storage: of the study, the address of a database that several machines share, without a password; ``None``: in
            its own folder.
        allow_busy: keep windows in which other processes used the cores or the card.
        keep_batch_size: search at the baseline's batch size only.
        global_batch: samples of an optimizer's step, of all ranks together, which are the batch then; `batch_size` is
            how many of them go through the model at once in the baseline.
        ranks: how many processes train together. The batch size is each one's.
        objective: one, or several with commas between them. require: what the winner must meet, each as
            ``FIGURE<=VALUE``.
        narrowed, fixed, baseline: ``--set``, ``--fix``, ``--baseline``, with the values as text.
    """

    schema_version: int = SCHEMA_VERSION
    name: str
    mark: str
    created: str
    model: str
    command: CommandRef | None = None
    samples_per_step: int | None = Field(default=None, gt=0)
    flags: dict[str, str] = Field(default_factory=dict)
    output_flag: str | None = None
    scratch: bool = False
    rate: str | None = None
    rate_file: str | None = None
    args: dict[str, str] = Field(default_factory=dict)
    data: str = "generated"
    store_latency_s: float | None = Field(default=None, gt=0)
    store_bytes_per_s: int | None = Field(default=None, gt=0, le=LARGEST)
    store_cache_bytes: int | None = Field(default=None, gt=0, le=LARGEST)
    epochs: int | None = Field(default=None, gt=0, le=10**6)
    samples: int | None = Field(default=None, gt=0, le=LARGEST)
    price_per_hour: float | None = Field(default=None, gt=0, le=10**6)
    objective: str = "throughput"
    require: tuple[str, ...] = ()
    device: str = "auto"
    devices: str | None = None
    on: str | None = None
    on_resources: dict[str, str] = Field(default_factory=dict)
    workers: int | None = Field(default=None, gt=0, le=2**10)
    batch_size: int | None = Field(default=None, gt=0, le=LARGEST)
    image_size: int | None = Field(default=None, gt=0, le=LARGEST_IMAGE)
    budget_s: float = Field(default=600.0, gt=0)
    trials: int | None = Field(default=None, gt=0, le=LARGEST)
    sampler: str = "auto"
    seed: int = Field(default=0, ge=0, le=LARGEST)
    memory_limit_bytes: int | None = Field(default=None, gt=0, le=LARGEST)
    allow_busy: bool = False
    keep_batch_size: bool = False
    global_batch: int | None = Field(default=None, gt=0, le=LARGEST)
    ranks: int = Field(default=1, gt=0, le=2**10)
    storage: str | None = None
    narrowed: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    fixed: dict[str, str] = Field(default_factory=dict)
    baseline: dict[str, str] = Field(default_factory=dict)

    @property
    def objectives(self) -> tuple[str, ...]:
        """Names or files of the objectives; the first chooses the winner."""
        return tuple(self.objective.split(","))

    @property
    def rank_batch(self) -> int | None:
        """A rank's part of the global batch, if that is stated."""
        return None if self.global_batch is None else self.global_batch // self.ranks

    @property
    def goal(self) -> Goal:
        """What the training is to be."""
        return Goal(epochs=self.epochs, samples=self.samples, price_per_hour=self.price_per_hour)

    @property
    def script(self) -> CommandRef | None:
        """The command with all that options say of it; ``None`` for a workload."""
        told = ("samples_per_step", "flags", "output_flag", "scratch", "rate", "rate_file")
        return (
            None
            if self.command is None
            else self.command.model_copy(update={name: getattr(self, name) for name in told})
        )

    @property
    def store(self) -> SlowStore | None:
        """The slow store in front of the data; ``None`` if there is to be none."""
        told = {"latency_s": self.store_latency_s, "bytes_per_s": self.store_bytes_per_s}
        given = {name: value for name, value in told.items() if value is not None}
        return SlowStore(**given) if given else None
