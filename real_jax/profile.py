"""`python -m real_jax.profile`: measure the machine at hand and write it as a cluster file."""

import dataclasses
import sys
import time
from pathlib import Path

from real_jax import commandline


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """What to measure and where to write.

    Attributes:
      out: path of the cluster file to write; empty: tpu_gpu_configs/NAME.yaml.
      name: of the cluster; empty: the kind of its devices and their number.
      nodes: machines that the devices are on; 0: one for each process.
      overwrite: replace the file if it is there.
      cpu_devices: virtual devices on a machine without accelerators.
    """

    out: str = ""
    name: str = ""
    nodes: int = 0
    overwrite: bool = False
    cpu_devices: int = 8


def main(argv: list[str] | None = None) -> int:
    """The command. Exit status: 0 done, 1 failed, 2 wrong usage."""

    def body() -> None:
        import tyro

        text = "Measure the machine at hand and write it as a cluster file. Run it while nothing else computes."
        _profile(tyro.cli(ProfileOptions, prog="python -m real_jax.profile", description=text, args=argv))

    return commandline.run(body)


def _profile(options: ProfileOptions) -> None:
    if options.out:
        _check_out(options, Path(options.out))
    commandline.quiet_backends()
    import jax
    from rich.console import Console

    from real_jax.cost import measure
    from real_jax.runtime.meshes import devices, prepare_devices
    from real_jax.runtime.progress import PlanningProgress
    from real_jax.spec.cluster_file import cluster_text

    prepare_devices(options.cpu_devices)
    out = Path(options.out or Path("tpu_gpu_configs") / f"{options.name or measure.cluster_name(options.nodes)}.yaml")
    _check_out(options, out)
    console = Console(quiet=jax.process_index() > 0)
    console.print(f"Measuring {len(devices())} x {devices()[0].device_kind}.", highlight=False)
    progress, start = PlanningProgress(console), time.perf_counter()
    try:
        profile = measure.measure(
            lambda done, total, item: progress.progress("measuring", done, total, item),
            full=True,
            name=options.name,
            nodes=options.nodes,
        )
    finally:
        progress.close()
    for table in (timings_table(profile.timings), samples_table(profile)):
        console.print(table)
    if jax.process_index() == 0:
        out.parent.mkdir(parents=True, exist_ok=True)
        header = f"{profile.cluster.name}, as python -m real_jax.profile measured it."
        out.write_text(cluster_text(profile.cluster, profile.notes, header))
    console.print(
        f"Measured in {time.perf_counter() - start:.0f} s. File written: {out}", highlight=False, soft_wrap=True
    )


def _check_out(options: ProfileOptions, out: Path) -> None:
    from real_jax.spec.errors import UsageError

    commandline.check_writable(out, "--out")
    if out.exists() and not options.overwrite:
        raise UsageError(
            f"{str(out)!r} exists already. Add --overwrite to replace it, or give another file with --out."
        )


def timings_table(timings):
    """What single operations took, as a table (rich)."""
    from rich.table import Table

    table = Table(title="Single operations", title_justify="left")
    for column in ("operation", "size", "time", "rate"):
        table.add_column(column, justify="right" if column in ("time", "rate") else "left")
    last = ""
    for t in timings:
        if t.what != last:
            table.add_section()
        rate = f"{t.rate / 1e12:.3g} TFLOP/s" if t.what == "product" else f"{t.rate / 1e9:.3g} GB/s"
        table.add_row(t.what if t.what != last else "", t.shape, _seconds_text(t.seconds), rate)
        last = t.what
    return table


def samples_table(profile):
    """Layer programs: what they took, and what the cluster's numbers say of them, as a table (rich)."""
    from rich.table import Table

    from real_jax.cost.fit import predict

    table = Table(title="Layer programs, measured and as the file tells them", title_justify="left")
    for column in ("program", "measured", "by the file", "ratio"):
        table.add_column(column, justify="left" if column == "program" else "right")
    for sample in profile.samples:
        told = predict(sample, profile.cluster)
        ratio = f"{told / sample.seconds:.2f}"
        table.add_row(sample.name, _seconds_text(sample.seconds), _seconds_text(told), ratio)
    return table


def _seconds_text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} us"


if __name__ == "__main__":
    sys.exit(main())
