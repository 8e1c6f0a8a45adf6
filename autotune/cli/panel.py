"""What a person sees on stderr while a search runs: a live panel on a terminal, plain lines elsewhere.

The panel is drawn by the search's own thread, at most every `MIN_GAP_S`, and only when something on it changed: the
trials measure on the same cores. Nothing here may end a search, so a stream that cannot be written to is given up for
good.
"""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Callable
from contextlib import contextmanager, suppress
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from autotune.clock import Clock
from autotune.observer import Observer
from autotune.records import Beat, Config, StudySpec, Trial, TrialStatus
from autotune.wording import (
    count,
    counts_text,
    describe,
    ended_text,
    memory_text,
    one_line,
    rate_text,
    ratio_text,
    seconds_text,
    settings,
    status_style,
    trial_peak_bytes,
    trial_rate_text,
)

#: Seconds between two drawings, at least.
MIN_GAP_S = 0.5
_LABEL_WIDTH = 10
