"""Predicted against measured: seconds of every call and of every iteration, and memory, under plans of all kinds.

    python tests/benchmarks/estimator.py [--json FILE] [--plans N] [--cluster FILE]

Each size gets N plans (default 5), drawn at random from all that are feasible, half of them with calls on separate
devices. A plan's calls are run with two and with four layers and compiled with all of theirs, and predicted from that;
then each call is run by itself, and the plan as a whole. Nothing of these runs enters a prediction. Calls are timed by
themselves because virtual devices share their cores: side by side, one call's seconds are no figure of its own. How
they share is for the iterations to show. Beside the bytes that the compiled calls are predicted from stand those by
which a search goes before it has a plan: from layer programs. Run it while nothing else computes.

Exits 1 where the median error of seconds passes 10 %, the worst 25 %, the rank correlation of iterations over all plans
falls below 0.9, or predicted memory is more than 10 % off or more than 3 % too low.
"""

import argparse
import dataclasses
import json
import random
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

SIZES = {
    "3 x 128": {"layers": 3},
    "6 x 192": {"layers": 6, "d_model": 192, "head_dim": 32, "d_ff": 512},
    "6 x 256": {"layers": 6, "d_model": 256, "head_dim": 32, "d_ff": 704},
}
RUNS = 7  # of a call by itself
MEDIAN, WORST, RANK, BYTES_HIGH, BYTES_LOW = 0.10, 0.25, 0.90, 0.10, 0.03


def experiment(size: str):
    """PPO on a model of the given size, with the built-in task's words."""
    from real_jax.spec.arch import ARCHS
    from real_jax.spec.experiment import ModelConfig, WarmupStage
    from real_jax.spec.files import load_experiment

    name = f"benchmark-{size.replace(' ', '')}"
    ARCHS[name] = dataclasses.replace(ARCHS["tiny"], **SIZES[size])
    none = WarmupStage(steps=0)
    return dataclasses.replace(
        load_experiment("ppo-reviews"), batch=32, actor=ModelConfig(arch=name), sft=none, preference=none
    )


def draw_plans(stage, cluster, count: int, seed: int) -> list:
    """Random plans: in every other one all calls have all devices, so that none overlap; in the rest each has a random
    mesh on a random slice."""
    from real_jax.planner.enumerate import moved, shapes
    from real_jax.spec.plan import ExecutionPlan

    rng, plans = random.Random(seed), []
    options = {c.name: shapes(c.name, stage.graph, stage.work, cluster) for c in stage.graph.calls}
    for number in range(count):
        least = cluster.devices if number % 2 == 0 else 2
        placements = {}
        for call, known in options.items():
            shape = rng.choice([p for p in known if p.count >= least and not p.offload])
            placements[call] = rng.choice(moved(shape, cluster))
        plans.append(ExecutionPlan(cluster.name, placements, f"drawn {number}"))
    return plans


def compare(size: str, count: int, cluster_file: str, listener, console) -> list[dict]:
    """One row per call and one per iteration of each plan."""
    from real_jax.planning import given_plan
    from real_jax.runtime.layers import runner
    from real_jax.runtime.prepare import load_tokenizer, make_build
    from real_jax.runtime.trial import time_plan
    from real_jax.spec.files import load_cluster
    from real_jax.spec.plan import ExecutionPlan, Placement

    e = experiment(size)
    given = load_cluster(cluster_file) if cluster_file else None
    tokenizer = load_tokenizer(e)
    calls = ("actor_generate", "reward_inference", "reference_inference", "critic_inference")
    first = ExecutionPlan("", dict.fromkeys((*calls, "actor_train", "critic_train"), Placement()))
    found = given_plan(e, first, given, listener=listener)
    stage, cluster = found.stage(), found.cluster
    build, rows = make_build(e, stage, tokenizer.eos_id, tokenizer.pad_id), []
    for number, plan in enumerate(draw_plans(stage, cluster, count, seed=len(size))):
        console.print(f"{size}: plan {number + 1} of {count}", highlight=False)
        rough = given_plan(e, plan, given, listener=listener).costs[stage.name]
        found = given_plan(e, plan, given, layered=True, listener=listener)
        trial, programs = time_plan(build, plan, iterations=9, enough_seconds=20.0)
        for call, program in programs.items():
            cost = found.costs[stage.name][call, plan[call]]
            run = runner(build, program)
            alone = [run() for _ in range(1 + RUNS)][1:]
            row = {"size": size, "plan": number, "what": call, "placement": plan[call].describe()}
            row |= {"predicted": cost.seconds, "measured": float(np.median(alone))}
            row |= {"rough_bytes": rough[call, plan[call]].work_bytes, "predicted_bytes": cost.work_bytes}
            rows.append(row | {"reported_bytes": trial.work_bytes[call]})
        row = {"size": size, "plan": number, "what": "iteration"}
        rows.append(row | {"predicted": found.iteration_seconds(), "measured": trial.seconds})
    return rows


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(x)) for x in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def figures(rows: list[dict]) -> dict[str, float]:
    """The figures that decide."""
    errors = {}
    for kind, chosen in (
        ("call", [r for r in rows if r["what"] != "iteration"]),
        ("iteration", [r for r in rows if r["what"] == "iteration"]),
    ):
        off = [abs(r["predicted"] / r["measured"] - 1) for r in chosen]
        errors |= {f"{kind}_median": float(np.median(off)), f"{kind}_worst": max(off)}
    whole = [r for r in rows if r["what"] == "iteration"]
    for size in ("", *SIZES):
        of = [r for r in whole if size in ("", r["size"])]
        rank = rank_correlation(*([r[key] for r in of] for key in ("predicted", "measured")))
        errors[f"rank of {size}" if size else "rank"] = rank
    for kind in ("rough", "predicted"):
        off = [r[f"{kind}_bytes"] / r["reported_bytes"] - 1 for r in rows if "reported_bytes" in r]
        errors |= {f"{kind}_bytes_highest": max(off), f"{kind}_bytes_lowest": min(off)}
    return errors


def show(rows: list[dict], console: Console) -> None:
    table = Table(title="Predicted and measured")
    for column in ("size", "plan", "call", "placement", "predicted ms", "measured ms", "ratio", "rough bytes", "bytes"):
        table.add_column(column, justify="left" if column in ("size", "call", "placement") else "right")
    for r in rows:
        kinds = ("rough_bytes", "predicted_bytes")
        bytes_ = [f"{r[k] / r['reported_bytes']:.2f}" if k in r else "-" for k in kinds]
        times = [f"{1e3 * r[key]:.1f}" for key in ("predicted", "measured")]
        ratio = f"{r['predicted'] / r['measured']:.2f}"
        table.add_row(r["size"], str(r["plan"]), r["what"], r.get("placement", ""), *times, ratio, *bytes_)
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    parser.add_argument("--plans", type=int, default=5, help="plans of each size")
    parser.add_argument("--cluster", default="", help="a cluster file of this machine; empty: it is measured")
    options = parser.parse_args()
    from real_jax.commandline import quiet_backends

    quiet_backends()
    from real_jax.runtime import meshes
    from real_jax.runtime.progress import PlanningProgress

    meshes.prepare_devices()
    console = Console(width=130)
    listener = PlanningProgress(console, every_seconds=30)
    rows = [row for size in SIZES for row in compare(size, options.plans, options.cluster, listener, console)]
    listener.close()
    show(rows, console)
    f = figures(rows)
    for name, value in f.items():
        console.print(f"{name}: {value:.3f}", highlight=False)
    if options.json:
        options.json.write_text(json.dumps({"figures": f, "rows": rows}, indent=1) + "\n")
        console.print(f"Files written: {options.json}")
    times = (
        max(f["call_median"], f["iteration_median"]) <= MEDIAN and max(f["call_worst"], f["iteration_worst"]) <= WORST
    )
    memory = f["predicted_bytes_highest"] <= BYTES_HIGH and f["predicted_bytes_lowest"] >= -BYTES_LOW
    return 0 if times and memory and f["rank"] >= RANK else 1


if __name__ == "__main__":
    sys.exit(main())
