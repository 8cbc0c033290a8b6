"""Timelines worked out by hand."""

import itertools

import pytest
from planner_instances import SMALL, make_cluster, make_work

from real_jax.planner.simulate import iteration_seconds, simulate
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.dataflow import Average, Call, Graph
from real_jax.spec.errors import UsageError
from real_jax.spec.plan import ExecutionPlan, Placement

ON_0, ON_1, BOTH = Placement(0), Placement(1), Placement(0, data=2)
LM_BYTES = 4 * 728

# generate -> two frozen models in parallel
FAN = Graph(
    "fan",
    (
        Call("sample", "inference", "actor", ("prompts",), ("tokens",)),
        Call("left", "inference", "reward", ("tokens",), ("scores",)),
        Call("right", "inference", "reference", ("tokens",), ("logprobs",)),
    ),
    ("prompts",),
)
LOOP = Graph(
    "loop",
    (
        Call("generate", "generate", "actor", ("prompts",), ("tokens",)),
        Call("train", "train", "actor", ("tokens",)),
        Call("score", "inference", "reward", ("tokens",), ("scores",)),
    ),
    ("prompts",),
)


def run(graph, placements, seconds, cluster=None, iterations=1, data_seconds=None, compute_bytes=4):
    plan = ExecutionPlan("test", placements)
    costs = CostTable({(c, placements.get(c, Placement())): Cost(s, 0, "analytic") for c, s in seconds.items()})
    work, cluster = make_work(graph, compute_bytes=compute_bytes), cluster or make_cluster(1, 4)
    timeline = simulate(plan, graph, work, cluster, costs, iterations, data_seconds)
    if data_seconds is None:
        again = iteration_seconds(plan, graph, work, cluster, costs, iterations)
        assert again == timeline.iteration_seconds
    return timeline


def spans(timeline):
    return {(e.name, e.iteration): (pytest.approx(e.start), pytest.approx(e.end)) for e in timeline.events}


def test_disjoint_meshes_overlap():
    timeline = run(FAN, {"sample": BOTH, "left": ON_0, "right": ON_1}, {"sample": 1, "left": 2, "right": 3})
    assert spans(timeline) == {("sample", 0): (0, 1), ("left", 0): (1, 3), ("right", 0): (1, 4)}
    assert timeline.makespan == timeline.iteration_seconds == 4
    assert {e.name: e.devices for e in timeline.events} == {"sample": (0, 1), "left": (0,), "right": (1,)}


def test_shared_devices_serialize_in_order_of_dispatch():
    timeline = run(FAN, {"sample": BOTH, "left": BOTH, "right": BOTH}, {"sample": 1, "left": 2, "right": 3})
    assert spans(timeline) == {("sample", 0): (0, 1), ("left", 0): (1, 3), ("right", 0): (3, 6)}
    # `left` reads from another mesh here, so `right` is dispatched before it and has device 0 first.
    timeline = run(FAN, {"sample": BOTH, "left": ON_0, "right": BOTH}, {"sample": 1, "left": 2, "right": 3})
    assert spans(timeline) == {("sample", 0): (0, 1), ("right", 0): (1, 4), ("left", 0): (4, 6)}


def test_a_call_that_waits_for_other_devices_lets_a_later_one_go_first():
    # `b` reads from device 1 and would keep device 0 waiting until 5; `c` needs nothing and is dispatched before it.
    calls = (
        Call("a", "inference", "reward", ("x",), ("y",)),
        Call("b", "inference", "actor", ("y",), ("z",)),
        Call("c", "inference", "reference", ("x",), ("u",)),
    )
    timeline = run(Graph("g", calls, ("x",)), {"a": ON_1, "b": ON_0, "c": ON_0}, {"a": 5, "b": 1, "c": 2})
    assert spans(timeline) == {("a", 0): (0, 5), ("c", 0): (0, 2), ("b", 0): (5, 6)}


def test_lag_edges_carry_to_the_next_iteration():
    # The next generate waits for train, not for score on the other device.
    placements = {"generate": ON_0, "train": ON_0, "score": ON_1}
    timeline = run(LOOP, placements, {"generate": 2, "train": 3, "score": 4}, iterations=3)
    want = {}
    for i in range(3):
        want |= {("generate", i): (5 * i, 5 * i + 2), ("train", i): (5 * i + 2, 5 * i + 5)}
        want |= {("score", i): (5 * i + 2, 5 * i + 6)}
    assert spans(timeline) == want
    assert (timeline.makespan, timeline.iteration_seconds) == (16, 5)


def test_a_carried_key_is_read_from_the_iteration_before():
    calls = (
        Call("early", "inference", "reward", ("x", "state"), ("y",)),
        Call("late", "inference", "reference", ("y",), ("state",)),
    )
    graph = Graph("carry", calls, ("x",), ("state",))
    timeline = run(graph, {"early": ON_0, "late": ON_1}, {"early": 1, "late": 2}, iterations=2)
    assert spans(timeline) == {
        ("early", 0): (0, 1), ("late", 0): (1, 3), ("early", 1): (3, 4), ("late", 1): (4, 6),
    }  # fmt: skip


def test_a_trained_model_moves_once_per_iteration_and_occupies_both_meshes():
    cluster = make_cluster(1, 4)
    # Device 0 sends all weights to device 1 at 100 GB/s; device 1 reads and writes its copy at 1000 GB/s.
    move = LM_BYTES / 100e9 + 2 * LM_BYTES / 1000e9
    placements = {"generate": ON_1, "train": ON_0, "score": ON_1}
    timeline = run(LOOP, placements, {"generate": 2, "train": 3, "score": 1}, cluster, iterations=2)
    moves = [e for e in timeline.events if e.kind == "reallocation"]
    assert [(e.name, e.iteration, e.devices) for e in moves] == [
        ("actor to generate", 0, (0, 1)), ("actor to generate", 1, (0, 1)),
    ]  # fmt: skip
    assert all(e.end - e.start == pytest.approx(move, rel=1e-6) for e in moves)
    assert timeline.iteration_seconds == pytest.approx(5 + move)
    # A call in train's own layout needs no move, unless it computes in another type.
    home = {"generate": ON_0, "train": Placement(0, micro_batches=2), "score": ON_1}
    seconds = {"generate": 2, "train": 3, "score": 1}
    assert all(e.kind != "reallocation" for e in run(LOOP, home, seconds).events)
    cast = run(LOOP, home, seconds, compute_bytes=2)
    assert [(e.name, e.devices) for e in cast.events if e.kind == "reallocation"] == [("actor to generate", (0,))]


def test_a_frozen_model_moves_once_in_iteration_0():
    calls = (Call("a", "inference", "reward", ("x",), ("y",)), Call("b", "inference", "reward", ("y",), ("z",)))
    cluster = make_cluster(1, 4)
    timeline = run(Graph("g", calls, ("x",)), {"a": ON_0, "b": ON_1}, {"a": 2, "b": 1}, cluster, iterations=3)
    moves = [e for e in timeline.events if e.kind == "reallocation"]
    assert [(e.name, e.iteration) for e in moves] == [("reward to b", 0)]
    assert timeline.iteration_seconds == pytest.approx(2)  # the pipeline's slower half; the move is no part of it


def test_an_offloaded_model_comes_in_once_its_devices_are_idle_and_others_go_ahead():
    """There is no room for it beside what runs: `left` on device 0 has to end, and `late` is not kept waiting."""
    calls = (
        Call("left", "inference", "reward", ("x",), ("y",)),
        Call("away", "inference", "reference", ("x",), ("z",)),
        Call("late", "inference", "actor", ("x",), ("u",)),
    )
    placements = {"left": ON_0, "away": Placement(0, offload=True), "late": ON_0}
    timeline = run(Graph("g", calls, ("x",)), placements, {"left": 5, "away": 1, "late": 2}, make_cluster(1, 4))
    fetch = next(e for e in timeline.events if e.name == "reference to away")
    assert (fetch.start, timeline.makespan) == (7, pytest.approx(fetch.end + 1))
    assert spans(timeline)["late", 0] == (5, 7)


@pytest.mark.parametrize("compute_bytes", [4, 2])
def test_a_moving_average_follows_before_its_next_call(compute_bytes):
    """In float32 from where the actor trains; a call in another type gets a view of the average after that."""
    calls = (
        Call("judge", "inference", "reference", ("prompts",), ("tokens",)),
        Call("train", "train", "actor", ("tokens",)),
    )
    graph = Graph("follow", calls, ("prompts",), averages=(Average("reference", "actor", 0.5),))
    follow = LM_BYTES / 100e9 + 2 * LM_BYTES / 1000e9
    view = 2 * LM_BYTES / 2 / 1000e9 if compute_bytes == 2 else 0.0
    timeline = run(
        graph,
        {"judge": ON_1, "train": ON_0},
        {"judge": 2, "train": 3},
        make_cluster(1, 4),
        3,
        compute_bytes=compute_bytes,
    )
    moves = [(e.name, e.iteration, e.devices) for e in timeline.events if e.kind == "reallocation"]
    wanted = []
    for i in range(3):
        wanted += [("actor to judge", i, (0, 1))] if i else []
        wanted += [("reference to judge", i, (1,))] if view else []
    assert moves == wanted
    assert timeline.iteration_seconds == pytest.approx(5 + follow + view)


def test_two_calls_with_one_layout_share_a_view():
    calls = (
        Call("a", "generate", "actor", ("x",), ("y",)),
        Call("b", "inference", "actor", ("y",), ("z",)),
        Call("t", "train", "actor", ("z",)),
    )
    shared = {"a": ON_1, "b": Placement(1, micro_batches=2), "t": ON_0}
    timeline = run(Graph("g", calls, ("x",)), shared, {"a": 1, "b": 1, "t": 1}, iterations=2)
    assert [e.name for e in timeline.events if e.kind == "reallocation"] == ["actor to a", "actor to a"]


def test_an_offloaded_model_is_read_from_the_host_before_each_call():
    away = Placement(0, offload=True)
    calls = (Call("a", "inference", "reference", ("x",), ("y",)),)
    timeline = run(Graph("g", calls, ("x",)), {"a": away}, {"a": 1}, iterations=2)
    loads = [e for e in timeline.events if e.kind == "reallocation"]
    assert [e.iteration for e in loads] == [0, 1]
    assert loads[0].end == pytest.approx(LM_BYTES / 20e9)
    assert timeline.iteration_seconds == pytest.approx(1 + LM_BYTES / 20e9)


HOST = Graph(
    "host",
    (
        Call("sample", "inference", "actor", ("x",), ("tokens",)),
        Call("judge", "host", "", ("tokens",), ("scores",)),
        Call("read", "inference", "reference", ("tokens",), ("logprobs",)),
        Call("train", "train", "critic", ("scores", "logprobs")),
    ),
    ("x",),
)


def test_nothing_is_dispatched_while_a_host_call_runs():
    seconds = {"sample": 1, "judge": 0.5, "read": 2, "train": 1}
    on_0 = run(HOST, {"sample": ON_0, "read": ON_0, "train": ON_0}, seconds)
    # On the same device `read` is dispatched while `sample` still runs, ahead of the host call.
    assert spans(on_0) == {
        ("sample", 0): (0, 1), ("judge", 0): (1, 1.5), ("read", 0): (1, 3), ("train", 0): (3, 4),
    }  # fmt: skip
    on_1 = run(HOST, {"sample": ON_0, "read": ON_1, "train": ON_1}, seconds)
    assert spans(on_1)["read", 0] == (1.5, 3.5)
    assert [e.devices for e in on_1.events if e.kind == "host"] == [()]


def test_shared_cores_slow_overlapping_calls():
    cluster = make_cluster(1, 4, shared_cores=2.0)
    # Each wants one of two cores: no slowdown.
    timeline = run(FAN, {"sample": BOTH, "left": ON_0, "right": ON_1}, {"sample": 1, "left": 2, "right": 3}, cluster)
    assert spans(timeline)["right", 0] == (1, 4)
    # Each wants two of two: both run at half speed until the first ends at 1 + 4; the other's last second runs alone.
    wide = {"sample": Placement(0, data=4), "left": BOTH, "right": Placement(2, data=2)}
    timeline = run(FAN, wide, {"sample": 1, "left": 2, "right": 3}, cluster)
    assert spans(timeline) == {("sample", 0): (0, 1), ("left", 0): (1, 5), ("right", 0): (1, 6)}
    # Two and one of two cores: rate 2/3 until `left` has done 2 s at 1 + 3; `right` has 1 s left.
    mixed = {"sample": Placement(0, data=4), "left": BOTH, "right": Placement(2)}
    timeline = run(FAN, mixed, {"sample": 1, "left": 2, "right": 3}, cluster)
    assert spans(timeline) == {("sample", 0): (0, 1), ("left", 0): (1, 4), ("right", 0): (1, 5)}


def test_shared_cores_conserve_work():
    # One core: whatever overlaps, the work of an iteration takes its sum.
    cluster = make_cluster(1, 4, shared_cores=1.0)
    timeline = run(
        FAN, {"sample": ON_0, "left": ON_1, "right": Placement(2)}, {"sample": 1, "left": 2, "right": 3}, cluster, 3
    )
    assert timeline.makespan == pytest.approx(18) and timeline.iteration_seconds == pytest.approx(6)


def test_data_seconds_delay_the_target():
    def data_seconds(edge, source, target):
        assert edge.key == "tokens"
        return 0.0 if source.devices == target.devices else 0.25

    timeline = run(
        FAN, {"sample": ON_0, "left": ON_0, "right": ON_1}, {"sample": 1, "left": 2, "right": 3},
        data_seconds=data_seconds,
    )  # fmt: skip
    assert spans(timeline) == {
        ("sample", 0): (0, 1), ("left", 0): (1, 3), ("tokens to right", 0): (1, 1.25), ("right", 0): (1.25, 4.25),
    }  # fmt: skip


def test_nothing_runs_twice_on_a_device_at_a_time():
    placements = {"generate": BOTH, "train": ON_0, "score": Placement(1)}
    timeline = run(LOOP, placements, {"generate": 0.3, "train": 0.7, "score": 0.2}, iterations=4)
    for device in range(2):
        busy = sorted((e.start, e.end) for e in timeline.events if device in e.devices)
        assert all(a[1] <= b[0] + 1e-12 for a, b in itertools.pairwise(busy))


def test_a_missing_cost_is_named():
    plan = ExecutionPlan("test", {"sample": ON_0, "left": ON_0, "right": ON_0})
    with pytest.raises(UsageError, match="'sample'"):
        simulate(plan, FAN, make_work(FAN, SMALL), make_cluster(), CostTable())
