"""Plans and timelines for people: tables for the terminal, a Gantt chart as a picture."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from real_jax.planner import memory, simulate, throughput
from real_jax.spec.costs import CostTable
from real_jax.spec.dataflow import Graph
from real_jax.spec.hardware import Cluster
from real_jax.spec.plan import ExecutionPlan, Placement, Workload
from real_jax.spec.timeline import Event

# Muted, of like lightness, told apart also with a red-green weakness by their order in hue and by their labels.
COLOURS = (
    "#4C78A8",
    "#F2A541",
    "#59A14F",
    "#D1605E",
    "#8E6BB0",
    "#5BB5B0",
    "#C98BB0",
    "#9C755F",
    "#B7A63A",
    "#7F8B95",
)
INK, FAINT = "#22303C", "#D9DEE3"


def format_bytes(count: float) -> str:
    """Bytes as MiB, or as GiB from one GiB on."""
    return f"{count / memory.GIB:.2f} GiB" if count >= memory.GIB else f"{count / 2**20:.1f} MiB"


def format_seconds(seconds: float) -> str:
    """Seconds with three digits, as ms below one second."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def format_devices(devices: Sequence[int]) -> str:
    """Devices as ranges: "0-3, 6"."""
    runs = _runs(devices)
    return ", ".join(str(first) if count == 1 else f"{first}-{first + count - 1}" for first, count in runs) or "host"


def plan_table(plan: ExecutionPlan, graph: Graph, work: Workload, cluster: Cluster, costs: CostTable) -> Table:
    """One row per call: where and how it runs, and what that is predicted to cost.

    "weights" is what the call's layout holds of its model on each device (with optimizer state for a train call),
    "working" what the call adds while it runs. The caption gives the fullest device.
    """
    totals = memory.device_bytes(plan, graph, work, costs)
    fullest = max(totals, key=lambda d: (totals[d], -d))
    unit, name = (memory.GIB, "GiB") if totals[fullest] >= memory.GIB else (2**20, "MiB")
    table = Table(
        box=SIMPLE_HEAD,
        padding=0,
        pad_edge=False,
        show_edge=False,
        title=f"{graph.name} on {plan.cluster}" + (f" ({plan.origin})" if plan.origin else ""),
        caption=f"Fullest device: {fullest}, with {format_bytes(totals[fullest])} of {cluster.chip.memory_gib:g} GiB.",
    )
    # Where the terminal is narrow, the mesh folds at its words; names and numbers stay whole.
    for header, width in (("call", None), ("devices", None), ("mesh", len("tensor 16"))):
        table.add_column(header, no_wrap=width is None, min_width=width)
    for header in ("micro", "seconds", f"weights +\nworking {name}", "source"):
        table.add_column(header, justify="right", no_wrap=True)
    for call in graph.order:
        if call.kind == "host":
            known = (call.name, Placement()) in costs
            cost = costs[call.name, Placement()] if known else None
            seconds, source = (f"{cost.seconds:.3g}", cost.source) if cost else ("-", "-")
            table.add_row(call.name, "host", "-", "-", seconds, "-", source)
            continue
        p, cost = plan[call.name], costs[call.name, plan[call.name]]
        itemsize = memory.STATE_BYTES if call.kind == "train" else work.compute_bytes
        weights = memory.model_shard_bytes(call.model, work, p, itemsize)
        table.add_row(
            call.name,
            format_devices(p.devices),
            p.describe() + (", offload" if p.offload else ""),
            f"{p.micro_batches}" + (" remat" if p.remat else ""),
            f"{cost.seconds:.3g}",
            f"{weights / unit:.2f} + {cost.work_bytes / unit:.2f}",
            cost.source,
        )
    return table


def candidates_table(rows: Iterable[tuple[str, str, bool, float, float | None, float]]) -> Table:
    """Plans side by side: (stage, plan, whether it was chosen, predicted seconds, measured, times the chosen one's)."""
    table = Table(box=SIMPLE_HEAD, title="Plans compared (seconds per iteration; * is the plan)")
    for header in ("stage", "plan", "predicted", "x plan", "measured"):
        table.add_column(header, justify="left" if header in ("stage", "plan") else "right")
    for stage, origin, chosen, predicted, measured, factor in rows:
        shown = "-" if measured is None else format_seconds(measured)
        table.add_row(stage, origin + " *" * chosen, format_seconds(predicted), f"{factor:.2f}", shown)
    return table


def summary_table(plan, graph, work, cluster, costs, lower_bound: float | None, compiler: str) -> Table:
    """What `plan` reaches, how far that is from the lower bound, and what limits it."""
    seconds = simulate.iteration_seconds(plan, graph, work, cluster, costs)
    flops = throughput.iteration_flops(graph, work)
    peak = cluster.chip.matrix_tflops * 1e12 * cluster.devices
    table = Table(box=SIMPLE_HEAD, show_header=False, title=f"{graph.name} on {cluster.name}, predicted")
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("iteration", format_seconds(seconds))
    table.add_row("throughput", f"{throughput.iteration_tokens(work) / seconds:,.0f} tokens/s")
    table.add_row("useful operations", f"{format_rate(flops / seconds)}, {flops / seconds / peak:.1%} of the peak")
    if lower_bound:
        gap = seconds / lower_bound - 1
        shown = "proven optimal under these costs" if gap < 1e-6 else f"at most {gap:.1%} above the optimum"
        table.add_row("distance", f"{shown} (no plan is faster than {format_seconds(lower_bound)})")
    shares = throughput.device_time(plan, graph, work, cluster, costs)
    table.add_row("device time", "\n".join(s.describe() for s in shares[:5]))
    if compiler:
        table.add_row("costs from", compiler)
    return table


def format_rate(flops_per_second: float) -> str:
    """Operations per second with three digits, as PFLOP/s, TFLOP/s or GFLOP/s."""
    for unit, size in (("PFLOP/s", 1e15), ("TFLOP/s", 1e12)):
        if flops_per_second >= 0.1 * size:
            return f"{flops_per_second / size:.3g} {unit}"
    return f"{flops_per_second / 1e9:.3g} GFLOP/s"


def graph_table(graph: Graph, keys: bool = False) -> Table:
    """One row per call, in order: its kind and model, and the calls it waits for; with `keys` what it reads and writes."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=f"Graph {graph.name}")
    table.caption = "Calls with a * are those of the iteration before."
    for header in ("call", "kind", "model", *(("reads", "writes") if keys else ()), "waits for"):
        table.add_column(header, no_wrap=header in ("call", "kind", "model"))
    for call in graph.order:
        waits = dict.fromkeys(e.source + "*" * e.lag for e in graph.edges if e.target == call.name)
        more = (", ".join(call.reads), ", ".join(call.writes)) if keys else ()
        table.add_row(call.name, call.kind, call.model or "-", *more, ", ".join(waits))
    return table


def compare_table(rows: Iterable[tuple[str, float | None, float | None]], title: str = "") -> Table:
    """Predicted against measured seconds, one row (name, predicted, measured) per call or reallocation.

    The ratio is measured / predicted; a None shows as "-".
    """
    table = Table(box=SIMPLE_HEAD, title=title or "Predicted and measured")
    table.add_column("call or reallocation", no_wrap=True)
    for header in ("predicted", "measured", "measured / predicted"):
        table.add_column(header, justify="right")
    for name, predicted, measured in rows:
        ratio = f"{measured / predicted:.2f}" if predicted and measured is not None else "-"
        table.add_row(name, *("-" if s is None else format_seconds(s) for s in (predicted, measured)), ratio)
    return table


def gantt(events: Sequence[Event], path: Path | str | None, title: str):
    """Draws `events`: one row per device (and one for the host), calls in colour, reallocations hatched.

    A call has one colour throughout; a reallocation has that of the call it serves. Writes a PNG to `path`; where that
    is None, returns the matplotlib Figure instead.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [e for e in events if (e.devices or e.kind == "host") and e.end > e.start]
    devices = 1 + max((d for e in shown for d in e.devices), default=-1)
    host = any(e.kind == "host" for e in shown)
    rows = max(devices + host, 1)
    makespan = max((e.end for e in shown), default=1.0)
    scale, unit = (1.0, "s") if makespan >= 1 else (1e3, "ms")
    figure = Figure(figsize=(14, min(9.0, 2.4 + 0.4 * max(rows, 3))), dpi=130, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    _dress(axes, title, devices, host, makespan * scale, unit)
    names = sorted({e.name for e in shown if e.kind != "reallocation"})  # one call, one colour, in every picture
    colours = dict(zip(names, itertools.cycle(COLOURS)))
    bars = []
    for event in shown:
        for first, count in _runs(event.devices) or [(devices, 1)]:
            bars.append((event, _bar(axes, event, first, count, rows, scale, colours)))
    _mark_iterations(axes, shown, scale)
    _legend(axes, shown, colours)
    figure.draw_without_rendering()  # settles the layout, so that the labels can be fitted to their bars
    for event, bar in bars:
        _label(axes, canvas.get_renderer(), event, bar)
    if path is None:
        return figure
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return None


def _runs(devices: Sequence[int]) -> list[tuple[int, int]]:
    """(first, count) of each run of neighbouring devices."""
    runs: list[tuple[int, int]] = []
    for d in devices:
        if runs and d == runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((d, 1))
    return runs


def _target(event: Event) -> str:
    """The call that an event is for: itself, or where a reallocation "MODEL to CALL" goes."""
    return event.name.rpartition(" to ")[2] if event.kind == "reallocation" else event.name


def _bar(axes, event: Event, first: int, count: int, rows: int, scale: float, colours):
    from matplotlib.patches import Rectangle

    moves = event.kind == "reallocation"
    colour = colours.get(_target(event), COLOURS[-1])
    margin = 0.06 if rows <= 33 else 0.0
    bar = Rectangle(
        (event.start * scale, first - 0.5 + margin),
        (event.end - event.start) * scale,
        count - 2 * margin,
        facecolor="white" if moves else colour,
        edgecolor=colour if moves else "white",
        hatch="/////" if moves else None,
        linewidth=0.8,
        zorder=3,
    )
    return axes.add_patch(bar)


def _dress(axes, title: str, devices: int, host: bool, width: float, unit: str) -> None:
    rows = max(devices + host, 1)
    step = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, devices) if devices <= 24 * n)
    ticks = list(range(0, devices, step)) + [devices] * host
    axes.set_yticks(ticks, [f"device {d}" for d in range(0, devices, step)] + ["host"] * host, fontsize=9)
    axes.set_ylim(rows - 0.5, -0.5)
    axes.set_xlim(0, width * 1.005)
    axes.set_xlabel(f"time ({unit})", color=INK)
    axes.set_title(title, loc="left", fontsize=13, fontweight="bold", color=INK, pad=22)
    axes.grid(axis="x", color=FAINT, linewidth=0.8, zorder=0)
    axes.tick_params(length=0, colors=INK)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    if rows <= 33:
        for row in range(1, rows):
            axes.axhline(row - 0.5, color=FAINT, linewidth=0.6, zorder=1)


def _mark_iterations(axes, events: Sequence[Event], scale: float) -> None:
    """A dashed line where each iteration's last event ends, named above the plot."""
    ends: dict[int, float] = {}
    for e in events:
        ends[e.iteration] = max(ends.get(e.iteration, 0.0), e.end)
    for iteration, end in ends.items():
        axes.axvline(end * scale, color=INK, linewidth=1.0, linestyle=(0, (4, 3)), zorder=4)
        axes.annotate(
            f"end of iteration {iteration}", (end * scale, 1), (-3, 5), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="right", fontsize=8.5, color=INK,
        )  # fmt: skip


def _legend(axes, events: Sequence[Event], colours) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(facecolor=colour, edgecolor="white", label=name) for name, colour in colours.items()]
    for name, event in {e.name: e for e in events if e.kind == "reallocation"}.items():
        colour = colours.get(_target(event), COLOURS[-1])
        handles.append(Patch(facecolor="white", edgecolor=colour, hatch="/////", label=name.replace(" to ", " → ")))
    if handles:
        axes.figure.legend(
            handles=handles, loc="outside lower center", ncols=min(len(handles), 5), frameon=False,
            fontsize=9.5, labelcolor=INK, handlelength=2.2, handleheight=1.3, columnspacing=2.0,
        )  # fmt: skip


def _label(axes, renderer, event: Event, bar) -> None:
    """Writes the event's name into its bar, along or upright, in the largest size that fits; else nothing."""
    box = bar.get_window_extent(renderer)
    moves = event.kind == "reallocation"
    name = event.name.replace(" to ", " → ") if moves else event.name
    text = axes.text(
        bar.get_x() + bar.get_width() / 2,
        bar.get_y() + bar.get_height() / 2,
        name,
        ha="center",
        va="center",
        color=INK if moves else "white",
        fontweight="bold",
        zorder=5,
        clip_on=True,
    )
    if moves:
        text.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85})
    for rotation, size in itertools.product((0, 90), (10, 9, 8, 7)):
        text.set(rotation=rotation, fontsize=size)
        extent = text.get_window_extent(renderer)
        if extent.width + 6 <= box.width and extent.height + 2 <= box.height:
            return
    text.remove()
