"""The agent: acts inside a script, at a handful of PyTorch's own doors. Only torch and the standard library.

It is armed at the start of each Python process of a command, and acts when ``import torch`` has ended. The process
that trains is the one that calls a model with gradients on, or takes a step of an optimizer; programs that it starts
from then on are left alone, and so are workers of loaders. A process that the script spawns by `multiprocessing` is
only looked at: if it trains, that is said (see `Elsewhere`).

It runs on the script's interpreter and PyTorch, whatever autotune itself runs on: Python from 3.9, PyTorch from 2.6.
"""

from __future__ import annotations

import json
import os
import sys

#: The variable that holds the plan, in JSON: ``title``, ``settings`` (see `Setting`) and ``say``.
PLAN = "AUTOTUNE_AGENT"


def arm(folder: str) -> None:
    """Act as soon as ``import torch`` has ended, if this process is part of a script that has a plan.

    Args:
        folder: the one on PYTHONPATH that let the agent in.
    """
    plan = os.environ.get(PLAN)
    if plan is None:
        return
    helps = _is_helper(list(getattr(sys, "orig_argv", sys.argv)))
    from autotune_agent.arrival import when_imported

    def act() -> None:
        if helps:
            from autotune_agent.elsewhere import Elsewhere

            Elsewhere(json.loads(plan), "spawned").install()
            return
        from autotune_agent.agent import Agent

        Agent(json.loads(plan), leave=lambda: _leave(folder)).install()

    when_imported("torch", act)


def _is_helper(argv: list[str]) -> bool:
    """Return whether this is a process that `multiprocessing` starts: a spawned child, or one of its servers."""
    return "--multiprocessing-fork" in argv or any(a.startswith("from multiprocessing.") for a in argv)


def _leave(folder: str) -> None:
    """Let no child that is started from now on have an agent."""
    os.environ.pop(PLAN, None)
    # Whatever the script has added to it stays.
    entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    others = [e for e in entries if not e or os.path.abspath(e) != folder]
    if others:
        os.environ["PYTHONPATH"] = os.pathsep.join(others)
    else:
        os.environ.pop("PYTHONPATH", None)
