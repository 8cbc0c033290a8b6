"""This machine as a `Cluster`: small programs are run and timed.

First each number is measured by itself, then layer programs are run and the numbers are corrected so that the roofline
tells their times (`cost.fit`). The quick form tries few sizes, for a search at hand; the full one fills curves.
"""

import dataclasses
import os
import platform as host
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from real_jax.cost import curves, exchange, fit, timing
from real_jax.cost.curves import Timing
from real_jax.cost.fit import Sample
from real_jax.runtime.meshes import devices, platform
from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Chip, Cluster, Link, check_cluster

Progress = Callable[[int, int, str], None]  # steps done, steps in all, what comes next

GIB = 2**30
_FORMAT = 2  # of stored probes; raise it where a probe measures differently
# Of the host's free memory, what its virtual devices may fill; the process, its data and copies for checkpoints need some.
_VIRTUAL_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes that are tried.

    Attributes:
      dtype: the compute type; other: a type that is only shown.
      products: rows, inner and columns of matrix products.
      copies: bytes that one kernel reads and writes.
      arrays: bytes of the full array of a collective.
      moved: bytes that are moved to the device, or laid out anew.
      busy_seconds: how long one run of a loop should take.
      flops_per_second, bytes_per_second: rates to expect, roughly; they decide how often a loop runs.
    """

    dtype: object
    other: object
    products: tuple[tuple[int, int, int], ...]
    copies: tuple[int, ...]
    arrays: tuple[int, ...]
    moved: int
    busy_seconds: float
    flops_per_second: float
    bytes_per_second: float


def _scale(full: bool) -> Scale:
    if platform() == "cpu":
        products = ((8, 128, 128), (256, 128, 256), (256, 256, 704), (512, 512, 512))
        more = ((1, 256, 256), (32, 128, 256), (32, 256, 1024), (1024, 256, 1024), (768, 768, 768), (1024, 1024, 1024))
        copies, arrays = (2**14, 2**18, 2**21, 2**26), (2**6, 2**18)
        more_copies, more_arrays = (2**12, 2**16, 2**20, 2**24), (2**12, 2**14, 2**16, 2**20, 2**22)
        other, moved, busy, rates = jnp.bfloat16, 2**23, 0.01, (5e10, 1e10)
        dtype = jnp.float32
    else:
        products = ((512, 512, 512), (2048, 2048, 2048), (4096, 4096, 11008), (8192, 8192, 8192))
        more = ((16, 4096, 4096), (128, 4096, 4096), (256, 256, 256), (1024, 1024, 1024), (1024, 4096, 11008),
                (4096, 4096, 4096), (16384, 8192, 8192))  # fmt: skip
        copies, arrays = (2**20, 2**24, 2**30), (2**8, 2**20, 2**27)
        more_copies, more_arrays = (2**16, 2**22, 2**26, 2**32), (2**14, 2**17, 2**23, 2**25, 2**29, 2**31)
        dtype, other, moved, busy, rates = jnp.bfloat16, jnp.float32, 2**28, 0.02, (3e14, 1e12)
    if full:
        products, copies, arrays = (*products, *more), (*copies, *more_copies), (*arrays, *more_arrays)
    return Scale(dtype, other, products, tuple(sorted(copies)), tuple(sorted(arrays)), moved, busy, *rates)


@dataclasses.dataclass(frozen=True)
class Profile:
    """What was measured.

    Attributes:
      cluster: the machine, its numbers fitted to layer programs.
      timings: of single operations.
      samples: layer programs.
      notes: field of the cluster -> how it was measured.
    """

    cluster: Cluster
    timings: tuple[Timing, ...]
    samples: tuple[Sample, ...]
    notes: dict[str, str]


def cluster_name(nodes: int = 0) -> str:
    """ "cpu-8" for eight virtual CPU devices, else the kind of the devices and their number: "nvidia-h100-1x8".

    Args:
      nodes: machines that the devices are on; 0: `node_count()`.
    """
    found = devices()
    if platform() == "cpu":
        return f"cpu-{len(found)}"
    kind = "-".join(found[0].device_kind.lower().replace("/", " ").split())
    nodes = nodes or node_count()
    return f"{kind}-{nodes}x{len(found) // nodes}"


def node_count() -> int:
    """Processes that hold devices: each is taken for a machine of its own."""
    return len({d.process_index for d in devices()})


def probe_key() -> str:
    """Under which a probe of this machine is stored: its name, processor, number of cores, and how it is probed."""
    return f"{cluster_name()}-{host.node()}-{host.machine()}-{os.cpu_count()}-{jax.__version__}-{_FORMAT}"


def probe_cluster(progress: Progress = lambda done, total, what: None) -> Cluster:
    """Measures this machine in the quick form, in about fifteen seconds; run it while nothing else computes."""
    return measure(progress, full=False).cluster


def measure(
    progress: Progress = lambda done, total, what: None, *, full: bool, name: str = "", nodes: int = 0
) -> Profile:
    """Measures this machine; run it while nothing else computes.

    Args:
      full: many sizes and groups, for a file, instead of a few.
      name: of the cluster; empty: `cluster_name()`.
      nodes: machines that the devices are on, the same number of them on each; 0: `node_count()`.

    Raises UsageError where the devices do not divide among `nodes`.
    """
    nodes, count = nodes or node_count(), len(devices())
    if nodes < 1 or count % nodes:
        raise UsageError(f"nodes is {nodes}, but there are {count} devices. Give a number that divides them.")
    found, jobs = _Found(), list(_jobs(_scale(full), nodes, full))
    for done, (what, job) in enumerate(jobs):
        progress(done, len(jobs), what)
        job(found)
    cluster = _assemble(found, nodes, name or cluster_name(nodes))
    progress(len(jobs), len(jobs), "done")
    return Profile(check_cluster(_rounded(cluster)), found.timings(), tuple(found.samples), notes_of(cluster))


@dataclasses.dataclass
class _Found:
    """What has been measured so far; seconds."""

    products: list[Timing] = dataclasses.field(default_factory=list)
    shown: list[Timing] = dataclasses.field(default_factory=list)
    moves: list[Timing] = dataclasses.field(default_factory=list)
    copies: list[Timing] = dataclasses.field(default_factory=list)
    near: list[Timing] = dataclasses.field(default_factory=list)
    far: list[Timing] = dataclasses.field(default_factory=list)
    samples: list[Sample] = dataclasses.field(default_factory=list)
    launch: float = 0.0
    step: float = 0.0
    host_link: Link | None = None
    overlap: float = 0.0

    def timings(self) -> tuple[Timing, ...]:
        return (*self.products, *self.shown, *self.copies, *self.moves, *self.near, *self.far)


Job = Callable[[_Found], None]


def _jobs(scale: Scale, nodes: int, full: bool) -> Iterator[tuple[str, Job]]:
    """All measurements, in their order, each with its name."""

    def product(into: str, shape, dtype) -> Job:
        return lambda f: getattr(f, into).append(
            timing.product(*shape, dtype, scale.busy_seconds, scale.flops_per_second)
        )

    def copy(volume: int) -> Job:
        return lambda f: f.copies.append(timing.traffic(volume, scale.busy_seconds, scale.bytes_per_second))

    for shape in scale.products:
        yield "matrix products", product("products", shape, scale.dtype)
    for shape in scale.products[:3] if full else ():
        yield "matrix products", product("shown", shape, scale.other)
    for volume in scale.copies:
        yield "memory", copy(volume)
    yield "starts of programs and kernels", _starts
    yield "host link", lambda f: _host(f, scale)
    yield from _collectives(scale, nodes, full)
    yield "reallocation", lambda f: f.moves.extend(exchange.reallocations(scale.moved))
    yield "overlap", lambda f: _overlap(f, scale)
    if jax.process_count() == 1:
        wanted = fit.wanted_samples(len(devices()), full)
        yield "layer programs", lambda f: f.samples.extend(fit.run_samples(wanted))


def _starts(found: _Found) -> None:
    found.launch = timing.launch_time()
    found.step = timing.step_time(found.launch)


def _host(found: _Found, scale: Scale) -> None:
    found.host_link, copied = timing.host_link(scale.moved)
    found.shown.append(copied)


def _overlap(found: _Found, scale: Scale) -> None:
    rate = max(t.rate for t in found.products)
    found.overlap = exchange.overlap(scale.arrays[-1], 4096, rate, scale.dtype)


def _collectives(scale: Scale, nodes: int, full: bool) -> Iterator[tuple[str, Job]]:
    per_node = len(devices()) // nodes
    near = [exchange.mesh_within(g) for g in _some(exchange.groups_within(per_node), full)]
    far = [exchange.mesh_between(nodes, g) for g in _some(exchange.groups_within(nodes), full)]

    def job(into: str, kind: str, mesh, volume: int) -> Job:
        times = max(1, min(20, int(scale.busy_seconds * scale.bytes_per_second / (8 * volume))))
        return lambda f: getattr(f, into).append(exchange.collective(kind, mesh, volume, times))

    for into, what, meshes in (("near", "within a node", near), ("far", "between nodes", far)):
        for mesh in meshes:
            for kind in exchange.KINDS if full else exchange.KINDS[:2]:
                for volume in scale.arrays:
                    yield f"{kind} {what}", job(into, kind, mesh, volume)


def _some(groups: list[int], full: bool) -> list[int]:
    return groups if full else sorted({*groups[:1], *groups[-1:]})


def _assemble(found: _Found, nodes: int, name: str) -> Cluster:
    count = len(devices())
    memory = max(found.copies, key=lambda t: t.size).rate
    memory_reach = curves.curve(found.copies, memory, found.step)
    products = curves.bound_by_arithmetic(found.products, memory_reach, memory)
    best = max(products, key=lambda t: t.rate).rate
    cores = fit.shared_cores(found.samples) if found.samples else 0.0
    slow = max(1.0, count / cores) if cores else 1.0
    # Virtual devices have no links: what they move goes through one memory, at the rate of moving whole arrays.
    moving = min((t.rate for t in found.moves), default=0.0) if cores else 0.0
    near = curves.link(found.near, slow, moving) if found.near else Link(memory / 1e9, found.step * 1e6)
    chip = Chip(
        name=devices()[0].device_kind,
        memory_gib=device_memory() / GIB,
        matrix_tflops=best / 1e12,
        memory_gb_per_s=memory / 1e9,
        launch_us=found.launch * 1e6,
        step_us=found.step * 1e6,
        matrix_reach=curves.curve(products, best, found.step),
        memory_reach=memory_reach,
        overlap=found.overlap,
    )
    cluster = Cluster(
        name=name,
        platform=platform() if platform() in ("cpu", "tpu") else "gpu",
        nodes=nodes,
        devices_per_node=count // nodes,
        chip=chip,
        within_node=near,
        between_nodes=curves.link(found.far, slow, moving) if found.far else near,
        host_link=found.host_link,
        shared_cores=cores,
        source=f"measured on {time.strftime('%Y-%m-%d')} on {host.node() or 'this machine'}, jax {jax.__version__}",
    )
    return fit.fit(cluster, found.samples) if found.samples else cluster


def notes_of(cluster: Cluster) -> dict[str, str]:
    """Field -> how it was measured, for a cluster that was."""
    fitted = ", fitted to layer programs" if "fitted" in cluster.source else ""
    cpu, moved = cluster.platform == "cpu", "measured: moving arrays between devices"
    return {
        "nodes": "counted",
        "devices_per_node": "counted",
        "chip": "measured" + fitted,
        "chip.memory_gib": f"measured: {'its share of the free memory of the host' if cpu else 'what jax may use'}",
        "chip.matrix_tflops": "measured: the fastest product of matrices",
        "chip.memory_gb_per_s": "measured: reading and writing the largest array",
        "chip.launch_us": f"measured: starting a program of a few kernels{fitted}",
        "chip.step_us": f"measured: a small kernel inside a program{fitted}",
        "chip.matrix_reach": f"measured: products of about so many operations{fitted}",
        "chip.memory_reach": f"measured: kernels over about so many bytes{fitted}",
        "chip.overlap": "measured only on accelerators: a CPU hides nothing"
        if cpu
        else "measured: a gather beside products",
        "within_node": f"measured: collectives within a node{fitted}",
        **({"within_node.gb_per_s": moved, "between_nodes.gb_per_s": moved} if cluster.shared_cores else {}),
        "between_nodes": f"measured: collectives {'between' if cluster.nodes > 1 else 'within the only one of the'} nodes{fitted}",
        "host_link": "measured: copies of fresh arrays to a device",
        "shared_cores": f"measured: a layer program on one device and on all at once{fitted}",
    }


def _rounded(value):
    """`value` with every number at four significant digits."""
    if dataclasses.is_dataclass(value):
        return type(value)(*(_rounded(getattr(value, f.name)) for f in dataclasses.fields(value)))
    if isinstance(value, tuple):
        return tuple(_rounded(v) for v in value)
    return float(f"{value:.4g}") if isinstance(value, float) else value


def device_memory() -> int:
    """Bytes that one device may use."""
    device = timing.own_device()
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
