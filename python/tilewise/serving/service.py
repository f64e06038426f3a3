"""An engine in a thread of its own, for servers."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence

from .engine import Engine
from .sampling import SamplingParams
from .sequence import Output

_log = logging.getLogger(__name__)
_PROBE_SECONDS = 1.0  # between probes after a failure


class ServiceClosedError(RuntimeError):
    """The service takes no more requests."""


class Service:
    """Steps an engine whenever there is work.

    Nothing that happens in a step leaves a request waiting for ever. A step that raises ends what
    is in flight with "error" and a sentence, is logged, and leaves the service running: ``error``
    holds what was raised until a step, or the probe that is run in the meantime, succeeds. What
    ends the thread itself (SystemExit out of the model, say) ends what is in flight as well, and
    the service takes no more.

    Args:
        engine: Used by nobody else from now on.
        stall_seconds: How long there may be work and no step that succeeds, before ``alive`` is
            false.

    Attributes:
        error: Why the last step or probe failed; None: it succeeded.
    """

    def __init__(self, engine: Engine, stall_seconds: float = 300.0) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._stall_seconds = stall_seconds
        self._good = math.inf  # when a step last succeeded; inf: there has been nothing to do since
        self._ended = ""  # a sentence once the thread has ended, or will not take more requests
        self._wake = threading.Condition()
        self._open, self._stopping = True, False
        self._thread = threading.Thread(target=self._run, name="tilewise-serving", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the service works, or can be expected to recover by itself.

        False once its thread has ended, and when steps or probes have failed, or one of them has
        hung, for ``stall_seconds``: a lost GPU comes back with a new process only.
        """
        return self._thread.is_alive() and time.monotonic() - self._good < self._stall_seconds

    @property
    def ready(self) -> bool:
        """Whether a request that is submitted now can be expected to be answered."""
        return self._open and self.alive and self.error is None

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None,
        deliver: Callable[[Output], None],
        timeout: float | None = None,
    ) -> int:
        """``Engine.add``; ``deliver`` is called in the service's thread and must not wait.

        Raises:
            ServiceClosedError: ``close`` was called, or the thread has ended.
            ValueError, OverloadedError: as ``Engine.add``.
        """
        with self._wake:
            if not self._open:
                raise ServiceClosedError(self._ended)
            request = self.engine.add(prompt, params, _contained(deliver), timeout)
            self._wake.notify()
            return request

    def cancel(self, request: int) -> bool:
        """``Engine.cancel``."""
        return self.engine.cancel(request)

    def close(self, seconds: float = 30.0) -> None:
        """Takes no more requests, lets those in flight finish, and ends the thread.

        What is left after so many seconds is cancelled. A step that does not return within as many
        again is left to itself, which is logged.
        """
        with self._wake:
            self._open, self._ended = False, self._ended or "the service is shutting down"
            self._wake.notify()
        self._thread.join(seconds)
        self._stopping = True
        self._thread.join(max(seconds, 1.0))
        if self._thread.is_alive():
            _log.error("a step has not returned since the service was closed: it is left alone")

    def _run(self) -> None:
        try:
            while self._await_work():
                self._work()
        except BaseException as error:
            _log.critical("the engine's thread ends", exc_info=True)
            self.error = error
            with self._wake:
                self._open, self._ended = False, f"the engine's thread has ended: {error!r}"
            self.engine.fail(self._ended)

    def _await_work(self) -> bool:
        """Waits for a request, or until it is time to probe. False: the service is closed."""
        with self._wake:
            if self.error is None and not self.engine.busy:
                self._good = math.inf
            patience = None if self.error is None else _PROBE_SECONDS
            self._wake.wait_for(lambda: self.engine.busy or not self._open, patience)
            self._good = min(self._good, time.monotonic())
            return self._open or self.engine.busy

    def _work(self) -> None:
        """One step; where there is nothing to do after a failure, a probe."""
        try:
            if self._stopping:
                self.engine.cancel_all()
            if self.engine.busy:
                self.engine.step()
            else:
                self.engine.probe()
        except Exception as error:
            if self.error is None:
                _log.exception("a step failed; everything in flight ends with an error")
            else:
                _log.warning("steps still fail: %r", error)
            self.error = error
            self.engine.fail(f"a step failed: {error!r}")
            time.sleep(0.1)  # a device that fails every time must not spin
        else:
            self.error, self._good = None, time.monotonic()


def _contained(deliver: Callable[[Output], None]) -> Callable[[Output], None]:
    """``deliver``, whose SystemExit is no more than a failure to deliver to one request."""

    def tell(output: Output) -> None:
        try:
            deliver(output)
        except SystemExit as error:
            raise RuntimeError(f"deliver has called sys.exit({error.code!r})") from error

    return tell
