"""Graphs, clusters and analytic costs for the planner's tests."""

from real_jax.planner import enumerate as placement_options
from real_jax.planner import memory
from real_jax.spec.arch import ARCHS, Arch, forward_flops
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import Placement, Workload

PPO = Graph(
    "ppo",
    (
        Call("actor_generate", "generate", "actor", ("prompts",), ("tokens",)),
        Call("reward_inference", "inference", "reward", ("tokens",), ("scores",)),
        Call("reference_inference", "inference", "reference", ("tokens",), ("reference_logprobs",)),
        Call("critic_inference", "inference", "critic", ("tokens",), ("values",)),
        Call("actor_train", "train", "actor", ("tokens", "scores", "reference_logprobs", "values")),
        Call("critic_train", "train", "critic", ("tokens", "scores", "reference_logprobs", "values")),
    ),
    ("prompts",),
)

# One weight of 64 numbers a layer matters here; every width divides by 4.
SMALL = Arch(layers=1, d_model=8, heads=4, kv_heads=4, head_dim=2, d_ff=8, vocab=16, context=8)


def make_cluster(nodes=1, per_node=4, shared_cores=0.0, memory_gib=80.0):
    """Round numbers: 100 GB/s within a node, 10 GB/s between nodes, no latency."""
    return Cluster(
        name="test", platform="gpu", nodes=nodes, devices_per_node=per_node,
        chip=Chip("chip", memory_gib, matrix_tflops=100.0, memory_gb_per_s=1000.0),
        within_node=Link(100.0, 0.0), between_nodes=Link(10.0, 0.0), host_link=Link(20.0, 0.0),
        shared_cores=shared_cores,
    )  # fmt: skip


def make_work(graph, arch=SMALL, batch=8, compute_bytes=4, minibatches=None):
    heads = {m: "lm" if m in ("actor", "reference") else "scalar" for m in graph.models}
    archs = arch if isinstance(arch, dict) else {m: arch for m in graph.models}
    return Workload(archs, heads, batch, 4, 4, minibatches or {}, compute_bytes=compute_bytes)


def ppo_70b(nodes=16):
    """Four models of 70B on H100-like nodes of 8, batch 512, with costs of `analytic_costs`."""
    cluster = make_cluster(nodes, 8)
    work = Workload(
        {m: ARCHS["llama-70b"] for m in PPO.models}, {m: "lm" for m in PPO.models}, 512, 128, 128,
        {"actor_train": 4, "critic_train": 4}, compute_bytes=2,
    )  # fmt: skip
    return PPO, work, cluster


def analytic_costs(graph, work, cluster, max_micro_batches=4):
    """A roofline in a few lines: matrix work over all devices, weights read once per decode step, collectives."""
    costs = CostTable()
    for call in graph.calls:
        if call.kind == "host":
            costs.add(call.name, Placement(), Cost(1e-3, 0, "analytic"))
            continue
        a = work.archs[call.model]
        shapes = placement_options.shapes(call.name, graph, work, cluster, max_micro_batches=max_micro_batches)
        for p in shapes:
            link = cluster.link(0, p.count)
            shard = memory.model_shard_bytes(call.model, work, p, work.compute_bytes)
            flops = forward_flops(a, work.batch, work.length, work.heads[call.model])
            passes = {"generate": 1, "inference": 1, "train": 4 if p.remat else 3}[call.kind]
            reads = {"generate": work.response_length, "inference": 1, "train": 3}[call.kind] * p.micro_batches
            seconds = passes * flops / p.count / (cluster.chip.matrix_tflops * 1e12)
            seconds += reads * shard / (cluster.chip.memory_gb_per_s * 1e9)
            rows = work.batch // p.batch_split
            activation = rows * work.length * a.d_model * work.compute_bytes * a.layers
            moved = reads * shard * (p.fsdp - 1) + 2 * passes * activation * (p.tensor > 1)
            moved += 2 * shard * (p.data > 1 and call.kind == "train")
            seconds += moved / (link.gb_per_s * 1e9)
            held = activation * (2 if p.remat else 8) // a.layers * (a.layers if call.kind == "train" else 1)
            work_bytes = held // p.micro_batches + (4 * shard if call.kind == "train" else 0)
            cost = Cost(seconds, int(work_bytes), "analytic")
            for moved_placement in placement_options.moved(p, cluster):
                costs.add(call.name, moved_placement, cost)
    return costs
