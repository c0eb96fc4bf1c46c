"""Stopping in order: the first signal asks, the second one insists."""

import os
import signal
import threading
from types import FrameType, TracebackType


class Stopped(KeyboardInterrupt):
    """A run that ended early because it was asked to. Not an Exception: it ends a sweep as well."""

    def __init__(self, signum: int, message: str) -> None:
        super().__init__(message)
        self.exit_code = 128 + signum


class StopSignals:
    """While active, Ctrl-C and SIGTERM only set `received`; a second one exits at once."""

    def __init__(self) -> None:
        self.received: int | None = None

    def __enter__(self) -> "StopSignals":
        self._previous = {}
        if threading.current_thread() is threading.main_thread():
            for signum in (signal.SIGINT, signal.SIGTERM):
                self._previous[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        if self.received is not None:
            os._exit(128 + signum)
        self.received = signum
