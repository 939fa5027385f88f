"""A test job that does not end shows where its processes are, and nothing is left of it."""

from __future__ import annotations

import pytest
from launch import LaunchTimeoutError, start_ranks

pytestmark = [pytest.mark.launches, pytest.mark.timeout(240)]


def test_a_job_that_does_not_end_shows_where_its_ranks_are() -> None:
    script = """
        import threading

        def waits_for_ever():
            print("here", flush=True)
            threading.Event().wait()

        waits_for_ever()
    """
    with start_ranks(script, 2) as job:
        job.wait_for("here", count=2)
        ranks = job.ranks()
        with pytest.raises(LaunchTimeoutError) as raised:
            job.wait(0.1)
        said = str(raised.value)
        assert all(f"process {pid}: " in said for pid in (job.launcher.pid, *ranks.values()))
        assert "in waits_for_ever" in said  # at least once: MPICH's launcher then kills the other
        assert not job.processes()
