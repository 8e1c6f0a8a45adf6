"""Patience with a database whose server is restarted, or out of reach for a while, in the middle of a search.

What was asked last may have been done although no answer came. So whatever is asked again is something that may be done
twice, or first looks whether it has been done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from uuid import uuid4

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage
from optuna.study import StudyDirection
from optuna.study._frozen import FrozenStudy
from optuna.trial import FrozenTrial, TrialState

from autotune.base.clock import Clock
from autotune.base.errors import InterruptedSearch, MachineError
from autotune.space.formatting import seconds_text
from autotune.study.budget import Budget

#: A search waits for so long for an answer: servers are restarted, and stand-ins take over, within minutes.
PATIENCE_S = 300.0
#: Seconds between two attempts, at first and at most.
_SOON_S, _LATER_S = 0.2, 5.0
#: Attribute of a trial by which its creation is known again.
_CREATION = "autotune_creation"

_T = TypeVar("_T")


class LostConnection(Exception):
    """The server did not answer. It may have done what it was asked, or not."""


@dataclass(frozen=True)
class Patience:
    """Asks a database until it answers, for a limited time, which the budget does not count.

    Launches that run meanwhile run on, and what they have shown is in their folders.

    Attributes:
        address: of the database.
        budget: of the search; ``None`` if nothing is counted.
        says: receives one sentence when the waiting begins.
        stop: returns the number of a signal that ends the waiting, or ``None``.
        who: waits, for people. advice: what they can do once it has waited too long.
    """

    address: str
    clock: Clock
    budget: Budget | None = None
    says: Callable[[str], None] = lambda sentence: None
    stop: Callable[[], int | None] = lambda: None
    who: str = "the search"
    advice: str = "try again once it answers."
    limit_s: float = PATIENCE_S

    def until_answered(self, ask: Callable[[bool], _T]) -> _T:
        """Call ``ask`` until it raises no `LostConnection`; return what it returns.

        Args:
            ask: is told whether it has been called before, and may then have been successful.

        Raises:
            MachineError: the time is over. What is measured is in the launches' folders, where a resume finds it.
            InterruptedSearch: a signal came; the same holds.
        """
        try:
            return ask(False)
        except LostConnection:
            began_s = self.clock.now()
            self.says(f"{self.address} does not answer; {self.who} waits for it, {seconds_text(self.limit_s)} at most")
        pause_s = _SOON_S
        try:
            while True:
                self.clock.sleep(pause_s)
                pause_s = min(2 * pause_s, _LATER_S)
                number = self.stop()
                if number is not None:
                    raise InterruptedSearch(number)
                try:
                    return ask(True)
                except LostConnection as lost:
                    if self.clock.now() - began_s > self.limit_s:
                        raise MachineError(
                            f"{self.address} has not answered for {seconds_text(self.limit_s)}: {lost}",
                            advice=self.advice,
                        ) from lost
        finally:
            if self.budget is not None:
                self.budget.leave_out(self.clock.now() - began_s)


class PatientStorage(BaseStorage):
    """An Optuna storage that is asked again after a lost connection, and by one search at a time.

    Args:
        storage: raises `LostConnection`.
    """

    def __init__(self, storage: BaseStorage, patience: Patience) -> None:
        self._storage = storage
        self._patience = patience

    def _repeatedly(self, ask: Callable[[], _T]) -> _T:
        """Ask something that may be asked twice: it reads, or sets something to a value."""
        return self._patience.until_answered(lambda _again: ask())

    def create_new_study(self, directions: Sequence[StudyDirection], study_name: str | None = None) -> int:
        def create(again: bool) -> int:
            try:
                return self._storage.create_new_study(directions, study_name)
            except optuna.exceptions.DuplicatedStudyError:
                if not again or study_name is None:
                    raise
                return self._storage.get_study_id_from_name(study_name)

        return self._patience.until_answered(create)

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        creation = uuid4().hex
        template = template_trial or optuna.trial.create_trial(state=TrialState.RUNNING)
        template.system_attrs = {**template.system_attrs, _CREATION: creation}

        def create(again: bool) -> int:
            for trial in self._storage.get_all_trials(study_id, deepcopy=False) if again else ():
                if trial.system_attrs.get(_CREATION) == creation:
                    return trial._trial_id
            return self._storage.create_new_trial(study_id, template)

        return self._patience.until_answered(create)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        def put(again: bool) -> bool:
            if again and self._storage.get_trial(trial_id).state == state:
                return True
            return self._storage.set_trial_state_values(trial_id, state, values)

        return self._patience.until_answered(put)

    def delete_study(self, study_id: int) -> None:
        self._repeatedly(lambda: self._storage.delete_study(study_id))

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._repeatedly(lambda: self._storage.set_study_user_attr(study_id, key, value))

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._repeatedly(lambda: self._storage.set_study_system_attr(study_id, key, value))

    def get_study_id_from_name(self, study_name: str) -> int:
        return self._repeatedly(lambda: self._storage.get_study_id_from_name(study_name))

    def get_study_name_from_id(self, study_id: int) -> str:
        return self._repeatedly(lambda: self._storage.get_study_name_from_id(study_id))

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._repeatedly(lambda: self._storage.get_study_directions(study_id))

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return self._repeatedly(lambda: self._storage.get_study_user_attrs(study_id))

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self._repeatedly(lambda: self._storage.get_study_system_attrs(study_id))

    def get_all_studies(self) -> list[FrozenStudy]:
        return self._repeatedly(self._storage.get_all_studies)

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        self._repeatedly(
            lambda: self._storage.set_trial_param(trial_id, param_name, param_value_internal, distribution)
        )

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._repeatedly(lambda: self._storage.set_trial_intermediate_value(trial_id, step, intermediate_value))

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._repeatedly(lambda: self._storage.set_trial_user_attr(trial_id, key, value))

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._repeatedly(lambda: self._storage.set_trial_system_attr(trial_id, key, value))

    def get_trial_id_from_study_id_trial_number(self, study_id: int, trial_number: int) -> int:
        return self._repeatedly(lambda: self._storage.get_trial_id_from_study_id_trial_number(study_id, trial_number))

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._repeatedly(lambda: self._storage.get_trial(trial_id))

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        return self._repeatedly(lambda: self._storage.get_all_trials(study_id, deepcopy=deepcopy, states=states))

    def get_best_trial(self, study_id: int) -> FrozenTrial:
        return self._repeatedly(lambda: self._storage.get_best_trial(study_id))

    def remove_session(self) -> None:
        self._storage.remove_session()
