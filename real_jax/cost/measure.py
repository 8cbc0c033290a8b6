"""This machine as a `Cluster`: a few small programs are run and timed, in a few seconds.

First each number is measured by itself; then layer programs are run, and the rates are corrected so that the roofline
tells their times: kernels of a model reach less than a large matrix product does.
"""

import dataclasses
import os
import platform as host
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from real_jax.cost import hlo, roofline
from real_jax.cost.compile import Piece, program
from real_jax.runtime.meshes import devices, make_mesh, platform
from real_jax.spec.arch import ARCHS, Arch
from real_jax.spec.hardware import Chip, Cluster, Link, check_cluster
from real_jax.spec.plan import Placement

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what comes next

GIB = 2**30
_SECONDS_PER_TIMING = 0.2
# Of the host's free memory, what its virtual devices may fill; the process, its data and copies for checkpoints need some.
_VIRTUAL_SHARE = 0.75
_STEPS = 6
# The CPU compiler's default options take three times as long, for programs that are about as fast.
_OPTIONS = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
# By how much (natural logarithm) a rate may differ between a plain loop and a model's kernels, one standard deviation;
# and the noise of a timing.
_PRIOR_SPREAD = 1.0
_TIMING_NOISE = 0.1


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes of the probes: a CPU has small ones."""

    dtype: object
    matrix: int  # rows of the first square matrix tried
    copy_bytes: int
    reduce_bytes: int
    arch: Arch
    length: int
    rows: int


def _scale() -> Scale:
    if platform() == "cpu":
        return Scale(jnp.float32, 512, 2**25, 2**21, ARCHS["tiny"], 32, 8)
    block = Arch(layers=2, d_model=2048, heads=16, kv_heads=16, head_dim=128, d_ff=5504, vocab=32000, context=2048)
    return Scale(jnp.bfloat16, 4096, 2**30, 2**26, block, 512, 8)


def cluster_name() -> str:
    """ "cpu-8" for eight virtual CPU devices, else the kind of the devices and their number: "nvidia-h100-1x8"."""
    found = devices()
    if platform() == "cpu":
        return f"cpu-{len(found)}"
    kind = "-".join(found[0].device_kind.lower().replace("/", " ").split())
    return f"{kind}-1x{len(found)}"


def probe_key() -> str:
    """Under which a probe of this machine is stored: its name, processor and number of cores."""
    return f"{cluster_name()}-{host.node()}-{host.machine()}-{os.cpu_count()}-{jax.__version__}"


def probe_cluster(progress: Progress = lambda done, total, what: None) -> Cluster:
    """Measures this machine. Takes under ten seconds on an idle one; run it while nothing else computes."""
    scale, count = _scale(), len(devices())
    progress(0, _STEPS, "matrix products")
    matrix = matrix_rate(scale)
    progress(1, _STEPS, "memory")
    memory = memory_rate(scale)
    progress(2, _STEPS, "start of programs and kernels")
    launch = launch_time()
    step = step_time(launch)
    progress(3, _STEPS, "host link")
    link = host_link(scale)
    progress(4, _STEPS, "collectives")
    between = collectives(scale) if count > 1 else Link(memory / 1e9, step * 1e6)
    chip = Chip(
        name=devices()[0].device_kind,
        memory_gib=round(device_memory() / GIB, 3),
        matrix_tflops=matrix / 1e12,
        memory_gb_per_s=memory / 1e9,
        launch_us=launch * 1e6,
        step_us=step * 1e6,
    )
    cluster = Cluster(
        name=cluster_name(),
        platform=platform() if platform() in ("cpu", "tpu") else "gpu",
        nodes=1,
        devices_per_node=count,
        chip=chip,
        within_node=between,
        between_nodes=between,
        host_link=link,
        source=f"measured on {time.strftime('%Y-%m-%d')} on {host.node() or 'this machine'}, jax {jax.__version__}",
    )
    progress(5, _STEPS, "layer programs")
    cluster = calibrate(cluster, scale)
    progress(_STEPS, _STEPS, "done")
    return check_cluster(cluster)


def seconds_of(function: Callable, *args) -> float:
    """Seconds of one run of `function` until its result is ready: the lower quartile of some runs, as whatever else the
    machine does can only add to them."""
    jax.block_until_ready(function(*args))  # compiles, and warms up
    taken: list[float] = []
    while len(taken) < 5 or (sum(taken) < _SECONDS_PER_TIMING and len(taken) < 200):
        start = time.perf_counter()
        jax.block_until_ready(function(*args))
        taken.append(time.perf_counter() - start)
    return statistics.quantiles(taken, n=4)[0]


def matrix_rate(scale: Scale) -> float:
    """Operations per second of large square matrix products on one device."""
    size, products = scale.matrix, 4

    @jax.jit
    def chain(x):
        return jax.lax.fori_loop(0, products, lambda _, y: (y @ x) * jnp.asarray(1 / size, x.dtype), x)

    best = 0.0
    for _ in range(3):
        taken = seconds_of(chain, jnp.ones((size, size), scale.dtype))
        best = max(best, products * 2 * size**3 / taken)
        if taken > 0.02:
            break
        size *= 2
    return best


def memory_rate(scale: Scale) -> float:
    """Bytes per second that one device reads and writes."""
    times, x = 8, jnp.zeros((scale.copy_bytes // 4,), jnp.float32)
    # In a loop: fresh memory for a result is slow to get on a CPU, and a program of a model hardly asks for any.
    loop = jax.jit(lambda x: jax.lax.fori_loop(0, times, lambda _, y: y + jnp.float32(1), x), donate_argnums=0)

    def run():
        nonlocal x
        x = loop(x)
        return x

    return times * 2 * x.nbytes / seconds_of(run)


def launch_time() -> float:
    """Seconds to start a program on as many arrays as a model has, on one device, and to see its end."""
    return seconds_of(jax.jit(lambda xs: [x + jnp.float32(1) for x in xs]), [jnp.zeros((8,), jnp.float32)] * 12)


def step_time(launch: float) -> float:
    """Seconds of one small kernel inside a program."""

    def loop(x, w):
        return jax.lax.fori_loop(0, 500, lambda _, y: jnp.tanh(y @ w) + jnp.max(y), x)

    x = jnp.zeros((8, 8), jnp.float32)
    compiled = jax.jit(loop).lower(x, x).compile()
    kernels = summary_of(compiled).kernels
    return max(seconds_of(compiled, x, x) - launch, 1e-8) / kernels


def summary_of(compiled) -> hlo.Summary:
    return hlo.summarize(compiled.as_text(), scalars=platform() != "cpu")


def host_link(scale: Scale) -> Link:
    """Between host memory and one device. Fresh arrays each time: a copy of a known one may be no copy."""
    device = devices()[0]

    def rate(numbers: int) -> float:
        taken = []
        for i in range(5):
            x = np.full((numbers,), i, np.float32)
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(x, device, may_alias=False))
            taken.append(time.perf_counter() - start)
        return statistics.median(taken)

    latency, numbers = rate(8), scale.copy_bytes // 16
    return Link(4 * numbers / max(rate(numbers) - latency, 1e-6) / 1e9, latency * 1e6)


def collectives(scale: Scale) -> Link:
    """Latency and bandwidth of an all-reduce over all devices, as `roofline.seconds` counts them."""
    count, times = len(devices()), 20
    mesh = make_mesh(Placement(data=count))
    spec = PartitionSpec("data")

    def reduce(x):
        return jax.lax.fori_loop(0, times, lambda _, y: jax.lax.psum(y, "data") * jnp.float32(1 / count), x)

    function = jax.jit(jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))

    def taken(numbers: int) -> float:
        x = jax.device_put(np.zeros((count * numbers,), np.float32), NamedSharding(mesh, spec))
        return seconds_of(function, x) / times

    latency, numbers = taken(8), scale.reduce_bytes // 4
    sent = scale.reduce_bytes * roofline.volume_factor("all-reduce", count)
    return Link(sent / max(taken(numbers) - latency, 1e-6) / 1e9, latency * 1e6)


def device_memory() -> int:
    """Bytes that one device may use."""
    device = devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return int(available_host_memory() * _VIRTUAL_SHARE) // len(devices())


def available_host_memory(path: str = "/proc/meminfo") -> int:
    """Bytes of host memory that programs can still have."""
    try:
        with open(path, encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclasses.dataclass(frozen=True)
class Sample:
    """A layer program that was run: what it executes, on how many devices, and how long it took."""

    summary: hlo.Summary
    devices: int
    seconds: float


def calibrate(cluster: Cluster, scale: Scale | None = None) -> Cluster:
    """`cluster` with rates at which layer programs run in the time that they take here."""
    scale = scale or _scale()
    samples = run_samples(scale)
    alone, together = samples[0], samples[1]
    if cluster.devices > 1 and cluster.platform == "cpu":
        # The same work on every device at once takes longer where they share cores.
        slower = max(1.0, together.seconds / alone.seconds)
        cores = min(max(cluster.devices / slower, 1.0), os.cpu_count() or 1)
        cluster = dataclasses.replace(cluster, shared_cores=round(cores, 2) if cores < 0.9 * cluster.devices else 0.0)
    return fit(cluster, samples)


def run_samples(scale: Scale) -> list[Sample]:
    """Compiles and runs the layer programs. The first two do the same work on one device and on each device at once."""
    count = len(devices())

    itemsize = jnp.dtype(scale.dtype).itemsize
    forward = Piece("forward", scale.arch, "scalar", 1, 1, scale.length, compute_bytes=itemsize)
    generate = Piece("generate", scale.arch, "lm", 1, 1, scale.length // 2, 8, compute_bytes=itemsize)
    wanted = [
        (forward, Placement(), scale.rows),
        (forward, Placement(data=count), scale.rows),
        (generate, Placement(), scale.rows),
        (forward, Placement(fsdp=count), 1),
    ]
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(_compile_sample, wanted))
    return [
        Sample(summary_of(run), placement.count, seconds_of(run, *_zeros(inputs)))
        for (_, placement, _), (run, inputs) in zip(wanted, compiled, strict=True)
    ]


def _compile_sample(wanted: tuple[Piece, Placement, int]):
    function, inputs = program(*wanted)
    return function.lower(*inputs).compile(compiler_options=_OPTIONS if platform() == "cpu" else {}), inputs


def _zeros(tree):
    return jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), tree)


def fit(cluster: Cluster, samples: Sequence[Sample]) -> Cluster:
    """Scales the rates of `cluster` so that `roofline` tells the seconds of `samples`.

    Looks for four factors, one per resource, with a prior at 1: a resource that no sample uses stays as it is.
    """
    parts = []
    for s in samples:
        spent = roofline.seconds(s.summary, 0, s.devices, cluster)
        spent += roofline.Seconds(overhead=roofline.launch_seconds(s.devices, cluster))
        parts.append([getattr(spent, resource) for resource in roofline.RESOURCES])
    parts, target = np.asarray(parts), np.log([s.seconds for s in samples])

    def misfit(logs: np.ndarray) -> float:
        off = np.log((parts * np.exp(logs)).sum(axis=1)) - target
        # Absolute values, not squares: one sample that was disturbed must not pull the others along.
        return float(np.abs(off).sum() / _TIMING_NOISE + ((logs / _PRIOR_SPREAD) ** 2).sum() / 2)

    logs = _minimize(misfit, parts.shape[1])
    matrix, memory, collective, overhead = np.exp(logs).tolist()
    chip, link = cluster.chip, cluster.within_node
    link = Link(link.gb_per_s / collective, link.latency_us * collective)
    chip = dataclasses.replace(
        chip,
        matrix_tflops=chip.matrix_tflops / matrix,
        memory_gb_per_s=chip.memory_gb_per_s / memory,
        launch_us=chip.launch_us * overhead,
        step_us=chip.step_us * overhead,
    )
    return dataclasses.replace(
        cluster, chip=chip, within_node=link, between_nodes=link, source=f"{cluster.source}; fitted to layer programs"
    )


def _minimize(function: Callable[[np.ndarray], float], count: int) -> np.ndarray:
    """A minimum of `function` of `count` numbers near zero, by steps along each axis and along all of them at once."""
    best, step = np.zeros(count), 1.0
    low = function(best)
    directions = [*np.eye(count), np.ones(count)]
    while step > 0.01:
        moves = [best + sign * step * d for d in directions for sign in (1, -1)]
        values = [function(m) for m in moves]
        least = min(range(len(moves)), key=values.__getitem__)
        if values[least] < low:
            best, low = moves[least], values[least]
        else:
            step /= 2
    return best
