"""Fakes, factories for records, and contract suites, for tests of autotune and of code built on it.

Nothing here starts a process, sleeps, or inspects the machine.
"""

from tests.support.clock import *  # noqa: F403
from tests.support.contract import *  # noqa: F403
from tests.support.daemon import *  # noqa: F403
from tests.support.makers import *  # noqa: F403
from tests.support.scripted import *  # noqa: F403
from tests.support.surfaces import *  # noqa: F403
from tests.support.workers import *  # noqa: F403
