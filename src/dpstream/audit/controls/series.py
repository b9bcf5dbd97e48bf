"""SQL through a mechanism with one line changed: a unit that enters a window again."""

from __future__ import annotations

from collections.abc import Iterable

from dpstream.engines.series import SeriesRun
from dpstream.engines.series_state import SeriesState
from dpstream.stages.pieces import Piece
from dpstream.stages.step_counts import StepCounts


class _Forgetting(StepCounts):
    def take(self, pieces: Iterable[Piece]) -> None:
        """Who was there is forgotten with the step."""
        super().take(pieces)
        self._seen.clear()


class EntersAgain(SeriesRun):
    """Lets a unit into a window once per step in which rows of the window arrive.

    True: with rows on time and late ones a unit moves a count by 2, which is charged as 1.
    """

    def _counts(self, state: SeriesState) -> StepCounts:
        return _Forgetting(self.query, state.secret, state.runner.run_id)
