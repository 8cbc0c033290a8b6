"""Many layer programs compiled at the same time, and kept on disk."""

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed

from real_jax.cost import targets
from real_jax.cost.compile import Compiled, Piece, compile_piece
from real_jax.cost.store import Store
from real_jax.cost.targets import Target
from real_jax.spec.errors import RunError

Progress = Callable[[int, int, str], None]  # pieces done, pieces in all, what was done last


def compile_all(
    needed: Sequence[Piece],
    target: Target,
    store: Store,
    progress: Progress = lambda done, total, what: None,
    workers: int = 2,
) -> dict[Piece, Compiled]:
    """Every piece's analysis, from the store or compiled now, `workers` at a time.

    A piece that the compiler refuses is left out; RunError where it refuses all that were missing.
    """
    found = {piece: known for piece in needed if (known := store.compiled(piece.key(target))) is not None}
    missing = [piece for piece in needed if piece not in found]
    if not missing:
        return found
    refused = None
    with executor(target, min(workers, len(missing))) as pool:
        running = {pool.submit(compile_piece, piece, target): piece for piece in missing}
        try:
            for done, future in enumerate(as_completed(running), 1):
                piece = running[future]
                what = f"{piece.kind} over {piece.placement.describe()}"
                if is_refusal(error := future.exception()):
                    refused = refused or error
                    what += ", refused by the compiler"
                else:
                    found[piece] = future.result()
                    store.record_compiled(piece.key(target), found[piece])
                progress(done, len(missing), what)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    if refused and not any(piece in found for piece in missing):
        raise RunError(f"The compiler refused all {len(missing)} layer programs; the first time with: {refused}")
    return found


def executor(target: Target, workers: int) -> Executor:
    """Threads where the programs are for this process's own devices; otherwise processes, as one process's jax knows
    one set of devices, and tracing keeps a core busy."""
    if target.kind == "here":
        return ThreadPoolExecutor(workers)
    return ProcessPoolExecutor(
        workers, multiprocessing.get_context("spawn"), initializer=targets.prepare_process, initargs=(target,)
    )


def is_refusal(error: BaseException | None) -> bool:
    """Whether the compiler, rather than a fault of ours, ended a compile."""
    return error is not None and type(error).__name__ in ("JaxRuntimeError", "XlaRuntimeError")
