"""Placements, partitions and every reason for which a plan is refused."""

import dataclasses

import pytest

from real_jax.algorithms import ppo
from real_jax.spec.arch import ARCHS, BATCH, EMBED, HEADS, KV_HEADS, LENGTH, MLP, VOCAB, Arch, weights
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.errors import UsageError
from real_jax.spec.hardware import Chip, Cluster, Link
from real_jax.spec.plan import ExecutionPlan, Placement, Workload, partition, placement_error, shard_bytes, validate

LINK = Link(100.0, 1.0)
CLUSTER = Cluster("two-nodes", "gpu", 2, 8, Chip("chip", 80.0, 100.0, 1000.0), LINK, LINK, LINK)
ARCH = Arch(layers=2, d_model=32, heads=8, kv_heads=2, head_dim=4, d_ff=64, vocab=40, context=64)
GRAPH = ppo.graph()
HEADS_OF = {"actor": "lm", "reference": "lm", "critic": "scalar", "reward": "scalar"}
WORK = Workload({m: ARCH for m in HEADS_OF}, HEADS_OF, 64, 4, 4, {"actor_train": 4, "critic_train": 4})
CALLS = [c.name for c in GRAPH.calls]


def test_placement_numbers():
    p = Placement(4, data=2, fsdp=2, tensor=1, micro_batches=3, remat=True)
    assert (p.count, list(p.devices), p.batch_split) == (4, [4, 5, 6, 7], 4)
    assert p.mesh_shape == {"data": 2, "fsdp": 2, "tensor": 1}
    assert p.layout == Placement(4, 2, 2, 1)
    assert p.layout == dataclasses.replace(p, micro_batches=1, remat=False, offload=True).layout
    assert p.describe() == "data 2 x fsdp 2"
    assert Placement().describe() == "one device"


def test_overlaps():
    left, right = Placement(0, data=4), Placement(4, data=4)
    assert not left.overlaps(right) and not right.overlaps(left)
    for other in (left, Placement(0, data=8), Placement(3), Placement(2, tensor=2)):
        assert left.overlaps(other) and other.overlaps(left)


def test_partition():
    p = Placement(data=2, fsdp=2, tensor=4)
    assert partition((BATCH, LENGTH), (8, 5), p) == (("data", "fsdp"), ())
    assert partition((EMBED, MLP), (8, 8), p) == (("fsdp",), ("tensor",))
    assert partition((EMBED, MLP), (7, 7), Placement()) == ((), ())  # axes of size one divide anything
    assert partition((EMBED, HEADS), (8, 8), Placement(data=8)) == ((), ())
    assert partition((KV_HEADS,), (8,), p) == (("tensor",),)
    assert partition((KV_HEADS,), (2,), p) == ((),)  # replicated


def test_partition_refuses():
    p = Placement(data=2, fsdp=2, tensor=4)
    with pytest.raises(UsageError, match=r"mlp of size 6 cannot be split into 4 equal parts \(tensor\)"):
        partition((MLP,), (6,), p)
    with pytest.raises(UsageError, match=r"batch of size 6 cannot be split into 4 equal parts \(data x fsdp\)"):
        partition((BATCH,), (6,), p)
    with pytest.raises(UsageError, match="would be split over mesh axis 'tensor'"):
        partition((HEADS, VOCAB), (8, 8), p)
    with pytest.raises(UsageError, match="would be split over mesh axis 'fsdp'"):
        partition((BATCH, EMBED), (8, 8), p)


def test_shard_bytes_by_hand():
    """Per layer of a block under fsdp 2, tensor 4 with two key heads, which are replicated over tensor:
    norms 2 x 32/2; query and out 2 x 32/2 x 8/4 x 4; key and value 2 x 32/2 x 2 x 4; three times 32/2 x 64/4."""
    block = 32 + 2 * 16 * 2 * 4 + 2 * 16 * 2 * 4 + 3 * 16 * 16
    total = 2 * block + 2 * (40 // 4) * 16 + 16
    assert shard_bytes(weights(ARCH), Placement(fsdp=2, tensor=4), 4) == 4 * total
    assert shard_bytes(weights(ARCH), Placement(data=4, fsdp=2, tensor=4), 2) == 2 * total
    # Llama 70B over 128 devices: all but the 161 norms of 8192 is split 128 ways, the norms 16 ways.
    rest = 68_976_648_192 - 161 * 8192
    assert shard_bytes(weights(ARCHS["llama-70b"]), Placement(fsdp=16, tensor=8), 2) == 2 * (rest // 128 + 161 * 512)


def test_workload():
    assert WORK.length == 8
    assert WORK.step_batch("actor_train") == 16
    assert WORK.step_batch("actor_generate") == 64


def error(call, placement, work=WORK, cluster=CLUSTER):
    return placement_error(call, placement, GRAPH, work, cluster)


@pytest.mark.parametrize(
    ("call", "placement"),
    [
        ("actor_train", Placement(data=2, tensor=2, micro_batches=8)),
        ("actor_generate", Placement(0, data=8, fsdp=2)),  # both nodes
        ("actor_generate", Placement(8, tensor=8)),
        ("critic_inference", Placement(6, data=2, micro_batches=32)),
        ("reference_inference", Placement(offload=True)),
    ],
)
def test_what_fits(call, placement):
    assert error(call, placement) is None


@pytest.mark.parametrize(
    ("call", "placement", "message"),
    [
        ("actor_train", Placement(data=0), "Call 'actor_train': data is 0; it must be at least 1."),
        ("actor_train", Placement(micro_batches=-1), "Call 'actor_train': micro_batches is -1; it must be at least 1."),
        ("actor_train", Placement(first=16),
         "Call 'actor_train': the plan asks for devices 16 to 16, but cluster 'two-nodes' has 16 (0 to 15)."),
        ("actor_train", Placement(first=-1),
         "Call 'actor_train': the plan asks for devices -1 to -1, but cluster 'two-nodes' has 16 (0 to 15)."),
        ("actor_train", Placement(first=8, data=16),
         "Call 'actor_train': the plan asks for devices 8 to 23, but cluster 'two-nodes' has 16 (0 to 15)."),
        ("actor_train", Placement(first=1, data=2),
         "Call 'actor_train': 2 devices from device 1 on are not an aligned slice."),
        ("actor_train", Placement(first=3, data=3, tensor=4),
         "Call 'actor_train': 12 devices from device 3 on are not an aligned slice."),
        ("actor_train", Placement(tensor=16), "Call 'actor_train': tensor is 16, which does not divide the 8 heads of model 'actor'."),
        ("actor_train", Placement(data=7, micro_batches=1),
         "Call 'actor_train': 16 sequences a step cannot be divided by data x fsdp x micro_batches = 7 x 1 x 1 = 7."),
        ("actor_generate", Placement(data=2, fsdp=2, micro_batches=32),
         "Call 'actor_generate': 64 sequences a step cannot be divided by data x fsdp x micro_batches = 2 x 2 x 32 = 128."),
        ("actor_generate", Placement(offload=True), "Call 'actor_generate': offload is set, but model 'actor' is trained;"),
        ("critic_train", Placement(fsdp=3), "Call 'critic_train': embed of size 32 cannot be split into 3 equal parts (fsdp). Model 'critic'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_names_the_call_and_the_number(call, placement, message):
    assert (error(call, placement) or "").startswith(message)


def test_key_heads_and_widths():
    arch = dataclasses.replace(ARCH, heads=12, kv_heads=3, head_dim=4)
    work = dataclasses.replace(WORK, archs={m: arch for m in HEADS_OF})
    found = error("actor_train", Placement(tensor=2), work)
    assert found.startswith(
        "Call 'actor_train': tensor is 2, which neither divides nor is a multiple of the 3 key/value"
    )
    assert error("actor_train", Placement(tensor=3), work) == (
        "Call 'actor_train': vocab of size 40 cannot be split into 3 equal parts (tensor). "
        "Model 'actor' cannot be laid out as tensor 3."
    )


def test_minibatches_that_do_not_divide_the_batch():
    """32 prompts x 8 = 256 in minibatches of 64 divide; 7 devices or 6 minibatches do not (volcengine/verl#5821)."""
    work = dataclasses.replace(WORK, batch=256)
    assert error("actor_train", Placement(), work) is None
    work = dataclasses.replace(WORK, batch=512, minibatches={"actor_train": 6})
    assert error("actor_train", Placement(), work) == (
        "Call 'actor_train': a batch of 512 cannot be divided into 6 minibatches."
    )


def plan(**changed):
    return ExecutionPlan("two-nodes", {**{c: Placement() for c in CALLS}, **changed})


def test_validate():
    validate(plan(), GRAPH, WORK, CLUSTER)
    with pytest.raises(UsageError, match="Call 'critic_train': tensor is 16"):
        validate(plan(critic_train=Placement(tensor=16)), GRAPH, WORK, CLUSTER)
    short = ExecutionPlan("two-nodes", {c: Placement() for c in CALLS if c != "reward_inference"})
    with pytest.raises(UsageError, match="The plan has no placement for call 'reward_inference'. Add a line"):
        validate(short, GRAPH, WORK, CLUSTER)


def test_validate_names_the_same_call_every_time():
    bad = plan(**{c: Placement(tensor=16) for c in CALLS})
    with pytest.raises(UsageError, match="Call 'actor_generate'"):
        validate(bad, GRAPH, WORK, CLUSTER)


def test_host_calls_need_no_placement():
    graph = ppo.graph(reward_function=True)
    placements = {c.name: Placement() for c in graph.calls if c.kind != "host"}
    validate(ExecutionPlan("two-nodes", placements), graph, WORK, CLUSTER)


def test_cost_table():
    table = CostTable({("a", Placement(data=2)): Cost(1.0, 10, "measured")})
    table.add("a", Placement(), Cost(2.0, 20, "compiled"))
    table.add("b", Placement(), Cost(3.0, 30, "analytic"))
    assert len(table) == 3
    assert table["a", Placement()].seconds == 2.0
    assert ("b", Placement()) in table and ("b", Placement(data=2)) not in table
    assert table.placements("a") == [Placement(), Placement(data=2)]
    with pytest.raises(UsageError, match="No cost is known for call 'b' under Placement.first=0, data=2"):
        table["b", Placement(data=2)]


def test_a_mesh_costs_the_same_wherever_it_starts():
    table = CostTable({("a", Placement(4, data=2)): Cost(1.0, 10, "measured")})
    assert table["a", Placement(data=2)] == table["a", Placement(2, data=2, offload=True)]
    newer = table.updated(CostTable({("a", Placement(data=2)): Cost(5.0, 10, "measured")}))
    assert (newer["a", Placement(4, data=2)].seconds, table["a", Placement(data=2)].seconds) == (5.0, 1.0)
