"""MLflow: a run in the experiment named after the workload, wherever ``MLFLOW_TRACKING_URI`` says.

A training that goes on continues its run, which is found by a tag. https://mlflow.org/docs/latest/python_api/
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from autotune.base.tracking import TrackedRun, Tracker

_KEY = "autotune.key"


class Mlflow(Tracker):
    package = "mlflow"
    pip = "mlflow"

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        # Not the functions of the module, which keep a run of their own open for the whole process.
        self._client = MlflowClient()
        known = self._client.get_experiment_by_name(run.project)
        experiment = self._client.create_experiment(run.project) if known is None else known.experiment_id
        earlier = self._client.search_runs([experiment], f"tags.`{_KEY}` = '{run.key}'", max_results=1)
        if earlier:
            self._run = earlier[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
            return
        self._run = self._client.create_run(experiment, run_name=run.name, tags={_KEY: run.key}).info.run_id
        self._client.log_batch(self._run, params=[Param(name, str(value)) for name, value in run.parameters.items()])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now_ms = int(1000 * time.time())
        self._client.log_batch(self._run, metrics=[Metric(name, value, now_ms, step) for name, value in values.items()])

    def tell(self, step: int, name: str, text: str) -> None:
        self._client.set_tag(self._run, name, text)

    def end(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


TRACKER = Mlflow
