"""The command line: a thin skin over `omniplat.api`. Exit codes: 0 fine, 1 the answer is no, 2 usage or input."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from omniplat.cli.emulate import emulated_device, start_emulation, target_device
from omniplat.cli.output import report_error
from omniplat.errors import OmniplatError

app = typer.Typer(
    name="omniplat",
    help="Which kernel runs every quantized layer of a checkpoint, why, and running it.",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)

CheckpointArgument = Annotated[
    str, typer.Argument(metavar="CKPT", help="A checkpoint folder or file, or for `plan` a Hub id.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", metavar="D", help="kind, kind:arch, or the output of `info --json`.")
]
BackendOption = Annotated[str | None, typer.Option("--backend", help="Backend by name, instead of the device's.")]
ComponentOption = Annotated[str | None, typer.Option("--component", help="One component of a pipeline.")]
AllowOption = Annotated[
    list[str] | None,
    typer.Option("--allow", help="activation-change, requantize, dequantize, model-advice; may be repeated."),
]
PreferOption = Annotated[str | None, typer.Option("--prefer", help="memory (default) or speed.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def info(
    json_output: JsonOption = False,
    vllm: Annotated[bool, typer.Option("--vllm", help="Hooks that are active inside vLLM and vllm-omni.")] = False,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint", metavar="CKPT", help="With --vllm: who would run this checkpoint.")
    ] = None,
) -> None:
    """Devices, backends and versions; what failed to load, and why."""
    if vllm or checkpoint is not None:
        from omniplat.cli.vllm_info import vllm_info

        raise typer.Exit(vllm_info(checkpoint, json_output))
    from omniplat.cli.info import info as body

    raise typer.Exit(body(json_output))


@app.command()
def plan(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    device: DeviceOption = None,
    backend: BackendOption = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size.")] = 1,
    ep: Annotated[int, typer.Option("--ep", min=1, help="Expert-parallel size.")] = 1,
    component: ComponentOption = None,
    allow: AllowOption = None,
    prefer: PreferOption = None,
    engine: Annotated[str | None, typer.Option("--engine", help="vllm: also what its loader cannot deliver.")] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="Branch, tag or commit of a Hub id.")] = None,
    method: Annotated[
        str | None, typer.Option("--method", metavar="M", help="What is stored, as a check: another one is an error.")
    ] = None,
    show_all: Annotated[bool, typer.Option("--all", help="Every layer on its own line.")] = False,
    explain: Annotated[str | None, typer.Option("--explain", metavar="LAYER", help="One layer's whole story.")] = None,
    scan_scales: Annotated[
        bool, typer.Option("--scan-scales", help="Read the scales too: are they finite, how far do MX scales span.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Which kernel runs every layer, and why. Reads headers only."""
    from omniplat.cli.plan import plan_command

    code = plan_command(
        checkpoint, target_device(context, device), backend=backend, tp=tp, ep=ep, component=component,
        allow=allow or [], prefer=prefer, engine=engine, revision=revision, method=method, show_all=show_all,
        explain=explain, scan_scales=scan_scales, json_output=json_output,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def run(
    context: typer.Context,
    checkpoint: CheckpointArgument,
    device: DeviceOption = None,
    backend: BackendOption = None,
    reference: Annotated[
        Path | None, typer.Option("--reference", metavar="BF16_CKPT", help="The original, for fidelity.")
    ] = None,
    component: ComponentOption = None,
    allow: AllowOption = None,
    prefer: PreferOption = None,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Rows of the random input.")] = 32,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random input.")] = 0,
    json_output: JsonOption = False,
) -> None:
    """Load every quantized layer, run it, report fidelity and time."""
    from omniplat.cli.run import run_command

    code = run_command(
        checkpoint, target_device(context, device), backend=backend, reference=reference, component=component,
        allow=allow or [], prefer=prefer, tokens=tokens, seed=seed, json_output=json_output,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A quantized checkpoint folder.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A folder that does not exist yet.")],
    to: Annotated[str, typer.Option("--to", help="bf16 or f32: the dequantized checkpoint.")],
    json_output: JsonOption = False,
) -> None:
    """Write a checkpoint in another format, same names and shards."""
    from omniplat.cli.convert import convert_command

    raise typer.Exit(convert_command(source, destination, to, json_output=json_output))


@app.command()
def compare(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="A checkpoint, an image or a folder of images: the reference.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The same, to be held against A.")],
    component: ComponentOption = None,
    max_weight_error: Annotated[
        float | None, typer.Option("--max-weight-error", metavar="E", min=0, help="Largest relative L2 of a weight.")
    ] = None,
    min_psnr: Annotated[float | None, typer.Option("--min-psnr", metavar="DB", help="Least PSNR of an image.")] = None,
    min_ssim: Annotated[
        float | None, typer.Option("--min-ssim", metavar="S", help="Least structural similarity, at full size.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Two checkpoints weight by weight, or images by PSNR and SSIM at four scales."""
    from omniplat.cli.compare import compare_command

    code = compare_command(
        a, b, component=component, max_weight_error=max_weight_error, min_psnr=min_psnr, min_ssim=min_ssim,
        json_output=json_output,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def conformance(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="A backend; with --render also a report's file.")],
    profile: Annotated[str, typer.Option("--profile", metavar="P", help="full (default) or quick.")] = "full",
    report: Annotated[Path | None, typer.Option("--report", metavar="R.JSON", help="Write the report there.")] = None,
    known_failures: Annotated[
        Path | None, typer.Option("--known-failures", metavar="K.TOML", help="Failures that are known, with links.")
    ] = None,
    commit: Annotated[str, typer.Option("--commit", metavar="ID", help="The commit that the report is about.")] = "",
    render: Annotated[str | None, typer.Option("--render", metavar="F", help="text, markdown or junit.")] = None,
    allow_partial: Annotated[
        bool, typer.Option("--allow-partial", help="Exit code 0 also where something could not run here.")
    ] = False,
    select: Annotated[str | None, typer.Option("-k", metavar="EXPR", help="Only checks that match; partial.")] = None,
    jobs: Annotated[
        int, typer.Option("--jobs", "-j", metavar="N", min=1, help="Processes that share the checks (pytest-xdist).")
    ] = 1,
    json_output: JsonOption = False,
) -> None:
    """Run the conformance suite against a backend: what it declares it does, and nothing else."""
    from omniplat.cli.conformance import conformance_command

    code = conformance_command(
        name, profile=profile, report=report, known_failures=known_failures, commit=commit, render_as=render,
        allow_partial=allow_partial, select=select, jobs=jobs, emulated=emulated_device(context),
        json_output=json_output,
    )  # fmt: skip
    raise typer.Exit(code)


@app.command()
def matrix(
    device: DeviceOption = None,
    method: Annotated[
        str | None, typer.Option("--method", metavar="M", help="A weight scheme or its stem: nvfp4, fp8, 'int4-*'.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Which kernels run a method on a device, and whether that is declared, emulated, verified or failing."""
    from omniplat.cli.matrix import matrix_command

    raise typer.Exit(matrix_command(device, method, json_output=json_output))


@app.command("new-backend")
def new_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The backend's name, such as acme.")],
    directory: Annotated[
        Path | None, typer.Option("--directory", metavar="DIR", help="Where to; omniplat-NAME without it.")
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Write a package with a backend that works and passes the conformance suite."""
    from omniplat.cli.new_backend import new_backend_command

    raise typer.Exit(new_backend_command(name, directory, json_output=json_output))


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    emulate: Annotated[
        str | None,
        typer.Option("--emulate", metavar="D", help="plan, run, conformance: run a vendor's operators on the CPU."),
    ] = None,
) -> None:
    """Options of the program itself."""
    if version:
        from omniplat._version import __version__

        print(__version__)
        raise typer.Exit
    if emulate is not None:
        start_emulation(context, emulate)


def main() -> None:
    """Entry point of the `omniplat` script: every error of ours ends as one message and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        # names may hold what the terminal's encoding lacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        app()
    except OmniplatError as error:
        report_error(error, json_output="--json" in sys.argv)
        raise SystemExit(2) from None
    except BrokenPipeError:
        sys.stderr.close()
        raise SystemExit(0) from None
