"""Small programs, run and timed on one device: matrix products, memory traffic, starts of programs and kernels.

Whatever else a machine does can only add to a time, so of several runs the lower quartile counts.
"""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from real_jax.cost import hlo
from real_jax.cost.curves import Timing
from real_jax.cost.summary import Summary
from real_jax.runtime.meshes import devices, platform
from real_jax.spec.hardware import Link

_RUNS, _LEAST_RUNS, _MOST_RUNS = 5, 3, 200
_BUDGET_SECONDS = 0.1


def seconds_of(function: Callable, *args) -> float:
    """Seconds of one run of `function` until its result is ready: the lower quartile of at least five runs, or of three
    where they take long. Several processes that run a program together all make the same number of runs."""
    jax.block_until_ready(function(*args))  # compiles, and warms up
    fixed = jax.process_count() > 1
    taken: list[float] = []

    def enough() -> bool:
        if fixed or sum(taken) < _BUDGET_SECONDS:
            return len(taken) >= (_RUNS if fixed else _MOST_RUNS)
        return len(taken) >= (_LEAST_RUNS if sum(taken) > 4 * _BUDGET_SECONDS else _RUNS)

    while not enough():
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        taken.append(time.perf_counter() - start)
    return statistics.quantiles(taken, n=4)[0]


def own_device():
    """The first device of this process."""
    return next(d for d in devices() if d.process_index == jax.process_index())


def on_device(numbers: np.ndarray, dtype=np.float32) -> jax.Array:
    return jax.device_put(numbers.astype(dtype), own_device())


def product(rows: int, inner: int, columns: int, dtype, busy_seconds: float, rate: float) -> Timing:
    """A product [rows, inner] x [inner, columns] in a chain of products, as layers of a model are.

    Random numbers: a chip needs more power for them than for equal ones, and may run slower.

    Args:
      busy_seconds: how long one run should take; rate: operations per second to expect.
    """
    random = np.random.default_rng(0)
    x = on_device(random.standard_normal((rows, inner)), dtype)
    up = on_device(random.standard_normal((inner, columns)) / np.sqrt(inner), dtype)
    down = on_device(random.standard_normal((columns, inner)) / np.sqrt(columns), dtype)
    flops = 2 * rows * inner * columns
    pairs = max(2, min(1000, int(busy_seconds * rate / (2 * flops))))

    @jax.jit
    def chain(x, up, down):
        return jax.lax.fori_loop(0, pairs, lambda _, y: (y @ up) @ down, x)

    traffic = (rows * inner + inner * columns + rows * columns) * jnp.dtype(dtype).itemsize
    taken = seconds_of(chain, x, up, down) / (2 * pairs)
    return Timing("product", f"{rows} x {inner} x {columns} {jnp.dtype(dtype).name}", flops, taken, bytes=traffic)


def traffic(volume: int, busy_seconds: float, rate: float) -> Timing:
    """A kernel that reads and writes `volume` bytes in all.

    In a loop: fresh memory for a result is slow to get on a CPU, and a program of a model hardly asks for any.
    """
    x = on_device(np.zeros((volume // 8,)))
    times = max(2, min(2000, int(busy_seconds * rate / volume)))
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, y: y + jnp.float32(1), x), donate_argnums=0)

    def run():
        nonlocal x
        x = loop(x)
        return x

    return Timing("read and write", size_text(volume), volume, seconds_of(run) / times)


def launch_time() -> float:
    """Seconds to start a program on as many arrays as a model has, on one device, and to see its end."""
    return seconds_of(jax.jit(lambda xs: [x + jnp.float32(1) for x in xs]), [on_device(np.zeros((8,)))] * 12)


def step_time(launch: float) -> float:
    """Seconds of one small kernel inside a program."""

    def loop(x, w):
        return jax.lax.fori_loop(0, 500, lambda _, y: jnp.tanh(y @ w) + jnp.max(y), x)

    x = on_device(np.zeros((8, 8)))
    compiled = jax.jit(loop).lower(x, x).compile()
    return max(seconds_of(compiled, x, x) - launch, 1e-8) / summary_of(compiled).steps


def summary_of(compiled) -> Summary:
    """What one device executes in a compiled program."""
    return hlo.summarize(compiled.as_text(), scalars=platform() != "cpu")


def host_link(volume: int) -> tuple[Link, Timing]:
    """Between host memory and one device. Fresh arrays each time, that begin at no multiple of a cache line: a copy of a
    known or an aligned one may be no copy."""

    def copy(size: int) -> float:
        taken = []
        for i in range(_RUNS):
            x = np.full((size // 4 + 1,), i, np.float32)[1:]
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(x, own_device(), may_alias=False))
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    copy(64)
    latency, seconds = copy(64), copy(volume)
    rate = volume / max(seconds - latency, seconds / 10)
    return Link(rate / 1e9, latency * 1e6), Timing("host to device", size_text(volume), volume, seconds)


def size_text(volume: float) -> str:
    """Bytes for people: "64 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if volume >= size:
            return f"{volume / size:.3g} {unit}"
    return f"{volume:.0f} B"
