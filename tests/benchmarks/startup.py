"""Seconds from start to the first training iteration: the first start of an experiment against the second.

    python tests/benchmarks/startup.py [--json FILE]

The first start has empty caches; the second finds compiled programs and measured costs. Exits 1 where the second takes
more than half as long.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def first_iteration(folder: Path, run: str) -> tuple[float, float]:
    """Seconds until the first metrics row, and until the process ended."""
    metrics = folder / run / "metrics.jsonl"
    env = {**os.environ, "REAL_JAX_CACHE": str(folder / "cache")}
    command = [sys.executable, "-m", "real_jax.train", "--plan", "auto", "--run-dir", str(folder / run)]
    start = time.perf_counter()
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL)
    reached = None
    while process.poll() is None:
        if reached is None and metrics.exists() and metrics.stat().st_size:
            reached = time.perf_counter() - start
        time.sleep(0.02)
    if process.returncode or reached is None:
        raise SystemExit(f"the run failed with status {process.returncode}")
    return reached, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        cold = first_iteration(Path(scratch), "first")
        warm = first_iteration(Path(scratch), "second")
    print(f"{'start':<8} {'to first iteration':>20} {'whole run':>12}")
    for name, (reached, whole) in (("first", cold), ("second", warm)):
        print(f"{name:<8} {reached:>18.1f} s {whole:>10.1f} s")
    ratio = warm[0] / cold[0]
    print(f"ratio second / first: {ratio:.2f} (at most 0.50)")
    if options.json:
        figures = {"first": cold, "second": warm, "ratio": ratio}
        Path(options.json).write_text(json.dumps(figures, indent=1))
    return int(ratio > 0.5)


if __name__ == "__main__":
    sys.exit(main())
