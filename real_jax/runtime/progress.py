"""What a run says while it runs: a live line in a terminal, plain lines elsewhere."""

import time

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from real_jax.runtime.calls import Program
from real_jax.runtime.metrics import Row

TITLES = {"sft": "fine-tuning", "preference": "reward model", "ppo": "PPO"}


def describe(row: Row) -> str:
    """The few numbers of a row that one looks at while waiting."""
    if row["stage"] == "ppo":
        text = f"reward {row['actor_train/reward']:+.2f}  KL {row['actor_train/kl']:.2f}"
    elif row["stage"] == "preference":
        text = f"loss {row['reward_train/loss']:.3f}  accuracy {row['reward_train/accuracy']:.0%}"
    else:
        text = f"loss {row['sft_train/loss']:.3f}"
    if "held_out_reward" in row:
        text += f"  held-out {row['held_out_reward']:+.2f}"
    return f"{text}  {row['tokens_per_second']:,.0f} tokens/s"


class PlanningProgress:
    """Shows how planning goes on: a bar for each part in a terminal, elsewhere a line every few seconds."""

    def __init__(self, console: Console, every_seconds: float = 10.0):
        self._console, self._every = console, every_seconds
        self._bars: Progress | None = None
        self._tasks: dict = {}
        self._last = time.perf_counter()

    def note(self, text: str) -> None:
        self._console.print(text, highlight=False)

    def progress(self, what: str, done: int, total: int, item: str) -> None:
        if self._console.is_terminal:
            if not self._bars:
                columns = (TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(), TimeRemainingColumn())
                self._bars = Progress(*columns, TextColumn("{task.fields[item]}"), console=self._console)
                self._bars.start()
            if what not in self._tasks:
                self._tasks[what] = self._bars.add_task(what, total=total, item="")
            self._bars.update(self._tasks[what], completed=done, total=total, item=item if done < total else "")
        elif done == total or time.perf_counter() - self._last > self._every:
            self._console.print(f"{what}: {done} of {total} ({item})", highlight=False)
            self._last = time.perf_counter()

    def close(self) -> None:
        if self._bars:
            self._bars.stop()
            self._bars = None


class ConsoleListener:
    """Shows each stage's progress on a console. Where that is no terminal, a line every few seconds stands in."""

    def __init__(self, console: Console, every_seconds: float = 5.0):
        self._console, self._every, self._last = console, every_seconds, 0.0
        self._progress: Progress | None = None
        self._task = None
        self._stage, self._started, self._first = "", 0.0, 0

    def stage(self, name: str, steps: int, done: int) -> None:
        self.close()
        self._stage, self._started, self._first, self._last = TITLES[name], 0.0, done, 0.0
        if self._console.is_terminal:
            columns = (
                TextColumn("{task.description}"), BarColumn(24), MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"), TimeRemainingColumn(),
            )  # fmt: skip
            self._progress = Progress(*columns, console=self._console)
            self._progress.start()
            self._task = self._progress.add_task(self._stage, total=steps, completed=done, text="compiling")
        elif done < steps:
            self._console.print(f"{self._stage}: compiling")

    def compiled(self, program: Program) -> None:
        if self._progress:
            self._progress.update(self._task, text=f"compiled {program.call.name}")

    def row(self, row: Row, total: int) -> None:
        now = time.perf_counter()
        done = row["step"] + 1
        if self._progress:
            self._progress.update(self._task, completed=done, total=total, text=describe(row))
        elif now - self._last >= self._every or done == total:
            left = ""
            if done > self._first and self._started and done < total:
                seconds = (now - self._started) / (done - self._first) * (total - done)
                left = f"  {seconds:.0f} s left"
            self._console.print(f"{self._stage} {done}/{total}  {describe(row)}{left}")
            self._last = now
        if not self._started:
            self._started, self._first = now, done

    def note(self, text: str) -> None:
        self._console.print(text)

    def close(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None
