"""Operations, tokens, and where the devices' time goes, by hand."""

import pytest
from planner_instances import PPO, SMALL, make_cluster, make_work

from real_jax.planner.throughput import IDLE, device_time, iteration_flops, iteration_tokens, limit
from real_jax.spec.arch import forward_flops
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.plan import ExecutionPlan, Placement

ONE = Graph("one", (Call("read", "inference", "m", ("x",), ("y",)),), ("x",))
TWO = Graph("two", (*ONE.calls, Call("train", "train", "m", ("y",))), ("x",))


def test_operations_and_tokens_of_an_iteration():
    work = make_work(PPO)
    lm, scalar = forward_flops(SMALL, 8, 8), forward_flops(SMALL, 8, 8, "scalar")
    # Generation, the reference, and three for training on the actor; reward, critic and three for training on the critic.
    assert iteration_flops(PPO, work) == 5 * lm + 5 * scalar
    assert iteration_flops(PPO, work, recompute=True) == 6 * lm + 6 * scalar
    assert iteration_tokens(work) == 64


def test_device_time_of_a_plan_that_leaves_half_of_the_devices_idle():
    work, cluster = make_work(TWO), make_cluster(per_node=4)
    table = CostTable()
    table.add("read", Placement(data=2), Cost(1.0, 0, "analytic", (("memory", 0.75), ("overhead", 0.25))))
    table.add("train", Placement(data=2), Cost(3.0, 0, "analytic", (("matrix", 3.0),)))
    plan = ExecutionPlan("test", {"read": Placement(data=2), "train": Placement(data=2)})
    shares = {(s.what, s.resource): s.share for s in device_time(plan, TWO, work, cluster, table)}
    # 4 s on 4 devices: 16 device-seconds, half of them on devices that have nothing to do.
    assert shares == pytest.approx(
        {("train", "matrix"): 6 / 16, ("read", "memory"): 1.5 / 16, ("read", "overhead"): 0.5 / 16, (IDLE, IDLE): 0.5}
    )
    assert limit(device_time(plan, TWO, work, cluster, table), 2) == (
        "50% waiting for other calls; 38% matrix units in train"
    )
