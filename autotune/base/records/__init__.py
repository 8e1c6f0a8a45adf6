"""The frozen values that cross processes and restarts, with a schema version where they are stored.

They are pydantic models because each of them is read back from a file that another process wrote, or was killed while
writing: unknown keys, missing keys, NaN and infinity are rejected.
Names carry their units: ``_s`` seconds, ``_bytes`` bytes, ``_per_s`` per second.

This package imports neither torch nor any other part of autotune, so that objectives can import it on its own.
"""

from autotune.base.records.base import *  # noqa: F403
from autotune.base.records.facts import *  # noqa: F403
from autotune.base.records.job import *  # noqa: F403
from autotune.base.records.launch import *  # noqa: F403
from autotune.base.records.measurement import *  # noqa: F403
from autotune.base.records.outcome import *  # noqa: F403
from autotune.base.records.study import *  # noqa: F403
