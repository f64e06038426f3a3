"""An engine in a thread of its own, for servers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from .engine import Engine
from .sampling import SamplingParams
from .sequence import Output

_log = logging.getLogger(__name__)


class ServiceClosedError(RuntimeError):
    """The service takes no more requests."""


class Service:
    """Steps an engine whenever there is work.

    A step that raises ends what was in flight with "error", is logged, and leaves the service
    running: ``error`` holds what was raised until a later step succeeds.

    Args:
        engine: Used by nobody else from now on.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.error: Exception | None = None
        self._wake = threading.Condition()
        self._open, self._stopping = True, False
        self._thread = threading.Thread(target=self._run, name="tilewise-serving", daemon=True)
        self._thread.start()

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None,
        deliver: Callable[[Output], None],
    ) -> int:
        """``Engine.add``; ``deliver`` is called in the service's thread and must not wait.

        Raises:
            ServiceClosedError: ``close`` was called.
            ValueError, OverloadedError: as ``Engine.add``.
        """
        with self._wake:
            if not self._open:
                raise ServiceClosedError("the service is shutting down")
            request = self.engine.add(prompt, params, deliver)
            self._wake.notify()
            return request

    def cancel(self, request: int) -> bool:
        """``Engine.cancel``."""
        return self.engine.cancel(request)

    def close(self, seconds: float = 30.0) -> None:
        """Takes no more requests, lets those in flight finish, and ends the thread.

        What is left after so many seconds is cancelled.
        """
        with self._wake:
            self._open = False
            self._wake.notify()
        self._thread.join(seconds)
        self._stopping = True
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._wake:
                while self._open and not self.engine.busy:
                    self._wake.wait()
                if not self._open and not self.engine.busy:
                    return
            try:
                if self._stopping:
                    self.engine.cancel_all()
                self.engine.step()
                self.error = None
            except Exception as error:
                _log.exception("a step failed; everything in flight ends with an error")
                self.error = error
                self.engine.fail()
                time.sleep(0.1)  # a device that fails every time must not spin
