"""Search against exhaustive enumeration, and against the heuristics."""

import itertools
import random

import pytest
from planner_instances import PPO, analytic_costs, make_cluster, make_work, ppo_70b

from real_jax.planner import memory
from real_jax.planner.enumerate import may_offload, moved
from real_jax.planner.heuristics import heuristic
from real_jax.planner.search import search
from real_jax.planner.simulate import iteration_seconds
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Call, Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.plan import ExecutionPlan, Placement, validate

SHORT = Graph(
    "short",
    (
        Call("generate", "generate", "actor", ("x",), ("tokens",)),
        Call("reward", "inference", "reward", ("tokens",), ("scores",)),
        Call("reference", "inference", "reference", ("tokens",), ("logprobs",)),
        Call("train", "train", "actor", ("tokens", "scores", "logprobs")),
    ),
    ("x",),
)
SHAPES = [Placement(), Placement(data=2), Placement(fsdp=2), Placement(tensor=2)]  # on two devices


def random_costs(graph, seed):
    """Costs without any pattern, so that the best plan has to be found and not guessed."""
    rng = random.Random(seed)
    costs = CostTable()
    for call in graph.calls:
        for p in SHAPES:
            costs.add(call.name, p, Cost(rng.uniform(1, 2), rng.randrange(10000), "analytic"))
    return costs


def options(call, graph, cluster, costs):
    return [p for s in costs.placements(call) for p in moved(s, cluster, may_offload(call, graph))]


def brute_force(graph, work, cluster, costs):
    """The best feasible seconds over every plan."""
    calls = [c.name for c in graph.calls]
    best = float("inf")
    for placements in itertools.product(*(options(c, graph, cluster, costs) for c in calls)):
        plan = ExecutionPlan("test", dict(zip(calls, placements, strict=True)))
        if memory.check(plan, graph, work, cluster, costs) is None:
            best = min(best, iteration_seconds(plan, graph, work, cluster, costs))
    return best


@pytest.mark.parametrize(("seed", "shared_cores"), [(0, 0.0), (1, 0.0), (2, 2.0)])
def test_small_spaces_are_searched_exactly_and_chains_come_close(seed, shared_cores):
    work, cluster = make_work(SHORT), make_cluster(1, 2, shared_cores, memory_gib=30000 / 2**30)
    costs = random_costs(SHORT, seed)
    optimum = brute_force(SHORT, work, cluster, costs)
    exact = search(SHORT, work, cluster, costs)
    assert exact.exact and exact.top[0][1] == optimum == exact.lower_bound and exact.gap == 0
    chain = search(SHORT, work, cluster, costs, evaluations=300, seed=seed)
    assert not chain.exact and chain.evaluated < exact.evaluated
    assert chain.lower_bound <= optimum <= chain.top[0][1] <= 1.02 * optimum


def test_results_are_feasible_distinct_sorted_and_reproducible():
    work, cluster = make_work(PPO, batch=8), make_cluster(1, 4, memory_gib=30000 / 2**30)
    costs = analytic_costs(PPO, work, cluster)
    found = search(PPO, work, cluster, costs, evaluations=300, keep=5, seed=3)
    assert len(found.top) == 5 and found.best is found.top[0][0]
    assert [s for _, s in found.top] == sorted(s for _, s in found.top)
    assert len({tuple(p.placements.items()) for p, _ in found.top}) == 5
    for plan, seconds in found.top:
        validate(plan, PPO, work, cluster)
        assert memory.check(plan, PPO, work, cluster, costs) is None
        assert iteration_seconds(plan, PPO, work, cluster, costs) == seconds
    again = search(PPO, work, cluster, costs, evaluations=300, keep=5, seed=3)
    assert again == found
    assert "seed 3" in found.best.origin and found.best.cluster == "test"


def test_an_initial_plan_is_never_better_than_the_result():
    graph, work, cluster = ppo_70b(nodes=8)
    costs = analytic_costs(graph, work, cluster, max_micro_batches=8)
    start = heuristic("symmetric", graph, work, cluster, costs)
    found = search(graph, work, cluster, costs, evaluations=60, initial=[start])
    assert found.top[0][1] <= iteration_seconds(start, graph, work, cluster, costs)


@pytest.mark.parametrize("seed", range(3))
def test_symmetric_is_the_best_of_its_kind_and_never_beats_an_exact_search(seed):
    work, cluster = make_work(SHORT), make_cluster(1, 2)
    costs = random_costs(SHORT, seed)
    plan = heuristic("symmetric", SHORT, work, cluster, costs)

    def seconds(plan):
        return iteration_seconds(plan, SHORT, work, cluster, costs)

    kind = [ExecutionPlan("test", {c.name: shape for c in SHORT.calls}) for shape in SHAPES[1:]]
    assert seconds(plan) == min(map(seconds, kind))
    assert search(SHORT, work, cluster, costs).top[0][1] <= seconds(plan)


def test_host_calls_are_priced_but_not_placed():
    calls = (
        Call("generate", "generate", "actor", ("x",), ("tokens",)),
        Call("judge", "host", "", ("tokens",), ("scores",)),
    )
    graph = Graph("host", calls, ("x",))
    costs = CostTable(
        {("generate", Placement()): Cost(1, 0, "analytic"), ("judge", Placement()): Cost(2, 0, "analytic")}
    )
    found = search(graph, make_work(graph), make_cluster(), costs)
    assert found.exact and found.best.placements == {"generate": Placement()}
    with pytest.raises(UsageError, match="'judge'"):
        search(graph, make_work(graph), make_cluster(), CostTable({("generate", Placement()): Cost(1, 0, "analytic")}))


def test_what_does_not_fit_is_said():
    work = make_work(SHORT)
    # The actor's optimizer state alone: 12 bytes for 728 parameters, split in two but for 24 norm scales: 4512 bytes.
    fixed = CostTable({(c.name, SHAPES[-1]): Cost(1, 0, "analytic") for c in SHORT.calls})
    with pytest.raises(UsageError, match=r"No placement of call 'train' fits: the leanest \(tensor 2.*GiB more than"):
        search(SHORT, work, make_cluster(1, 2, memory_gib=4400 / 2**30), fixed)
    # Each call fits by itself, but not together.
    one = CostTable({(c.name, Placement()): Cost(1, 0, "analytic") for c in SHORT.calls})
    with pytest.raises(UsageError, match=r"No plan for 'short'.*Device 0 would need.*optimizer state of actor"):
        search(SHORT, work, make_cluster(per_node=1, memory_gib=9000 / 2**30), one)
    with pytest.raises(UsageError, match="No cost is known for call 'generate'"):
        search(SHORT, work, make_cluster(), CostTable())
