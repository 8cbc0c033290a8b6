"""The metrics of a run as notebooks want them: a table and plots."""

import html
from collections.abc import Sequence

from real_jax.runtime.metrics import Row

# What is looked at first, by stage: column of the row -> short name.
COLUMNS = {
    "sft": {"sft_train/loss": "loss"},
    "preference": {"reward_train/loss": "loss", "reward_train/accuracy": "accuracy"},
    "ppo": {
        "actor_train/reward": "reward",
        "actor_train/kl": "KL",
        "actor_train/response_length": "response length",
        "actor_train/entropy": "entropy",
        "actor_train/importance_ratio": "importance ratio",
        "actor_train/loss": "actor loss",
        "critic_train/loss": "critic loss",
        "tokens_per_second": "tokens/s",
    },
}


class History(Sequence):
    """Rows of metrics, one per iteration. Shows itself as a table in a notebook; `plot` draws curves."""

    def __init__(self, rows: list[Row]):
        self._rows = rows

    def __getitem__(self, index):
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def stage(self, name: str) -> "History":
        """The rows of one stage: "sft", "preference" or "ppo"."""
        return History([row for row in self._rows if row["stage"] == name])

    def column(self, name: str) -> list[float]:
        """One metric over the iterations that have it."""
        return [row[name] for row in self._rows if name in row]

    def _repr_html_(self) -> str:
        parts = []
        for stage, columns in COLUMNS.items():
            rows = [r for r in self._rows if r["stage"] == stage]
            if not rows:
                continue
            head = "".join(f"<th>{html.escape(c)}</th>" for c in ("iteration", *columns.values()))
            step = max(1, len(rows) // 12)
            shown = [r for r in rows if r["step"] % step == 0 or r is rows[-1]]
            body = "".join(
                "<tr><td>{}</td>{}</tr>".format(
                    r["step"], "".join(f"<td>{r.get(k, float('nan')):.4g}</td>" for k in columns)
                )
                for r in shown
            )
            parts.append(f"<h4>{stage}</h4><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>")
        return "".join(parts) or "<p>no iterations yet</p>"

    def plot(self, stage: str = "ppo", columns: Sequence[str] = ()):
        """Curves of a stage's metrics over its iterations, as a matplotlib figure."""
        from matplotlib.figure import Figure

        rows = self.stage(stage)
        names = {c: COLUMNS[stage].get(c, c) for c in columns} or COLUMNS[stage]
        across = min(4, len(names))
        down = -(-len(names) // across)
        figure = Figure(figsize=(3.4 * across, 2.6 * down), layout="constrained")
        axes = figure.subplots(down, across, squeeze=False).ravel()
        for place, (column, title) in zip(axes, names.items(), strict=False):
            place.plot([r["step"] for r in rows if column in r], rows.column(column), color="#2F6DB5")
            place.set_title(title, fontsize=10)
            place.grid(alpha=0.3)
        for place in axes[len(names) :]:
            place.set_visible(False)
        figure.supxlabel("iteration", fontsize=9)
        return figure
