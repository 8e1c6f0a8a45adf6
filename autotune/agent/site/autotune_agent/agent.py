"""The agent in one process of a script: its doors, when it begins, and what it says."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from autotune_agent.deliveries import Noting, Repeating
from autotune_agent.facts import is_capturing
from autotune_agent.loaders import LoaderDoor
from autotune_agent.models import ModelDoor
from autotune_agent.optimizers import OptimizerDoor, OwnCode, OwnUpdates
from autotune_agent.other_processes import Elsewhere, spare_workers
from autotune_agent.process import ProcessDoor
from autotune_agent.setting import Setting, safely, say, sentence
from autotune_agent.turns import Turning
from autotune_agent.watching import TrainingObserver

#: Steps of one optimizer after which all models of the training have been seen. A GAN may train one of its networks
#: five times before the other.
_SEEN_AFTER = 6
#: Variables in which launchers give a process its rank.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")


class Agent:
    """What autotune does inside a script.

    Args:
        plan: ``title``, shown first in its one line; ``settings``, each with the attributes of a `Setting`; ``watch``,
            the path of a file for what is observed of the training (see `TrainingObserver`), if wanted, and ``losses``,
            how many losses to write; ``seed``, the seed of random numbers, unless the script seeds them itself;
            ``compared``, whether what loaders deliver under the settings has been compared; ``deliveries``, how much of
            what they deliver is noted (see `Noting`); ``repeats``, how many batches they repeat, if any; ``commands``,
            a pipe, if configurations are to take turns, and ``live``, whether the training is to go on whatever they do
            (see `Turning`); ``sockets``, a folder for the sockets of loaders' workers, which would leave a folder of
            their own behind when they are ended.
        leave: called once, when this process has begun to train.
    """

    def __init__(self, plan: dict[str, Any], leave: Callable[[], None]) -> None:
        self._title = str(plan["title"])
        self._settings = [Setting(**setting) for setting in plan["settings"]]
        self._seed = plan.get("seed")
        self._sockets = plan.get("sockets")
        self._leave = leave
        self._process = os.getpid()
        self._is_first = _is_first()
        self._elsewhere = Elsewhere(plan, "forked")
        self._began = False
        self._settled = False
        self._around = ProcessDoor(self._of("process"))
        deliveries = plan.get("deliveries")
        self._deliveries = _noting(deliveries, self) if deliveries else None
        self._repeating = Repeating(int(plan["repeats"]), self._ours) if plan.get("repeats") else None
        self._live = live = bool(plan.get("live"))
        switches = "commands" in plan and self._is_first and not (live and _are_several())
        self._loaders = LoaderDoor(
            self._of("loader"),
            self._ours,
            # In launches of a search, the search has looked at the data set, and compares the winner.
            compared=bool(plan.get("compared") or plan.get("watch")),
            rescue=self._rescue_loader if live and switches else None,
        )
        # A launch of a search is to fail if anything in it fails.
        rescue = self._rescue if live else None if plan.get("watch") else self._uncompiled
        self._models = ModelDoor(
            self._of("model"), self._begin, to_switch="commands" in plan, rescue=rescue, lowered=self._lowered
        )
        self._optimizers = OptimizerDoor(self._of("optimizer"), self._begin, self._stepped)
        # A live training needs an optimizer whose steps can be made harmless, whatever is tried in it.
        self._own_updates = None if live else OwnUpdates(self._begin, self._optimizers, self._unseen)
        self._watching = (
            TrainingObserver(plan["watch"], self._ours, self._optimizers, int(plan.get("losses", 0)))
            if plan.get("watch") and self._is_first
            else None
        )
        self._turning = (
            Turning(
                plan["commands"],
                self._around,
                self._models,
                self._optimizers,
                self._loaders,
                self._watching,
                live=live,
                first=self._noted if deliveries else None,
            )
            if switches and self._watching is not None
            else None
        )

    def install(self) -> None:
        """Open the doors. Called when ``import torch`` has just ended."""
        if self._seed is not None:
            _seed(int(self._seed))
        if self._sockets is not None:
            # The name is that of `multiprocessing`, whose processes pass it on to their children.
            multiprocessing.current_process()._config["tempdir"] = self._sockets  # type: ignore[attr-defined]
        self._around.install()
        for part in (self._deliveries, self._repeating):
            if part is not None:
                part.install()
        self._loaders.install()
        self._models.install()
        self._optimizers.install()
        if self._own_updates is not None:
            self._own_updates.install()
        if self._watching is not None:
            self._watching.install()
            atexit.register(self._watching.end)
        if self._turning is not None:
            self._turning.install()
        atexit.register(safely, self._settle)
        # A forked child inherits the patches, but is not the training.
        os.register_at_fork(after_in_child=self._models.remove)
        spare_workers()

    def _noted(self) -> None:
        """Note that as much of what loaders deliver has been noted as is wanted."""
        if self._deliveries is not None:
            self._deliveries.is_over = True

    def _rescue(self, error: Exception) -> Callable[[], None] | None:
        return self._turning.rescue(error) if self._turning is not None and self._ours() else None

    def _rescue_loader(self, error: Exception) -> Callable[[], None] | None:
        return self._turning.rescue_loader(error) if self._turning is not None else None

    def _lowered(self, why: str) -> None:
        """Undo autocast, which does not suit the script.

        Raises:
            RuntimeError: a configuration is on trial in a live training: its turn is over.
        """
        if not self._ours():
            return
        if self._turning is not None and self._turning.is_tried:
            raise RuntimeError(why)
        if self._watching is not None and not self._live:
            # A launch of a search is to fail because of it.
            self._watching.failed(why, lost=False)
            return
        self._models.stop_autocast()
        for setting in self._of("model"):
            if setting.arguments.get("autocast"):
                setting.done, setting.refused = 0, why
        if self._settled and self._is_first:
            say(f"{self._title}: autocast no longer ({why})")

    def _uncompiled(self, error: Exception) -> Callable[[], None] | None:
        """Return a function that stops compiling models, if it is the compiler that has failed."""
        names = [f"{kind.__module__}." for kind in type(error).__mro__]
        if not self._ours() or not any(name.startswith(("torch._dynamo.", "torch._inductor.")) for name in names):
            return None
        why = f"its compiler fails here: {type(error).__name__}"

        def back() -> None:
            self._models.stop_compiling()
            for setting in self._of("model"):
                if "compile" in setting.arguments:
                    setting.done, setting.refused = 0, why
            if self._settled and self._is_first:
                say(f"{self._title}: not compiled any longer ({why})")

        return back

    def _of(self, door: str) -> list[Setting]:
        return [s for s in self._settings if s.door == door and s.refused is None]

    def _ours(self) -> bool:
        return os.getpid() == self._process

    def _begin(self) -> bool:
        """Note that this process trains; return whether it is the one that the agent is meant for."""
        if not self._ours():
            if not self._began:
                self._elsewhere.tell()
            return False
        if self._own_updates is not None and not self._settled:
            self._own_updates.called()
        if not self._began:
            self._began = True
            self._around.look_again()
            self._leave()
            if self._watching is not None:
                self._watching.began()
        return True

    def _stepped(self, optimizer: Any, steps: int) -> None:
        if not self._ours():
            # An optimizer that took steps in the parent may go on in a forked child.
            return
        if is_capturing():
            # The device must not be queried now, and replays of the graph do not call back.
            return
        if self._own_updates is not None and not isinstance(optimizer, OwnCode):
            self._own_updates.stop()
            self._own_updates = None
        if self._watching is not None:
            self._watching.stepped(optimizer)
        if steps >= _SEEN_AFTER and not self._settled:
            self._settle()
        if self._turning is not None and self._settled:
            self._turning.stepped(optimizer)

    def _unseen(self, how: str) -> None:
        if self._watching is not None:
            self._watching.unseen(how)

    def _settle(self) -> None:
        """Restore the calls of modules, and say what is set: everything has been seen, or the script ends."""
        if self._settled or not self._began or not self._ours():
            return
        self._settled = True
        self._models.remove()
        if self._watching is not None:
            own = {"process": self._around.own(), "model": self._models.own, "optimizer": self._optimizers.own}
            answers = [[s.knob, s.value, s.why_not] for s in self._settings if s.ask]
            self._watching.report(own, answers)
        if self._is_first and not all(s.ask for s in self._settings):
            say(sentence(self._title, self._settings))


def _seed(number: int) -> None:
    """Seed random numbers, as if the script had done so in its first line."""
    import torch

    torch.manual_seed(number)
    random.seed(number)
    # PyTorch has imported NumPy, if it is installed.
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number)


def _noting(plan: dict[str, Any], agent: Agent) -> Noting:
    least, most = plan["batches"]
    # All ranks take equally many steps.
    plan = {**plan, "batches": [least, least if _are_several() else most]}
    return Noting(plan, agent._ours, notes=agent._is_first, may_end=lambda: agent._settled)


def _is_first() -> bool:
    """Return whether this is the only process that trains, or the first of several."""
    return next((os.environ[name] for name in _RANKS if name in os.environ), "0") == "0"


def _are_several() -> bool:
    """Return whether this is one of several ranks, all of which would have to be switched at the same step."""
    return any(os.environ.get(name, "1") != "1" for name in ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE"))
