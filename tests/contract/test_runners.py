"""The contract of the job runner, run on the fake and on the real runner."""

from pathlib import Path

import pytest

from autotune.base.layout import QueueFiles
from autotune.base.records import Job
from autotune.daemon.runner import ProcessRunner
from tests.support import Behaviour, RunnerContract, RunnerRig, ScriptedRunner, make_job_request

from ..process.alive import wait_until  # noqa: TID252

INTERPRETER = Path(__file__).parent.parent / "daemon" / "interpreter.py"


class TestScripted(RunnerContract):
    @pytest.fixture
    def rig(self):
        behaviours = {}

        class Runner(ScriptedRunner):
            def start(self, job, device, mark):
                child = super().start(job, device, mark)
                self.polite = behaviours[job.id] is not Behaviour.DEAF
                if behaviours[job.id] is Behaviour.WELL:
                    self.finish(job.id)
                elif behaviours[job.id] is Behaviour.BADLY:
                    self.finish(job.id, 4, message="no such data")
                elif behaviours[job.id] is Behaviour.DIES:
                    self.finish(job.id, -9, silent=True)
                return child

        def job(number, behaviour):
            behaviours[number] = behaviour
            return Job(id=number, submitted="", request=make_job_request(f"net-{number}"))

        return RunnerRig(Runner(), job, lambda number: None, wait_until)


class TestProcess(RunnerContract):
    @pytest.fixture
    def rig(self, tmp_path):
        def job(number, behaviour):
            request = make_job_request(
                f"net-{number}",
                python=str(INTERPRETER),
                folder=str(tmp_path),
                environment={"BEHAVIOUR": behaviour.value},
            )
            return Job(id=number, submitted="", request=request)

        def ready(number):
            wait_until((QueueFiles(tmp_path).job(number).folder / "ready").exists)

        QueueFiles(tmp_path).jobs.mkdir()
        runner = ProcessRunner(QueueFiles(tmp_path))
        yield RunnerRig(runner, job, ready, wait_until)
        for number in range(4):
            runner.kill(f"mark-{number}")
        wait_until(lambda: not runner.ended() and not any(map(runner.knows, range(4))))
