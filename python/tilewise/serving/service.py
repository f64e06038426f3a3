"""``Service``: an engine in a thread of its own, for servers."""

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
_PROBE_SECONDS = 1.0  # interval of probes after a failure


class ServiceClosedError(RuntimeError):
    """The service accepts no more requests."""


class Service:
    """Runs the steps of an engine while there are requests.

    No failure of a step leaves a request waiting forever. If a step raises, the exception is
    logged, all requests in flight end with "error" and a sentence, and the service continues;
    ``error`` holds the exception until a step, or one of the probes that follow, succeeds. If the
    thread itself ends, for example by SystemExit in the model, all requests in flight end as well,
    and the service accepts no further ones.

    Args:
        engine: The engine, which only the service may use from now on.
        stall_seconds: Time without a successful step, while there are requests, after which
            ``alive`` becomes false.

    Attributes:
        error: The exception of the last step or probe; None if it succeeded.
    """

    def __init__(self, engine: Engine, stall_seconds: float = 300.0) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self._stall_seconds = stall_seconds
        # Time of the last successful step, or of the first work after idling; inf while idle.
        self._last_progress = math.inf
        self._ended = ""  # a sentence once the thread has ended or accepts no more requests
        self._wake = threading.Condition()
        self._open, self._stopping = True, False
        self._thread = threading.Thread(target=self._run, name="tilewise-serving", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the service works, or may recover by itself.

        It is False once the thread has ended, and after steps or probes have failed or hung for
        ``stall_seconds``, because only a new process recovers a lost GPU.
        """
        return (
            self._thread.is_alive() and time.monotonic() - self._last_progress < self._stall_seconds
        )

    @property
    def ready(self) -> bool:
        """Whether a request that is submitted now will probably be answered."""
        return self._open and self.alive and self.error is None

    def submit(
        self,
        prompt: Sequence[int],
        params: SamplingParams | None,
        deliver: Callable[[Output], None],
        timeout: float | None = None,
    ) -> int:
        """Calls ``Engine.add``. ``deliver`` runs in the thread of the service and must not block.

        Raises:
            ServiceClosedError: ``close`` was called, or the thread has ended.
            TypeError, ValueError, OverloadedError: ``Engine.add`` refuses the request.
        """
        with self._wake:
            if not self._open:
                raise ServiceClosedError(self._ended)
            request = self.engine.add(prompt, params, _contained(deliver), timeout)
            self._wake.notify()
            return request

    def cancel(self, request: int) -> bool:
        """Calls ``Engine.cancel``."""
        return self.engine.cancel(request)

    def close(self, seconds: float = 30.0) -> None:
        """Accepts no more requests, lets those in flight finish, and ends the thread.

        Requests that are still in flight after `seconds` are cancelled. If the current step has
        still not returned after as many seconds more (at least one), the thread is left running
        and an error is logged.
        """
        with self._wake:
            self._open, self._ended = False, self._ended or "the service is shutting down"
            self._wake.notify()
        self._thread.join(seconds)
        self._stopping = True
        self._thread.join(max(seconds, 1.0))
        if self._thread.is_alive():
            _log.error("a step has not returned since the service was closed: it is abandoned")

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
        """Waits for a request, or for the time of a probe. False if the service is closed."""
        with self._wake:
            if self.error is None and not self.engine.busy:
                self._last_progress = math.inf
            patience = None if self.error is None else _PROBE_SECONDS
            self._wake.wait_for(lambda: self.engine.busy or not self._open, patience)
            self._last_progress = min(self._last_progress, time.monotonic())
            return self._open or self.engine.busy

    def _work(self) -> None:
        """Runs one step, or a probe if there are no requests after a failure."""
        try:
            if self._stopping:
                self.engine.cancel_all()
            if self.engine.busy:
                self.engine.step()
            else:
                self.engine.probe()
        except Exception as error:
            if self.error is None:
                _log.exception("a step failed; all requests in flight end with an error")
            else:
                _log.warning("steps still fail: %r", error)
            self.error = error
            self.engine.fail(f"a step failed: {error!r}")
            time.sleep(0.1)  # do not spin on a device that fails every time
        else:
            self.error, self._last_progress = None, time.monotonic()


def _contained(deliver: Callable[[Output], None]) -> Callable[[Output], None]:
    """Wraps ``deliver`` so that its SystemExit ends one request, not the service's thread."""

    def tell(output: Output) -> None:
        try:
            deliver(output)
        except SystemExit as error:
            raise RuntimeError(f"deliver has called sys.exit({error.code!r})") from error

    return tell
