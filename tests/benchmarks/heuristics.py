"""The plan that `auto` keeps against every heuristic, run on this machine in turns.

    python tests/benchmarks/heuristics.py [--json FILE] [--config NAME] [--rounds N]

Each round runs a few PPO iterations under every plan; the figures are medians over the rounds of an iteration's seconds, and
of its ratio to `auto`'s in the same round. Exits 1 where `auto` is slower than a heuristic.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--config", default="ppo-reviews")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from real_jax.commandline import quiet_backends

    quiet_backends()
    from real_jax.planning import search_plan
    from real_jax.runtime import meshes
    from real_jax.runtime.prepare import load_tokenizer, make_build
    from real_jax.runtime.progress import PlanningProgress
    from real_jax.runtime.trial import time_plan
    from real_jax.spec.files import load_experiment

    meshes.prepare_devices()
    console = Console(width=110)
    experiment = load_experiment(options.config)
    found = search_plan(experiment, listener=PlanningProgress(console, every_seconds=30))
    stage, tokenizer = found.stage(), load_tokenizer(experiment)
    build = make_build(experiment, stage, tokenizer.eos_id, tokenizer.pad_id)
    plans = {"auto": found.of(stage)}
    plans |= {c.origin: c.plan for c in found.candidates if c.stage == stage.name and c.origin.startswith("heuristic:")}
    programs: dict[str, dict] = {name: {} for name in plans}
    taken: dict[str, list[float]] = {name: [] for name in plans}
    for number in range(options.rounds):
        for name, plan in plans.items():
            trial, programs[name] = time_plan(build, plan, iterations=5, known=programs[name])
            taken[name].append(trial.seconds)
        console.print(f"round {number + 1} of {options.rounds}", highlight=False)
    rows = []
    for name, seconds in taken.items():
        ratio = statistics.median(s / a for s, a in zip(seconds, taken["auto"], strict=True))
        rows.append({"plan": name, "seconds": statistics.median(seconds), "over_auto": ratio})
    table = Table(title=f"{experiment.name}: one PPO iteration, medians of {options.rounds} rounds")
    for column in ("plan", "ms", "x auto"):
        table.add_column(column, justify="left" if column == "plan" else "right")
    for r in rows:
        table.add_row(r["plan"], f"{1e3 * r['seconds']:.0f}", f"{r['over_auto']:.2f}")
    console.print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
        console.print(f"Files written: {options.json}")
    return 0 if all(r["over_auto"] >= 1 for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
