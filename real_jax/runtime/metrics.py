"""Metrics of a run: one JSON line an iteration, the same in TensorBoard, and all rows in memory for notebooks."""

import errno
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from real_jax.runtime.engine import Result
from real_jax.spec.errors import RunError

Row = dict[str, Any]


def flatten(stage: str, step: int, result: Result, tokens: int, moves: Mapping[str, Any]) -> Row:
    """One row: each call's metrics as "call/metric" (minibatches averaged; of the importance ratio also the first),
    seconds of each call and reallocation under "seconds", what the reallocations moved (`moves.planned_moves`), and tokens
    per second."""
    row: Row = {"stage": stage, "step": step}
    for call, metrics in sorted(result.metrics.items()):
        for name, value in sorted(metrics.items()):
            row[f"{call}/{name}"] = float(np.mean(value, dtype=np.float64))
            if name == "importance_ratio":
                row[f"{call}/first_importance_ratio"] = float(np.ravel(value)[0])
    row["seconds"] = {event.name: round(event.end - event.start, 6) for event in result.events}
    row["reallocations"] = {name: about for name, about in moves.items() if name in row["seconds"]}
    row["iteration_seconds"] = round(result.seconds, 6)
    row["tokens_per_second"] = round(tokens / result.seconds, 1)
    return row


TIMINGS = (
    "seconds",
    "iteration_seconds",
    "tokens_per_second",
    "compiles",
    "reallocations",
)  # what may differ between two equal runs


class CompileCounter:
    """Counts the programs that jax compiles or loads from its cache, so that no recompilation goes unseen."""

    def __init__(self):
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, name: str, seconds: float, **_) -> None:
        del seconds
        self.count += name.endswith("backend_compile_duration")

    def since(self) -> int:
        """Programs compiled since the last time this was asked."""
        count, self.count = self.count, 0
        return count


class MetricsLog:
    """Appends rows to `metrics.jsonl` and to TensorBoard events under `folder`; without a folder it only remembers."""

    def __init__(self, folder: Path | None):
        self.rows: list[Row] = []
        self._path = folder / "metrics.jsonl" if folder else None
        self._folder, self._board = folder, None

    def keep_until(self, done: Mapping[str, int], order: tuple[str, ...]) -> None:
        """On resume: reads the rows of iterations that the checkpoints hold (stage -> iterations) and drops later ones,
        which will run again."""
        if not self._path or not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue  # the last line of a killed run may be cut short
            if row["stage"] in done and row["step"] < done[row["stage"]]:
                kept.append(row)
        self.rows = sorted(kept, key=lambda r: order.index(r["stage"]))
        scratch = self._path.with_suffix(".tmp")
        scratch.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        scratch.replace(self._path)

    def add(self, row: Row) -> None:
        """Raises RunError where the disk is full."""
        self.rows.append(row)
        if not self._path:
            return
        try:
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            self._add_to_board(row)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise RunError(f"No space left to write {self._path}. Free some, and go on with --resume.") from error
            raise

    def _add_to_board(self, row: Row) -> None:
        if self._board is None:
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(self._folder / "tensorboard"), flush_secs=30)
        numbers = {k: v for k, v in row.items() if isinstance(v, float)}
        for name, value in {**numbers, **{f"seconds/{k}": v for k, v in row["seconds"].items()}}.items():
            self._board.add_scalar(f"{row['stage']}/{name}", value, row["step"])

    def close(self) -> None:
        if self._board is not None:
            self._board.close()


def median_seconds(rows: list[Row], stage: str) -> dict[str, float]:
    """Median seconds of each call and reallocation over the iterations of a stage, its first one left out where there
    are more: it also pays for first uses."""
    rows = [r for r in rows if r["stage"] == stage]
    rows = rows[1:] if len(rows) > 1 else rows
    names = dict.fromkeys(name for row in rows for name in row["seconds"])
    return {n: float(np.median([r["seconds"][n] for r in rows if n in r["seconds"]])) for n in names}
