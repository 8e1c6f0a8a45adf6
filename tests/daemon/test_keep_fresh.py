"""``--keep-fresh`` with real searches: a stale profile is searched again and replaced only by a proven faster one."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from autotune.base.records import Done, Job, JobState
from autotune.daemon.service import rematch
from autotune.profile.in_force import Store

from ..process.alive import wait_until  # noqa: TID252
from .conftest import Daemon, real_request


def done(job: Job) -> Done:
    assert isinstance(job.status, Done), job.status
    return job.status


@pytest.mark.stress
@pytest.mark.timeout(400)
def test_another_driver_makes_it_stale_and_a_rematch_decides(daemon: Daemon, project: Path) -> None:
    """The profile's torch version is edited, as an example of all the conditions that can change."""
    daemon.start()
    (job,) = daemon.client.submit(real_request(project, "first", budget_s=20.0, keep_fresh=True))
    (ended,) = daemon.until_ended(job.id)
    slot = done(ended).slot
    assert slot is not None
    store = Store(daemon.files.profiles)
    before = store.one(slot)
    assert before.state.stale == () and before.path.exists()
    daemon.stop()
    text = before.path.read_text()
    # Pretend that the profile was measured with an older torch.
    before.path.write_text(re.sub(r'(\n +torch: )"?2[^\n]*', r'\g<1>"2.0.0"', text))
    assert store.one(slot).profile.fingerprint.values["torch"] == "2.0.0"

    # The daemon checks at start, and submits the same search with the stale configuration as the baseline.
    daemon.start()
    wait_until(lambda: len(daemon.client.rows()) == 2)
    again = daemon.client.job(2).request
    assert again.refreshes == slot and again.keep_fresh
    assert again.spec.baseline["batch_size"] == str(before.profile.configuration["batch_size"])
    assert store.one(slot).state.stale
    (rematched,) = daemon.until_ended(2)
    after = store.one(slot)
    if done(rematched).slot is None:
        # Nothing pauses any more, so what is faster by a little may not be shown. The old profile stays as it is.
        assert "no verdict" in str(done(rematched).found) and len(after.state.entries) == 1
        return
    assert done(rematched).slot == slot
    assert [entry.file for entry in after.state.entries] == ["0001.yaml", "0002.yaml"]
    last = after.state.entries[-1]
    same = after.profile.configuration == before.profile.configuration
    # Either result may occur on this machine: a proven faster configuration, or the same one measured again.
    assert last.replaced and last.verdict.startswith("the same" if same else "proven faster")
    assert same or after.profile.gives.speedup_ci95[0] > 1
    assert after.profile.fingerprint.values["torch"] != "2.0.0" and after.state.stale == ()
    # The new profile's baseline is the stale profile's configuration.
    assert after.profile.baseline.configuration == before.profile.configuration
    daemon.stop()

    # Nothing has changed since, so no further job is submitted.
    daemon.start()
    wait_until(lambda: daemon.client.status()["uptime_s"] > 4)
    assert len(daemon.client.rows()) == 2


def test_one_change_asks_once(project: Path) -> None:
    job = Job(id=1, submitted="", request=real_request(project, "first", python=sys.executable), status=Done(ended=""))
    rows = [["driver", "580", "590"], ["torch", "2.15", "2.16"]]
    first = rematch(job, "slot", {"batch_size": "64"}, rows)
    assert rematch(job, "slot", {"batch_size": "64"}, rows[::-1]).spec.mark == first.spec.mark
    assert rematch(job, "slot", {"batch_size": "64"}, rows[:1]).spec.mark != first.spec.mark
    assert (first.spec.name, first.spec.baseline, first.refreshes) == ("", {"batch_size": "64"}, "slot")
    assert job.state is JobState.DONE
