"""Plain values shared between the processes of a job, over jax's coordination service.

Small things only (a plan, metrics, a batch of prompts, scores): arrays of devices travel by `reallocation.move`. Every
process makes the same calls in the same order; the number of the call is the key under which its value stands.
"""

import itertools
import pickle
import time
from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed as _jax

from real_jax.spec.errors import RunError, UsageError

PATIENCE_SECONDS = 3600.0  # a wait may hold another process's search or compiles
_SLICE_SECONDS = 5.0

_count = itertools.count()
_told: list[str] = []  # keys of broadcasts that some process may not have read yet


def processes() -> int:
    """Number of processes of the job; 1 where this one stands alone."""
    return jax.process_count()


def process_index() -> int:
    return jax.process_index()


def is_main() -> bool:
    """Whether this is the process that reads data, prints and writes files."""
    return jax.process_index() == 0


def broadcast(value: Any) -> Any:
    """The first process's `value`, in every process. Raises RunError where it does not come."""
    if processes() == 1:
        return value
    key = f"real_jax/told/{next(_count)}"
    if is_main():
        _client().key_value_set_bytes(key, pickle.dumps(value))
        _told.append(key)
        return value
    return pickle.loads(_wait(key, "process 0"))


def once(function: Callable[[], Any]) -> Any:
    """What `function` returns in the first process, which alone runs it. Where it fails there, the others end quietly
    with the status that the command will have: the first tells why."""
    if processes() == 1:
        return function()
    if not is_main():
        value, status = broadcast(None)
        if status:
            raise SystemExit(status)
        return value
    try:
        value = function()
    except BaseException as error:
        broadcast((None, 2 if isinstance(error, UsageError) else 1))
        raise
    return broadcast((value, 0))[0]


def gather(value: Any) -> list[Any] | None:
    """Every process's `value`, by process, in the first one; None in the others."""
    if processes() == 1:
        return [value]
    key = f"real_jax/seen/{next(_count)}"
    if not is_main():
        _client().key_value_set_bytes(f"{key}/{process_index()}", pickle.dumps(value))
        return None
    others = [pickle.loads(_wait(f"{key}/{i}", f"process {i}")) for i in range(1, processes())]
    # All have come this far, so all have read what they were told before.
    _client().key_value_delete(key)
    while _told:
        _client().key_value_delete(_told.pop())
    return [value, *others]


def barrier() -> None:
    """Waits until every process is here."""
    broadcast(gather(None) is not None)


def _client():
    return _jax.global_state.client


def _wait(key: str, whose: str) -> bytes:
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until:
        try:
            return _client().blocking_key_value_get_bytes(key, int(1e3 * _SLICE_SECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise RunError(f"Process {process_index()} lost {whose}: {str(error).splitlines()[0]}") from error
    raise RunError(f"Process {process_index()} waited {PATIENCE_SECONDS:.0f} s for {whose}, which did not answer.")
