"""What fails for a while is tried again: the feed and the pipeline's process go on afterwards."""

import asyncio
import sqlite3
from contextlib import suppress

import pytest

from dpstream.serve import supervisor
from dpstream.serve.hub import Hub
from dpstream.serve.store.reader import ReleaseReader
from dpstream.serve.supervisor import Supervisor
from dpstream.serve.worker import store_folder


class Failing(ReleaseReader):
    """A reader that cannot read when it is told so."""

    problem = None

    def after(self, number, limit):
        """The horizon has moved by now."""
        if self.problem is not None:
            raise self.problem
        return super().after(number, limit)

    def expect(self, released):
        """Always."""
        raise OSError("too many open files")


@pytest.mark.parametrize("problem", [OSError("disk"), sqlite3.OperationalError("disk I/O error")])
def test_the_feed_goes_on_after_it_could_not_be_read(pipeline, caplog, problem):
    """Every event comes, and the operator's log says once what was wrong."""

    async def follow():
        reader = Failing(store_folder(pipeline))
        hub = Hub(reader, grid=0.02)
        reader.problem = problem
        task = asyncio.create_task(hub._tick())
        await asyncio.sleep(0.2)
        seen = hub.newest
        reader.problem = None
        await hub.wait(0, 10)
        task.cancel()
        return seen, hub.newest, [one.id for one in await hub.events(0)]

    before, newest, numbers = asyncio.run(follow())

    assert before == 0
    assert newest > 0
    assert numbers == list(range(1, newest + 1))
    assert caplog.text.count(str(problem)) == 1


def test_a_process_that_cannot_be_started_is_tried_again(tmp_path, monkeypatch):
    """The operator sees why."""
    monkeypatch.setattr(supervisor, "_PATIENCE", (0.01,))
    one = Supervisor(path=tmp_path, command=(str(tmp_path / "nothing"),))

    async def keep():
        with suppress(TimeoutError):
            await asyncio.wait_for(one._keep(), 0.3)

    asyncio.run(keep())

    assert one.restarts > 1
    assert one.problem["error"] == "FileNotFoundError"
