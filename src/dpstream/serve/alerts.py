"""Alerts: what is published is told to an address when it is above, or below, a figure for certain.

For certain means by its whole margin, two standard deviations. A key is told once in a window. An
alert looks at releases that everybody can see, and costs no budget. It remembers, in a file beside
the releases, up to which release it has told: a message that was not taken is sent again, also
after a restart, so that one may come twice.
"""

from __future__ import annotations

import asyncio
import json
import logging
import urllib.error
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import numpy as np
import pyarrow as pa

from dpstream.errors import DpstreamError, InvalidInput
from dpstream.privacy.state.durable_files import replace
from dpstream.serve.event_stream import HEARTBEAT, Hub
from dpstream.serve.public_facts import QueryDescription
from dpstream.serve.release_history import column_of, shown_key
from dpstream.serve.release_segments import key_values
from dpstream.serve.release_store import Released
from dpstream.serve.worker import PATIENCE
from dpstream.session.pipeline import Alert

_LOG = logging.getLogger("dpstream.serve")
MARGIN = 2.0
"""Standard deviations that a value must lie beyond its figure."""
_TIMEOUT = 5.0
_MOST_KEYS = 100  # in one message; the others are counted
_MOST_WINDOWS = 64  # whose told keys are remembered
_FORMAT = 1


@dataclass(kw_only=True)
class _Told:
    """How far an alert has come: the last release, and the keys it has told of open windows."""

    after: int
    windows: dict[int, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> _Told | None:
        """From its file, if it is there."""
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            written = known["format"]
            if written == _FORMAT:
                windows = {int(window): list(keys) for window, keys in known["windows"].items()}
                return cls(after=int(known["after"]), windows=windows)
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError, AttributeError):
            raise InvalidInput(
                f"{path} is damaged; remove it: its alert then goes on from the newest release"
            ) from None
        raise InvalidInput(f"{path} has the format {written}; use the version that wrote it")

    def write(self, path: Path) -> None:
        """Durably."""
        known = {"format": _FORMAT, "after": self.after, "windows": self.windows}
        replace(path, json.dumps(known).encode())


@dataclass(kw_only=True)
class Alerts:
    """Follows the releases for the alerts of a pipeline."""

    alerts: Sequence[Alert]
    queries: Mapping[str, QueryDescription]
    hub: Hub
    folder: Path
    """Where alerts remember how far they have come."""
    patience: Sequence[float] = PATIENCE
    """Seconds before a message that was not taken is sent again."""
    sent: dict[Alert, int] = field(default_factory=dict, init=False)
    failing: dict[Alert, str] = field(default_factory=dict, init=False)
    """Why the newest message of an alert was not taken, or not remembered."""
    _told: dict[Alert, _Told | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for alert in self.alerts:
            _check(alert, self.queries[alert.query])
            self.sent[alert] = 0
            self._told[alert] = _Told.read(self._path(alert))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Messages are sent while this lasts."""
        with ThreadPoolExecutor(2, "alerts") as pool:  # a slow address must not hold up readers
            tasks = [asyncio.create_task(self._follow(alert, pool)) for alert in self.alerts]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task

    @property
    def report(self) -> list[dict[str, Any]]:
        """How each does, for the operator; addresses may hold secrets, and are left out."""
        return [
            {
                "query": alert.query,
                "column": alert.column,
                "sent": self.sent[alert],
                "failing": self.failing.get(alert),
            }
            for alert in self.alerts
        ]

    def _path(self, alert: Alert) -> Path:
        return self.folder / f"alert-{_digest(alert)}.json"

    async def _follow(self, alert: Alert, pool: ThreadPoolExecutor) -> None:
        """Go through the releases; a full disk, say, is told, and does not end the alert."""
        await self.hub.looked.wait()
        told, tries = self._told[alert], 0
        known = told is not None and told.after <= self.hub.newest
        if told is None or not known:  # it is new, or the store is
            told = _Told(after=self.hub.newest)
        while not self.hub.closing:
            try:
                if not known:
                    await self._remember(alert, told)
                    known, tries = True, 0
                if not await self.hub.wait(told.after, HEARTBEAT):
                    continue
                for released in await self.hub.events(told.after):
                    if released.query == alert.query:
                        await self._tell(alert, released, told, pool)
                    told.after = released.id
                    if released.query == alert.query:
                        known = False
                        await self._remember(alert, told)
                        known, tries = True, 0
            except (DpstreamError, OSError) as problem:
                if alert not in self.failing:
                    _LOG.error(
                        "an alert of %s cannot go on (%s); it is tried again", alert.query, problem
                    )
                self.failing[alert] = f"it cannot go on: {type(problem).__name__}"
                await self._wait(tries)
                tries += 1

    async def _remember(self, alert: Alert, told: _Told) -> None:
        await asyncio.to_thread(told.write, self._path(alert))
        self.failing.pop(alert, None)

    async def _wait(self, tries: int) -> None:
        await asyncio.sleep(self.patience[min(tries, len(self.patience) - 1)])

    async def _tell(
        self, alert: Alert, released: Released, told: _Told, pool: ThreadPoolExecutor
    ) -> None:
        """Send what one release has for an alert, and remember the keys until the window ends."""
        known = told.windows.setdefault(released.window, [])
        found = await asyncio.to_thread(self._found, alert, released, frozenset(known))
        if found:
            await self._send(alert, self._message(alert, released, found), pool)
            known += [one["id"] for one in found]
        if released.release == released.planned:
            del told.windows[released.window]
        for window in sorted(told.windows)[:-_MOST_WINDOWS]:
            del told.windows[window]

    def _found(
        self, alert: Alert, released: Released, known: frozenset[str]
    ) -> list[dict[str, Any]]:
        """The keys of a release that are beyond the figure for certain, and were not told."""
        description = self.queries[alert.query]
        try:
            segment = self.hub.reader.segment(released)
        except KeyError:  # it is no longer served
            return []
        spread = description.spread(alert.column)
        values = column_of(description, segment, alert.column).astype(np.float64)
        deviations = column_of(description, segment, alert.column, spread).astype(np.float64)
        beyond = (
            values + MARGIN * deviations < alert.figure
            if alert.below
            else values - MARGIN * deviations > alert.figure
        )
        places = [int(place) for place in segment.fresh if beyond[place]]
        places = [place for place in places if segment.id_at(place) not in known]
        keys = key_values(segment.table.take(pa.array(places, pa.int64())), description.keys)
        return [
            shown_key(segment.id_at(place), key)
            | {"value": float(values[place]), "stddev": float(deviations[place])}
            for place, key in zip(places, keys, strict=True)
            if not alert.key or [str(part) for part in key] == list(alert.key)
        ]

    def _message(
        self, alert: Alert, released: Released, found: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """What is sent; `text` has it in words, as chat rooms take it."""
        title = self.queries[alert.query].title or alert.query
        side = "below" if alert.below else "above"
        shown = found[:_MOST_KEYS]
        words = ", ".join(
            " ".join(
                [*map(str, one["key"]), f"{one['value']:,.6g} ± {MARGIN * one['stddev']:,.3g}"]
            )
            for one in shown[:10]
        )
        rest = f" and {len(found) - 10} more" if len(found) > 10 else ""
        at = f" ({released.time})" if released.time else ""
        return {
            "text": f"{title}: {alert.column} {side} {alert.figure:,.6g}: {words}{rest}{at}",
            "column": alert.column,
            side: alert.figure,
            **released.facts,
            "keys": shown,
            "more": len(found) - len(shown),
        }

    async def _send(self, alert: Alert, message: Any, pool: ThreadPoolExecutor) -> None:
        """Send a message until it is taken."""
        body, tries = json.dumps(message).encode(), 0
        loop = asyncio.get_running_loop()
        while (problem := await loop.run_in_executor(pool, post, alert.webhook, body)) is not None:
            if alert not in self.failing:
                _LOG.error(
                    "an alert of %s cannot be told to %s (%s); it is tried again until it is taken",
                    alert.query,
                    urlsplit(alert.webhook).hostname,
                    problem,
                )
            self.failing[alert] = problem
            await self._wait(tries)
            tries += 1
        self.failing.pop(alert, None)
        self.sent[alert] += 1


def _check(alert: Alert, description: QueryDescription) -> None:
    """Refuse columns that have no margin to be certain by, and keys that cannot be."""
    known = [one for one in description.figures if description.spread(one)]
    if alert.column not in known:
        names = ", ".join(known) or "none"
        raise InvalidInput(
            f"an alert of {alert.query!r} asks for {alert.column!r}, which is no number with an "
            f"error bar; those that are: {names}"
        )
    if alert.key and len(alert.key) != len(description.keys):
        raise InvalidInput(
            f"an alert of {alert.query!r} names a key of {len(alert.key)} parts; its keys have "
            f"{len(description.keys)}: {', '.join(description.keys) or 'none'}"
        )


def _digest(alert: Alert) -> str:
    """Tells alerts apart; one that is changed begins anew."""
    said = [alert.query, alert.column, alert.key, alert.below, alert.figure, alert.webhook]
    return blake2b(json.dumps(said).encode(), digest_size=8).hexdigest()


class _NoRedirects(HTTPRedirectHandler):
    """A message goes to the address that the operator has named, and to no other."""

    def redirect_request(self, *given: Any) -> None:
        """Never."""


def post(url: str, body: bytes) -> str | None:
    """Send a message; None: it was taken. Otherwise why not, without the address."""
    headers = {"content-type": "application/json", "user-agent": "dpstream"}
    try:
        request = Request(url, body, headers, method="POST")
        with build_opener(_NoRedirects).open(request, timeout=_TIMEOUT):
            return None
    except urllib.error.HTTPError as problem:
        problem.close()
        return f"it answers {problem.code}"
    except (OSError, HTTPException, ValueError) as problem:
        reason = getattr(problem, "reason", problem)
        return f"it does not answer: {type(reason).__name__}"
