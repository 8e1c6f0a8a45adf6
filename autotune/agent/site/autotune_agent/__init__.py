"""The agent: acts inside a script, at a handful of PyTorch's own doors. It needs only torch and the standard library.

It is armed at the start of each Python process of a command, and acts when ``import torch`` has ended. The process
that trains is the one that calls a model with gradients on, or takes a step of an optimizer; programs that it starts
from then on are left alone, and so are workers of loaders. A process that the script spawns by `multiprocessing` is
only observed: if it trains, that is reported (see `Elsewhere`).

It runs on the script's interpreter and PyTorch, whatever autotune itself runs on: Python 3.9 or later, PyTorch 2.6 or
later.
"""

from __future__ import annotations

import json
import os
import sys

#: The variable that holds the plan, in JSON (see `Agent`).
PLAN = "AUTOTUNE_AGENT"


def arm(folder: str) -> None:
    """Act as soon as ``import torch`` has ended, if this process is part of a script that has a plan.

    Args:
        folder: the folder on PYTHONPATH through which the agent was loaded.
    """
    plan = os.environ.get(PLAN)
    if plan is None:
        return
    helps = _is_helper(list(getattr(sys, "orig_argv", sys.argv)))
    from autotune_agent.import_hook import when_imported

    def act() -> None:
        if helps:
            from autotune_agent.other_processes import Elsewhere

            Elsewhere(json.loads(plan), "spawned").install()
            return
        from autotune_agent.agent import Agent

        Agent(json.loads(plan), leave=lambda: _leave(folder)).install()

    when_imported("torch", act)


def _is_helper(argv: list[str]) -> bool:
    """Return whether `multiprocessing` has started this process: as a spawned child, or as one of its servers."""
    return "--multiprocessing-fork" in argv or any(a.startswith("from multiprocessing.") for a in argv)


def _leave(folder: str) -> None:
    """Keep the agent out of all children that are started from now on."""
    os.environ.pop(PLAN, None)
    # Keep whatever the script has added to it.
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [e for e in entries if not e or os.path.abspath(e) != folder]
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)
