"""Which compiler speaks for a cluster: its own where that can be had on this machine, else a stand-in.

the cluster is this machine   jax's default backend
NVIDIA GPUs                   the CUDA plugin of jax, compiling for a described chip; no GPU and no CUDA are needed
TPUs                          libtpu, compiling for a named topology
otherwise                     the CPU compiler over as many virtual devices: right collectives, other kernels
"""

import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
from typing import Literal

from real_jax.spec.errors import RunError, UsageError
from real_jax.spec.hardware import Chip, Cluster

Kind = Literal["here", "cuda", "tpu", "partitioner"]

GIB = 2**30
GPU_EXTRA, TPU_EXTRA = 'pip install -e ".[plan-gpu]"', 'pip install -e ".[plan-tpu]"'


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What the compiler must know of an NVIDIA chip beside its memory (CUDA device properties)."""

    major: int
    minor: int
    cores: int
    clock_ghz: float
    l2_mib: int
    shared_kib: int  # of one multiprocessor


# By a word of the chip's name. Sources: NVIDIA's architecture white papers and the CUDA programming guide's table of
# compute capabilities.
GPUS = {
    "A100": Gpu(8, 0, 108, 1.41, 40, 164),
    "H100": Gpu(9, 0, 132, 1.98, 50, 228),
    "H200": Gpu(9, 0, 132, 1.98, 50, 228),
    "B200": Gpu(10, 0, 148, 1.965, 126, 228),
}


@dataclasses.dataclass(frozen=True)
class Target:
    """What layer programs are compiled for.

    Attributes:
      kind: which compiler.
      platform: whose rules the programs follow ("gpu": fused attention).
      shape: nodes and devices per node.
      chip: the chip; topology: a TPU topology by name.
      attention: "cudnn" where the compiler can fuse attention, else "xla".
      version: of the compiler; part of every cache key.
    """

    kind: Kind
    platform: str
    shape: tuple[int, int]
    chip: Chip
    topology: str = ""
    attention: Literal["cudnn", "xla"] = "xla"
    version: str = ""

    @property
    def devices(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def key(self) -> str:
        """Equal for targets for which the same program compiles to the same code; their sizes do not matter."""
        chip = f"{self.chip.memory_gib:g}-{self.chip.name}" if self.kind != "partitioner" else ""
        return f"{self.kind}|{self.platform}|{chip}|{self.topology}|{self.attention}|{self.version}"

    def describe(self) -> str:
        """One line for people: which compiler the costs come from."""
        return {
            "here": f"this machine's own compiler ({self.version})",
            "cuda": f"the CUDA compiler for {self.chip.name} ({self.version}), {self.attention} attention",
            "tpu": f"the TPU compiler for {self.topology} ({self.version})",
            "partitioner": f"the CPU compiler over {self.devices} virtual devices, in place of the cluster's own "
            f"({self.version})",
        }[self.kind]

    def remedy(self) -> str:
        """What would give better costs; empty where nothing would."""
        if self.kind == "partitioner" and self.platform == "gpu":
            return f"With {GPU_EXTRA} the programs are compiled for the GPU itself."
        if self.kind == "partitioner" and self.platform == "tpu":
            return f"With {TPU_EXTRA} and a topology in the cluster file the programs are compiled for the TPU itself."
        if self.kind == "cuda" and self.attention == "xla":
            return f"Without cuDNN ({GPU_EXTRA}) attention is costed unfused, which overstates its memory."
        return ""


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _gpu(chip: Chip) -> Gpu | None:
    return next((gpu for word, gpu in GPUS.items() if word in chip.name.upper()), None)


def choose(cluster: Cluster, here: bool) -> Target:
    """The best compiler for `cluster` on this machine; `here` says that the cluster is this machine."""
    jax_version = f"jax {importlib.metadata.version('jax')}"
    shape = (cluster.nodes, cluster.devices_per_node)

    def target(kind: Kind, **more) -> Target:
        return Target(kind, cluster.platform, shape, cluster.chip, **{"version": jax_version} | more)

    if here:
        return target("here", attention="cudnn" if cluster.platform == "gpu" else "xla")
    if cluster.platform == "gpu" and _installed("jax_plugins.xla_cuda13") and _gpu(cluster.chip):
        attention = "cudnn" if _installed("nvidia.cudnn") else "xla"
        return target("cuda", attention=attention)
    if cluster.platform == "tpu" and _installed("libtpu") and cluster.topology:
        version = f"{jax_version}, libtpu {importlib.metadata.version('libtpu')}"
        return target("tpu", topology=cluster.topology, version=version)
    return target("partitioner")


def prepare_process(target: Target) -> None:
    """Readies a fresh process, before it imports jax, to compile for `target` and for nothing else."""
    os.environ.update(
        JAX_PLATFORMS="cpu",
        JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
        TPU_SKIP_MDS_QUERY="1",
        ALLOW_MULTIPLE_LIBTPU_LOAD="1",
        TF_CPP_MIN_LOG_LEVEL="3",
        TPU_STDERR_LOG_LEVEL="3",
        TPU_MIN_LOG_LEVEL="3",
    )
    if target.kind == "partitioner":
        import jax

        jax.config.update("jax_num_cpu_devices", target.devices)


@functools.cache
def devices(target: Target) -> tuple:
    """The devices, real or described, that programs for `target` are compiled for."""
    from jax.experimental import topologies

    from real_jax.runtime import meshes

    if target.kind in ("here", "partitioner"):
        return tuple(meshes.devices())
    nodes, per_node = target.shape
    try:
        if target.kind == "cuda":
            described = topologies.get_topology_desc(
                target.chip.name,
                platform="cuda",
                target_config=gpu_description(target.chip),
                topology=f"1x{nodes}x{per_node}",
            )
        else:
            described = topologies.get_topology_desc(target.topology, platform="tpu")
    except RuntimeError as error:  # the plugin is missing, or does not know the topology
        raise RunError(f"The compiler for {target.chip.name} could not be started: {error}") from error
    if len(described.devices) != target.devices:
        raise UsageError(
            f"Topology {target.topology!r} has {len(described.devices)} devices, but nodes x devices_per_node is "
            f"{nodes} x {per_node} = {target.devices}. Make them agree."
        )
    return tuple(described.devices)


def gpu_description(chip: Chip) -> str:
    """`chip` as XLA's GpuTargetConfigProto, in text form."""
    gpu = _gpu(chip)
    shared = gpu.shared_kib * 1024
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": shared,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": 64 if (gpu.major, gpu.minor) == (8, 0) else 128,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": int(chip.memory_gb_per_s * 1e9),
        "l2_cache_size": gpu.l2_mib * 2**20,
        "clock_rate_ghz": gpu.clock_ghz,
        "device_memory_size": int(chip.memory_gib * GIB),
        "shared_memory_per_block_optin": shared - 1024,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    info = " ".join(f"{name}: {value}" for name, value in fields.items())
    capability = f"cuda_compute_capability {{ major: {gpu.major} minor: {gpu.minor} }}"
    return (
        f"gpu_device_info {{ {info} {capability} }} "
        'platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 patch: 4 } '
        f'device_description_str: "{chip.name}"'
    )
