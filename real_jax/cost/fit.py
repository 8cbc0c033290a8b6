"""Layer programs are run, and a measured cluster is corrected so that the roofline tells their times.

Rates alone are not those of a model: its products have other shapes than the ones that were timed, its small arrays stay
in caches, and devices that meet in a collective wait for each other.
"""

import dataclasses
import itertools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np

from real_jax.cost import roofline
from real_jax.cost.compile import Piece, program
from real_jax.cost.summary import Summary
from real_jax.cost.timing import seconds_of, summary_of
from real_jax.runtime.meshes import devices, platform
from real_jax.spec.arch import ARCHS, Arch
from real_jax.spec.hardware import Cluster, Curve, Link, Reach
from real_jax.spec.plan import Placement

# The CPU compiler's default options take three times as long, for programs that are about as fast.
_OPTIONS = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
# By how much (natural logarithm) a number may differ between a plain loop and a model, one standard deviation; and the
# noise of a timing.
_PRIOR_SPREAD = 0.7
_TIMING_NOISE = 0.15
_SMALL = Arch(layers=2, d_model=256, heads=8, kv_heads=4, head_dim=32, d_ff=704, vocab=512, context=512)
_BLOCK = Arch(layers=2, d_model=2048, heads=16, kv_heads=16, head_dim=128, d_ff=5504, vocab=32000, context=2048)


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A layer program to run: a piece under a placement, with `rows` rows on each device."""

    piece: Piece
    placement: Placement
    rows: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """A layer program that was run: what it executes, on how many devices, and how long it took."""

    summary: Summary
    devices: int
    seconds: float
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Factors:
    """What measured numbers are multiplied by: times of the four kinds, and the cores that virtual devices share."""

    matrix: float = 1.0
    memory: float = 1.0
    volume: float = 1.0
    latency: float = 1.0
    overhead: float = 1.0
    cores: float = 1.0


def wanted_samples(count: int, full: bool) -> list[Wanted]:
    """Programs that use all of the resources of `count` devices; `full`: in more layouts. The first two do the same work
    on one device and on each device at once."""
    cpu = platform() == "cpu"
    arch, larger, length, rows = (ARCHS["tiny"], _SMALL, 48, 8) if cpu else (_BLOCK, _BLOCK, 512, 8)

    def piece(kind, arch, head="lm", length=length, response=0) -> Piece:
        return Piece(kind, arch, head, 1, 1, length, response, compute_bytes=4 if cpu else 2)

    forward, wider = piece("forward", arch, "scalar"), piece("forward", larger, length=2 * length)
    gradient = piece("gradient", larger, length=2 * length)
    generate = piece("generate", arch, length=length // 2, response=8)
    decode = piece("generate", larger, length=length, response=4)
    if count == 1:
        return [Wanted(p, Placement(), rows) for p in (forward, forward, wider, generate, gradient)]
    tensor = 2 if count % 2 == 0 and count > 2 else 1
    data = 2 if count % 4 == 0 else 1
    split = Placement(fsdp=count // tensor, tensor=tensor)
    wanted = [
        Wanted(forward, Placement(), rows),
        Wanted(forward, Placement(data=count), rows),
        Wanted(wider, Placement(), rows // 2),
        Wanted(wider, Placement(data=data, fsdp=count // tensor // data, tensor=tensor), rows // 2),
        Wanted(generate, Placement(), rows),
        Wanted(gradient, Placement(fsdp=count), rows // 4),
        Wanted(decode, split, rows // 2),
    ]
    more = [
        Wanted(gradient, Placement(), rows // 4),
        Wanted(generate, Placement(fsdp=count // tensor), rows),
        Wanted(piece("gradient", arch), Placement(data=count // tensor, tensor=tensor), rows),
        Wanted(piece("gradient", arch), split, rows // 2),
    ]
    return wanted + more if full else wanted


def run_samples(wanted: Sequence[Wanted]) -> list[Sample]:
    """Compiles and runs layer programs."""
    with ThreadPoolExecutor(2) as pool:
        compiled = list(pool.map(_compile, wanted))
    return [
        Sample(
            summary_of(run),
            w.placement.count,
            seconds_of(run, *_zeros(inputs)),
            f"{w.piece.kind}, {w.piece.arch.d_model} wide, {w.placement.describe()}",
        )
        for w, (run, inputs) in zip(wanted, compiled, strict=True)
    ]


def _compile(wanted: Wanted):
    attention = "cudnn" if platform() == "gpu" else "xla"
    function, inputs = program(wanted.piece, wanted.placement, wanted.rows, devices(), attention)
    return function.lower(*inputs).compile(compiler_options=_OPTIONS if platform() == "cpu" else {}), inputs


def _zeros(tree):
    return jax.tree.map(lambda s: jax.device_put(np.zeros(s.shape, s.dtype), s.sharding), tree)


def predict(sample: Sample, cluster: Cluster) -> float:
    """What the roofline says of a sample, in seconds."""
    spent = roofline.seconds(sample.summary, 0, sample.devices, cluster).total
    return spent + roofline.launch_seconds(sample.devices, cluster)


def shared_cores(samples: Sequence[Sample]) -> float:
    """How many virtual devices can compute at full speed at a time, 0 where all can; from the first two of `samples`,
    which do the same work on one device and on each device at once."""
    alone, together = samples[0], samples[1]
    if platform() != "cpu" or together.devices == 1:
        return 0.0
    slower = max(1.0, together.seconds / alone.seconds)
    cores = min(max(together.devices / slower, 1.0), os.cpu_count() or 1)
    return cores if cores < 0.9 * together.devices else 0.0


def fit(cluster: Cluster, samples: Sequence[Sample]) -> Cluster:
    """Corrects `cluster` so that `roofline` tells the seconds of `samples`.

    Looks for `Factors`, with a prior at 1: what no sample uses stays as it is. Nominal rates stay; what is reached of
    them changes.
    """
    names = [f.name for f in dataclasses.fields(Factors) if f.name != "cores" or cluster.shared_cores]

    def factors(logs: np.ndarray) -> Factors:
        return Factors(**dict(zip(names, np.exp(logs).tolist(), strict=True)))

    def misfit(logs: np.ndarray) -> float:
        changed = scaled(cluster, factors(logs))
        off = np.abs([np.log(predict(s, changed) / s.seconds) for s in samples]) / _TIMING_NOISE
        # Squares up to the noise, then linear (Huber): one sample that was disturbed must not pull the others along.
        losses = np.where(off < 1, off**2 / 2, off - 0.5)
        return float(losses.sum() + ((logs / _PRIOR_SPREAD) ** 2).sum() / 2)

    changed = scaled(cluster, factors(_minimize(misfit, len(names))))
    return dataclasses.replace(changed, source=f"{cluster.source}; fitted to layer programs")


def scaled(cluster: Cluster, by: Factors) -> Cluster:
    """`cluster` with times multiplied by `by`."""

    def link(old: Link) -> Link:
        return Link(
            old.gb_per_s, old.latency_us * by.latency, old.hop_us * by.latency, _reaches(old.reach, 1 / by.volume)
        )

    chip = dataclasses.replace(
        cluster.chip,
        matrix_reach=_reaches(cluster.chip.matrix_reach, 1 / by.matrix),
        memory_reach=_reaches(cluster.chip.memory_reach, 1 / by.memory),
        launch_us=cluster.chip.launch_us * by.overhead,
        step_us=cluster.chip.step_us * by.overhead,
    )
    return dataclasses.replace(
        cluster,
        chip=chip,
        within_node=link(cluster.within_node),
        between_nodes=link(cluster.between_nodes),
        shared_cores=max(1.0, cluster.shared_cores * by.cores) if cluster.shared_cores else 0.0,
    )


def _reaches(curve: Curve, factor: float) -> Curve:
    return tuple(Reach(p.size, p.share * factor) for p in curve or (Reach(1.0, 1.0),))


def _minimize(function: Callable[[np.ndarray], float], count: int) -> np.ndarray:
    """A minimum of `function` of `count` numbers near zero, by steps along each axis, along two of them against each
    other, and along all at once."""
    axes = np.eye(count)
    directions = [*axes, *(a - b for a, b in itertools.combinations(axes, 2)), np.ones(count)]
    best, step = np.zeros(count), 0.5
    low = function(best)
    while step > 0.02:
        before = low
        for direction in directions:
            for sign in (1, -1):
                move = best + sign * step * direction
                if (value := function(move)) < low:
                    best, low = move, value
        if low >= before:
            step /= 2
    return best
