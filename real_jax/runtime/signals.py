"""Being asked to stop: SIGTERM (a scheduler takes the machine away) and SIGUSR1 (its time limit is near)."""

import contextlib
import signal
from collections.abc import Iterator

from real_jax.runtime import distributed

ASKING = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """Remembers the signals that this process was sent; all processes of a job agree on what follows."""

    def __init__(self):
        self._heard: str | None = None
        self._agreed: str | None = None

    def hear(self, number: int, frame=None) -> None:
        del frame
        self._heard = signal.Signals(number).name

    def agreed(self) -> bool:
        """Whether any process has been asked to stop. All processes ask this together, and get the same answer."""
        heard = distributed.gather(self._heard)
        self._agreed = distributed.broadcast(next((h for h in heard if h), None) if heard else None)
        return self._agreed is not None

    def why(self) -> str:
        """A sentence for the user."""
        return f"The signal was {self._agreed}."


@contextlib.contextmanager
def listening() -> Iterator[StopRequest]:
    """Within it the signals are requests; afterwards they do again what they did before."""
    request = StopRequest()
    before = {number: signal.signal(number, request.hear) for number in ASKING}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
