"""The lower bound lies below every plan's iteration, and near the best one's where nothing but work limits it."""

import dataclasses
import itertools
import random

import pytest
from planner_instances import PPO, analytic_costs, make_cluster, make_work

from real_jax.planner.bound import lower_bound
from real_jax.planner.enumerate import may_offload, moved, shapes
from real_jax.planner.heuristics import HEURISTICS, heuristic
from real_jax.planner.search import search
from real_jax.planner.simulate import iteration_seconds
from real_jax.spec.arch import ARCHS
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.plan import ExecutionPlan, Placement

READ = Graph("read", (Call("a", "inference", "m", ("x",), ("y",)), Call("b", "inference", "n", ("y",), ("z",))), ("x",))
P = Placement


def table(**seconds):
    """call=[(placement, seconds), ...]"""
    return CostTable({(call, p): Cost(s, 0, "analytic") for call, known in seconds.items() for p, s in known})


def bound(graph, costs, cluster, work=None):
    known = {c.name: costs.placements(c.name) for c in graph.calls}
    return lower_bound(graph, work or make_work(graph), cluster, costs, known).seconds


def test_area():
    """Two calls of one device each on two devices, iterations overlap freely: 3 s and 1 s make 2 s of both devices, but the
    longer one alone takes 3."""
    cluster = make_cluster(per_node=2)
    assert bound(READ, table(a=[(P(), 3.0)], b=[(P(), 1.0)]), cluster) == pytest.approx(3.0)
    assert bound(READ, table(a=[(P(data=2), 3.0)], b=[(P(), 1.0)]), cluster) == pytest.approx(4.0)  # share a device
    assert bound(READ, table(a=[(P(), 3.0), (P(data=2), 1.5)], b=[(P(), 1.0)]), cluster) == pytest.approx(2.5)


def test_cycle():
    """A trained model is generated with, then trained, then generated with again: no devices help."""
    calls = (Call("generate", "generate", "m", ("x",), ("y",)), Call("train", "train", "m", ("y",)))
    graph = Graph("loop", calls, ("x",))
    costs = table(generate=[(P(), 2.0)], train=[(P(), 5.0)])
    least = bound(graph, costs, make_cluster(per_node=4))
    plan = ExecutionPlan("test", {"generate": P(), "train": P()})
    assert least == pytest.approx(7.0)
    assert least == pytest.approx(iteration_seconds(plan, graph, make_work(graph), make_cluster(), costs))


def test_shared_cores_bound_the_work_that_gets_done():
    cluster = make_cluster(per_node=4, shared_cores=2.0)
    # Four cores' worth for 3 s and one for 1 s: two cores need (2 x 3 + 1) / 2 seconds, as a call takes two at most.
    assert bound(READ, table(a=[(P(data=4), 3.0)], b=[(P(), 1.0)]), cluster) == pytest.approx(3.5)


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_faster(seed):
    """Random costs, random plans, with and without moves between layouts."""
    rng = random.Random(seed)
    work, cluster = make_work(PPO, batch=8), make_cluster(1, 4, shared_cores=2.0 * (seed % 2))
    known = {c.name: rng.sample(shapes(c.name, PPO, work, cluster), 6) for c in PPO.calls}
    costs = table(**{call: [(p, rng.uniform(1e-6, 3e-6)) for p in options] for call, options in known.items()})
    least = lower_bound(PPO, work, cluster, costs, known).seconds
    assert least > 0
    for _ in range(200):
        plan = {c: rng.choice(moved(rng.choice(o), cluster, may_offload(c, PPO))) for c, o in known.items()}
        assert iteration_seconds(ExecutionPlan("test", plan), PPO, work, cluster, costs) >= least * (1 - 1e-9)


def test_the_bound_is_near_on_one_node_of_a_7b():
    work, cluster = make_work(PPO, ARCHS["llama-7b"], 64, compute_bytes=2), make_cluster(1, 8)
    work = dataclasses.replace(work, prompt_length=128, response_length=384)
    costs = analytic_costs(PPO, work, cluster)
    plans = [heuristic(name, PPO, work, cluster, costs) for name in HEURISTICS]
    found = search(PPO, work, cluster, costs, initial=plans)
    assert 0 <= found.gap < 0.05
    for plan, other in itertools.product([found.best], plans):
        assert iteration_seconds(plan, PPO, work, cluster, costs) <= iteration_seconds(other, PPO, work, cluster, costs)
