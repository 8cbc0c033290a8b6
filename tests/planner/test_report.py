"""Tables say what the plan says; the picture has a bar for each event on each run of devices."""

import io

from matplotlib.patches import Rectangle
from planner_instances import PPO, make_cluster, make_work
from rich.console import Console

from real_jax.planner.report import compare_table, format_devices, gantt, graph_table, plan_table
from real_jax.spec.costs import Cost, CostTable
from real_jax.spec.plan import ExecutionPlan, Placement
from real_jax.spec.timeline import Event

EVENTS = (
    Event("actor to generate", "reallocation", 0, (0, 1, 6, 7), 0.0, 0.2),
    Event("generate", "generate", 0, (0, 1), 0.2, 1.0),
    Event("judge", "host", 0, (), 1.0, 1.5),
    Event("tokens to train", "data", 0, (), 1.0, 1.2),
    Event("train", "train", 0, (6, 7), 1.5, 3.0),
    Event("nothing", "inference", 0, (3,), 1.5, 1.5),
)


def text(table, width=200):
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue()


def test_format_devices():
    assert format_devices([0, 1, 2, 3]) == "0-3"
    assert format_devices([4]) == "4"
    assert format_devices([0, 1, 6, 8, 9]) == "0-1, 6, 8-9"
    assert format_devices([]) == "host"


def test_plan_table_rows():
    placements = dict.fromkeys((c.name for c in PPO.calls), Placement(0, data=2))
    placements["actor_train"] = Placement(0, fsdp=2, tensor=2, micro_batches=4, remat=True)
    costs = CostTable({(c, p): Cost(0.25, 2**30, "compiled") for c, p in placements.items()})
    shown = text(plan_table(ExecutionPlan("test", placements), PPO, make_work(PPO), make_cluster(), costs))
    (row,) = (line for line in shown.splitlines() if line.startswith("actor_train"))
    assert " ".join(row.split()) == "actor_train 0-3 fsdp 2 x tensor 2 4 remat 0.25 0.00 + 1.00 compiled"
    assert "Fullest device: 0, with 1.00 GiB of 80 GiB." in shown


def test_a_plan_of_many_devices_fits_a_narrow_terminal():
    placements = dict.fromkeys((c.name for c in PPO.calls), Placement(64, data=32, tensor=2, remat=True))
    costs = CostTable({(c, p): Cost(0.916, 100 * 2**30, "compiled") for c, p in placements.items()})
    narrow = text(plan_table(ExecutionPlan("test", placements), PPO, make_work(PPO), make_cluster(), costs), 80)
    rows = [line for line in narrow.splitlines() if line.startswith("reference_inference")]
    assert [row.split() for row in rows] == [
        ["reference_inference", "64-127", "data", "32", "x", "1", "remat", "0.916", "0.00", "+", "100.00", "compiled"]
    ]


def test_graph_table_marks_the_iteration_before():
    shown = text(graph_table(PPO, keys=True))
    assert "actor_train*" in shown and "reference_logprobs" in shown
    assert "reference_logprobs" not in text(graph_table(PPO))


def test_compare_table_ratio():
    shown = text(compare_table([("generate", 2.0, 3.0), ("train", None, 0.5), ("move", 0.001, None)]))
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines() if line.strip()}
    assert rows["generate"] == ["2", "s", "3", "s", "1.50"]
    assert rows["train"] == ["-", "500", "ms", "-"]
    assert rows["move"] == ["1", "ms", "-", "-"]


def test_gantt_bars_stand_where_the_events_are():
    figure = gantt(EVENTS, None, "a title")
    (axes,) = figure.axes
    bars = [p for p in axes.patches if isinstance(p, Rectangle)]
    spans = sorted(
        (round(b.get_x(), 6), round(b.get_width(), 6), round(b.get_y() + b.get_height() / 2, 6)) for b in bars
    )
    # Two runs of devices for the reallocation (middle of 0-1 and of 6-7); the host has the row after device 7.
    assert spans == [(0.0, 0.2, 0.5), (0.0, 0.2, 6.5), (0.2, 0.8, 0.5), (1.0, 0.5, 8.0), (1.5, 1.5, 6.5)]
    assert [b for b in bars if b.get_hatch()] and axes.get_title("left") == "a title"
    assert [t.get_text() for t in axes.get_yticklabels()] == [f"device {d}" for d in range(8)] + ["host"]
    labels = [t.get_text() for t in figure.legends[0].get_texts()]
    assert labels == ["generate", "judge", "train", "actor → generate"]
    colours = {b.get_edgecolor() for b in bars if b.get_hatch()} | {bars[2].get_facecolor()}
    assert len(colours) == 1  # the reallocation has the colour of the call it serves


def test_gantt_writes_a_picture(tmp_path):
    path = tmp_path / "new" / "plan.png"
    assert gantt(EVENTS, path, "a title") is None
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and len(content) > 20000


def test_gantt_of_nothing(tmp_path):
    gantt([], tmp_path / "empty.png", "nothing ran")
    assert (tmp_path / "empty.png").stat().st_size > 1000
