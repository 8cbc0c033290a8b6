"""How good the search is: against every plan where that can be tried, against the lower bound and the heuristics elsewhere.

    python tests/benchmarks/search_quality.py [--json FILE]

Small: 20 random instances of up to a few thousand plans; a Markov chain that may look at a fifth of them, against all.
Large: four models of 7B to 70B on 8 to 1,024 devices, costs from a roofline in a few lines. Exits 1 where the chain misses
the optimum in more than one small instance or by more than 2 % in any, where a stated gap passes 5 %, or where a heuristic
is better.
"""

import argparse
import dataclasses
import json
import random
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "planner"))

from planner_instances import PPO, analytic_costs, make_cluster, make_work

from real_jax.planner.enumerate import may_offload, moved, shapes
from real_jax.planner.heuristics import HEURISTICS, heuristic
from real_jax.planner.search import search
from real_jax.planner.simulate import iteration_seconds
from real_jax.spec.arch import ARCHS
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.errors import UsageError

SMALL, MISSES, SLACK, GAP = 20, 1, 0.02, 0.05

SHORT = Graph(
    "short",
    (
        Call("generate", "generate", "actor", ("prompts",), ("tokens",)),
        Call("reward", "inference", "reward", ("tokens",), ("scores",)),
        Call("reference", "inference", "reference", ("tokens",), ("logprobs",)),
        Call("train", "train", "actor", ("tokens", "scores", "logprobs")),
    ),
    ("prompts",),
)


def small_instance(seed: int):
    """Random meshes on two or four devices for four calls, with seconds that fall by a random power of the devices."""
    rng = random.Random(seed)
    work, cluster = make_work(SHORT, batch=8), make_cluster(1, rng.choice((2, 4)))
    table = CostTable()
    for call in SHORT.calls:
        size, power = rng.uniform(1, 4), rng.uniform(0.4, 1.0)
        known = shapes(call.name, SHORT, work, cluster, max_micro_batches=1)
        for p in rng.sample(known, min(len(known), 3)):
            table.add(call.name, p, Cost(size * rng.uniform(0.8, 1.2) / p.count**power, 0, "analytic"))
    return SHORT, work, cluster, table


def count(graph, cluster, costs) -> int:
    """Number of plans."""
    total = 1
    for call in graph.calls:
        starts = [moved(p, cluster, may_offload(call.name, graph)) for p in costs.placements(call.name)]
        total *= sum(map(len, starts))
    return total


def small(seed: int) -> dict:
    graph, work, cluster, costs = small_instance(seed)
    plans = count(graph, cluster, costs)
    exact = search(graph, work, cluster, costs, evaluations=plans)
    chain = search(graph, work, cluster, costs, evaluations=max(plans // 5, 100), seed=seed)
    return {
        "instance": seed,
        "plans": plans,
        "optimum": exact.top[0][1],
        "chain": chain.top[0][1],
        "over": chain.top[0][1] / exact.top[0][1] - 1,
        "bound": chain.lower_bound / exact.top[0][1],
    }


def large_instances():
    """(name, graph, workload, cluster) of real sizes: a bfloat16 model, 128 + 384 tokens, links of an H100 cluster."""
    for model, nodes, batch in (
        ("llama-7b", 1, 64),
        ("llama-13b", 4, 256),
        ("llama-70b", 16, 256),
        ("llama-70b", 128, 512),
    ):
        cluster = make_cluster(nodes, 8)
        chip = dataclasses.replace(cluster.chip, matrix_tflops=700.0, memory_gb_per_s=3000.0)
        links = {
            "within_node": dataclasses.replace(cluster.within_node, gb_per_s=350.0),
            "between_nodes": dataclasses.replace(cluster.between_nodes, gb_per_s=45.0),
        }
        work = make_work(PPO, ARCHS[model], batch, 2, {"actor_train": 4, "critic_train": 4})
        work = dataclasses.replace(work, prompt_length=128, response_length=384)
        yield f"{model} x {cluster.devices}", PPO, work, dataclasses.replace(cluster, chip=chip, **links)


def large(name: str, graph, work, cluster) -> dict:
    costs = analytic_costs(graph, work, cluster, max_micro_batches=8)
    plans = {}
    for rule in HEURISTICS:
        try:
            plans[rule] = heuristic(rule, graph, work, cluster, costs)
        except UsageError:
            continue
    start = time.perf_counter()
    found = search(graph, work, cluster, costs, initial=list(plans.values()))
    seconds = time.perf_counter() - start
    best = {rule: iteration_seconds(p, graph, work, cluster, costs) for rule, p in plans.items()}
    rule = min(best, key=best.get, default="")
    return {
        "instance": name,
        "seconds": found.top[0][1],
        "gap": found.gap,
        "best_heuristic": rule,
        "heuristic_over": best[rule] / found.top[0][1] - 1 if rule else None,
        "search_seconds": seconds,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures there")
    options = parser.parse_args()
    console = Console(width=110)
    few = [small(seed) for seed in range(SMALL)]
    table = Table(title="Small: a chain against all plans")
    for column in ("instance", "plans", "optimum", "chain", "over", "bound / optimum"):
        table.add_column(column, justify="right")
    for r in few:
        values = [f"{r['optimum']:.4f}", f"{r['chain']:.4f}", f"{r['over']:.2%}", f"{r['bound']:.3f}"]
        table.add_row(str(r["instance"]), str(r["plans"]), *values)
    console.print(table)
    many = [large(*instance) for instance in large_instances()]
    table = Table(title="Large: against the lower bound and the best heuristic")
    for column in ("instance", "seconds", "gap", "best heuristic", "slower by", "search took"):
        table.add_column(column, justify="left" if column in ("instance", "best heuristic") else "right")
    for r in many:
        over = "-" if r["heuristic_over"] is None else f"{r['heuristic_over']:.1%}"
        row = [r["instance"], f"{r['seconds']:.2f}", f"{r['gap']:.1%}", r["best_heuristic"], over]
        table.add_row(*row, f"{r['search_seconds']:.0f} s")
    console.print(table)
    exact = sum(r["over"] < 1e-9 for r in few)
    console.print(
        f"The chain found the optimum in {exact} of {SMALL}, at worst {max(r['over'] for r in few):.2%} above it."
    )
    if options.json:
        options.json.write_text(json.dumps({"small": few, "large": many}, indent=1) + "\n")
        console.print(f"Files written: {options.json}")
    good = exact >= SMALL - MISSES and max(r["over"] for r in few) <= SLACK
    good &= all(r["gap"] <= GAP and (r["heuristic_over"] is None or r["heuristic_over"] >= -1e-9) for r in many)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
