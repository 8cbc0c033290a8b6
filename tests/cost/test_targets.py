"""Which compiler speaks for which cluster, and what it is told of a chip."""

import dataclasses
import importlib.util

import pytest

from real_jax.cost import targets
from real_jax.cost.compile import Piece
from real_jax.cost.parallel import compile_all
from real_jax.cost.store import Store
from real_jax.spec.arch import Arch, forward_flops
from real_jax.spec.errors import RunError
from real_jax.spec.hardware import Chip, Cluster, Link

H100 = Chip("NVIDIA H100 80GB HBM3", 74.5, 989.0, 3350.0)
LINK = Link(50.0, 10.0)
GPUS = Cluster("h100-2x8", "gpu", 2, 8, H100, LINK, LINK, LINK)
TPUS = dataclasses.replace(GPUS, platform="tpu", chip=dataclasses.replace(H100, name="TPU v5p"), topology="v5p:2x2x4")
ARCH = Arch(layers=2, d_model=128, heads=4, kv_heads=4, head_dim=32, d_ff=256, vocab=256, context=256)


@pytest.fixture
def installed(monkeypatch):
    """Pretends that exactly the modules in the set it returns are installed."""
    names: set[str] = set()
    monkeypatch.setattr(targets, "_installed", names.__contains__)
    monkeypatch.setattr(targets.importlib.metadata, "version", lambda name: "1.2.3")
    return names


def test_the_machine_at_hand_compiles_for_itself(installed):
    target = targets.choose(GPUS, here=True)
    assert (target.kind, target.attention, target.remedy()) == ("here", "cudnn", "")


def test_gpus_by_the_cuda_plugin_where_it_is_installed(installed):
    assert targets.choose(GPUS, here=False).kind == "partitioner"
    assert "plan-gpu" in targets.choose(GPUS, here=False).remedy()
    installed.add("jax_plugins.xla_cuda13")
    target = targets.choose(GPUS, here=False)
    assert (target.kind, target.attention, target.devices) == ("cuda", "xla", 16)
    assert "cuDNN" in target.remedy()
    installed.add("nvidia.cudnn")
    target = targets.choose(GPUS, here=False)
    assert (target.attention, target.remedy()) == ("cudnn", "")
    other = dataclasses.replace(GPUS, chip=dataclasses.replace(H100, name="some other chip"))
    assert targets.choose(other, here=False).kind == "partitioner"


def test_tpus_by_libtpu_where_the_topology_is_known(installed):
    installed.add("libtpu")
    assert targets.choose(TPUS, here=False).kind == "tpu"
    unnamed = targets.choose(dataclasses.replace(TPUS, topology=""), here=False)
    assert unnamed.kind == "partitioner" and "topology" in unnamed.remedy()


def test_keys_differ_where_programs_would(installed):
    installed |= {"jax_plugins.xla_cuda13", "nvidia.cudnn"}
    target = targets.choose(GPUS, here=False)
    more = targets.choose(dataclasses.replace(GPUS, nodes=16), here=False)
    smaller = dataclasses.replace(GPUS, chip=dataclasses.replace(H100, memory_gib=40.0))
    assert target.key == more.key != targets.choose(smaller, here=False).key
    assert target.key != targets.choose(GPUS, here=True).key
    assert target.key != dataclasses.replace(target, version="jax 9").key


def test_a_chip_as_the_compiler_is_told_of_it():
    text = targets.gpu_description(H100)
    assert text.count("{") == text.count("}") == 3
    for field in (
        "core_count: 132", "memory_bandwidth: 3350000000000", f"device_memory_size: {int(74.5 * 2**30)}",
        "shared_memory_per_core: 233472", "cuda_compute_capability { major: 9 minor: 0 }",
        'device_description_str: "NVIDIA H100 80GB HBM3"',
    ):  # fmt: skip
        assert field in text
    assert "major: 10" in targets.gpu_description(dataclasses.replace(H100, name="NVIDIA B200"))


CUDA = importlib.util.find_spec("jax_plugins") and importlib.util.find_spec("jax_plugins.xla_cuda13")


@pytest.mark.skipif(not CUDA, reason='needs the CUDA compiler: pip install -e ".[plan-gpu]"')
def test_a_layer_program_compiled_for_gpus_that_are_not_there(tmp_path):
    """Float32, so that no cuDNN is needed: the matrix operations are those counted by hand, over two nodes."""
    target = dataclasses.replace(targets.choose(GPUS, here=False), attention="xla")
    assert target.kind == "cuda"
    piece = Piece("forward", ARCH, "scalar", 4, 4, 64)
    store = Store(tmp_path)
    compiled = compile_all([piece], target, store)[piece]
    whole = forward_flops(ARCH, 1, 64, "scalar") - 2 * 64 * ARCH.d_model  # the head's sum is no matrix product
    assert compiled.summary.flops.per_row == pytest.approx(whole / 4, rel=0.01)
    strides = {(c.kind, c.group, c.stride) for c in compiled.summary.collectives}
    assert ("all-gather", 4, 4) in strides and ("all-reduce", 4, 1) in strides
    assert compile_all([piece], target, store)[piece] == compiled


def test_a_compiler_that_refuses_everything_is_told(tmp_path):
    broken = dataclasses.replace(targets.choose(TPUS, here=False), kind="tpu", topology="v0:1x1", version="test")
    with pytest.raises(RunError, match="TPU v5p could not be started|refused all 1"):
        compile_all([Piece("forward", ARCH, "lm", 1, 1, 64)], broken, Store(tmp_path))
