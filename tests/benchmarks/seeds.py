"""The first command over seeds: held-out reward before and after, and KL from the reference.

    python tests/benchmarks/seeds.py [--seeds 0 1 2 3 4] [--margin 1.0] [--json FILE]

Exits 1 where a seed misses the margin.
"""

import argparse
import json
import sys
import time

import jax

from real_jax.runtime.meshes import VIRTUAL_CPU_DEVICES, prepare_devices


def run(seed: int, plan_name: str) -> dict:
    import dataclasses

    import real_jax as real
    from real_jax.planning import find_plan

    experiment = dataclasses.replace(real.load_experiment("ppo-reviews"), seed=seed)
    start = time.perf_counter()
    found = find_plan(plan_name, experiment, None)
    trainer = real.Trainer(experiment, found.plan, programs=found.programs).fit()
    rows = [row["actor_train/kl"] for row in trainer.metrics.stage("ppo")]
    return {
        "seed": seed,
        "before": trainer.before.reward,
        "after": trainer.after.reward,
        "gain": trainer.after.reward - trainer.before.reward,
        "last_kl": rows[-1],
        "largest_kl": max(rows),
        "seconds": time.perf_counter() - start,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--plan", default="auto")
    parser.add_argument("--margin", type=float, default=1.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    prepare_devices(VIRTUAL_CPU_DEVICES)
    print(f"{'seed':>4} {'before':>8} {'after':>8} {'gain':>8} {'last KL':>8} {'max KL':>8} {'seconds':>8}")
    results = []
    for seed in options.seeds:
        r = run(seed, options.plan)
        results.append(r)
        print(
            f"{seed:>4} {r['before']:>8.3f} {r['after']:>8.3f} {r['gain']:>+8.3f} {r['last_kl']:>8.2f} "
            f"{r['largest_kl']:>8.2f} {r['seconds']:>8.0f}",
            flush=True,
        )
        jax.clear_caches()
    if options.json:
        with open(options.json, "w") as file:
            json.dump(results, file, indent=1)
    return int(min(r["gain"] for r in results) < options.margin)


if __name__ == "__main__":
    sys.exit(main())
