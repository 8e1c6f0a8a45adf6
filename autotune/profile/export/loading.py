"""Arguments of a DataLoader in a section of their own, as some formats have them."""

from __future__ import annotations

from autotune.profile.export.format import Expression, Given, Told
from autotune.knobs.knob import Knob
from autotune.knobs.num_workers import KNOB as WORKERS
from autotune.base.records import Value

_SECTION = "dataloader."


def of_loader(knob: Knob) -> Expression:
    """Return how a knob of the loader is told in the section."""
    return lambda value, given: Told({_SECTION + name: v for name, v in knob.loader_options(value).items()})


def workers(value: Value, given: Given) -> Told:
    """Return how the number of workers is told, with how they are started."""
    how = {f"{_SECTION}multiprocessing_context": given.start_method} if value else {}
    return Told({**of_loader(WORKERS)(value, given).options, **how})
