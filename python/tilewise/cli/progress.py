"""A progress bar by tqdm if it is installed, or else a simple one."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any


class Progress:
    """Shows a bar that fills up to `total` on stderr, followed by a few facts.

    On a terminal the line is redrawn; in a log file a line is written every ten seconds.

    Args:
        total: Number of updates.
        description: Text before the bar.
        done: Number of updates that an earlier run made.
    """

    def __init__(self, total: int, description: str, done: int = 0) -> None:
        self.total, self.description, self.done = total, description, done
        self._started, self._initial, self._drawn = time.monotonic(), done, 0.0
        self._terminal = sys.stderr.isatty()
        self._interval = 0.1 if self._terminal else 10.0
        self._bar: Any = None
        try:
            from tqdm import tqdm
        except ImportError:
            return
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=description,
            mininterval=self._interval,
            dynamic_ncols=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._drawn:
            self._draw({})
            print(file=sys.stderr)

    def update(self, **facts: object) -> None:
        """Counts one step as done, and shows the facts as key=value."""
        self.done += 1
        if self._bar is not None:
            self._bar.set_postfix({k: str(v) for k, v in facts.items()}, refresh=False)
            self._bar.update()
        elif time.monotonic() - self._drawn > self._interval:
            self._draw(facts)

    def pause(self) -> None:
        """Ends the line of the bar, so that other text can be printed below it."""
        if self._bar is not None:
            self._bar.refresh()
        print(file=sys.stderr, flush=True)

    def _draw(self, facts: dict[str, object]) -> None:
        self._drawn = time.monotonic()
        width = 30
        filled = width * self.done // max(1, self.total)
        rate = (self.done - self._initial) / max(1e-9, self._drawn - self._started)
        tail = "".join(f", {k}={v}" for k, v in facts.items())
        line = (
            f"{self.description}: {'#' * filled}{'.' * (width - filled)} "
            f"{self.done}/{self.total} [{rate:.2f}/s{tail}]"
        )
        end = "" if self._terminal else "\n"
        print(("\r\033[K" if self._terminal else "") + line, end=end, file=sys.stderr, flush=True)
