"""The `fp8pass` command and its subcommands: demo, inspect, plot, bisect, explain, env, machine."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch

from fp8pass.base.errors import Fp8Error, first_line
from fp8pass.base.versions import __version__
from fp8pass.compiler.not_compiled import missed
from fp8pass.gpu.here import written
from fp8pass.gpu.machine_file import to_json
from fp8pass.gpu.target import TARGETS
from fp8pass.inspect import demo, plots
from fp8pass.inspect.bisector import bisect
from fp8pass.inspect.demo_checks import Unusable
from fp8pass.inspect.environment import describe, figures
from fp8pass.inspect.explainer import explain
from fp8pass.inspect.import_path import built, named
from fp8pass.inspect.inspector import OPTIMIZERS, PEERS, inspect
from fp8pass.inspect.kernel_table import show, show_memory
from fp8pass.options.config import Config, make_config
from fp8pass.recipes import Recipe


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `fp8pass` command and return its exit status. argv: the arguments; None for those of the process."""
    parser = _Parser(prog="fp8pass", description="Train PyTorch models in FP8.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True)
    _add_demo(commands.add_parser("demo", help="train a small language model in BF16 and in FP8, side by side"))
    _add_inspect(commands.add_parser("inspect", help="the kernels, bytes and predicted time of a step on a GPU"))
    _add_plot(commands.add_parser("plot", help="draw what the numerics monitor has counted"))
    _add_bisect(commands.add_parser("bisect", help="which matmul, operand or pass makes a training step fail"))
    _add_explain(commands.add_parser("explain", help="what becomes of every matmul of a model, and why"))
    _add_env(commands.add_parser("env", help="torch, devices and what runs there: for a bug report"))
    _add_machine(
        commands.add_parser("machine", help="measure the GPU, and write its file for inspect and FP8PASS_MACHINE")
    )
    args = parser.parse_args(argv)
    status: int = args.run(args)
    return status


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line on stderr, with exit status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def _add_demo(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_demo)
    command.description = (
        "Train a small language model in BF16 and in FP8, side by side; on a CPU that can't multiply BF16, in float32 "
        "and in FP8. On several GPUs or processes: torchrun --nproc-per-node 8 --no-python fp8pass demo --device cuda."
    )
    command.add_argument(
        "--steps", type=_count, default=demo.STEPS, help="optimizer steps of each model (default: %(default)s)"
    )
    command.add_argument("--recipe", default="delayed", help="FP8 recipe (default: %(default)s)")
    command.add_argument("--device", default="cpu", help="torch device, cpu or cuda (default: %(default)s)")
    command.add_argument(
        "--out", type=Path, default=Path("fp8pass-demo"), help="folder for the plot (default: %(default)s)"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a number, 1 at least")
    return int(text)


def _demo(args: argparse.Namespace) -> int:
    try:
        return demo.main(args.steps, args.recipe, args.device, args.out)
    except Unusable as error:
        print(f"fp8pass demo: {error}", file=sys.stderr)
        return 2


def _add_env(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_env)
    command.description = "Print what fp8pass runs on, to paste into a bug report."


def _env(_: argparse.Namespace) -> int:
    print(describe())
    return 0


def _add_machine(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_machine)
    command.description = (
        "Measure a GPU, try which FP8 matmuls it has, and write a file of its figures: for fp8pass inspect --machine, "
        "and for FP8PASS_MACHINE."
    )
    command.add_argument("--device", type=int, default=0, help="number of the GPU (default: %(default)s)")
    command.add_argument("--seconds", type=_count, default=10, help="to measure for (default: %(default)s)")
    command.add_argument("--out", type=Path, default=Path("machine.json"), help="the file (default: %(default)s)")


def _machine(args: argparse.Namespace) -> int:
    if args.device >= (count := torch.cuda.device_count()):
        print(
            f"fp8pass machine: torch finds {count} GPUs here, and none is number {args.device}; for the published "
            f"figures of others: fp8pass inspect --target, one of {', '.join(TARGETS)}",
            file=sys.stderr,
        )
        return 2
    try:
        target = written(torch.device("cuda", args.device), args.seconds)
        args.out.write_text(to_json(target, indent=1) + "\n")
    except (RuntimeError, OSError) as error:
        print(f"fp8pass machine: {first_line(error)}", file=sys.stderr)
        return 2
    print(f"{args.out}: {figures(target)}")
    return 0


def _add_inspect(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_inspect)
    command.description = "Compile a model's training step for a GPU that need not be there. All times are predictions."
    command.add_argument("spec", metavar="module:factory", help="a callable that returns (model, *inputs)")
    command.add_argument("--target", default="h100", help="the GPU (default: %(default)s)")
    command.add_argument("--recipe", default="delayed", help="FP8 recipe (default: %(default)s)")
    command.add_argument("--compare", metavar="PEER", help=f"compile by {' or '.join(PEERS)} too, if installed")
    command.add_argument("--optimizer", metavar="NAME", help=f"compile its update too: one of {', '.join(OPTIMIZERS)}")
    command.add_argument("--ptx", action="store_true", help="compile every Triton kernel to machine code")
    command.add_argument("--machine", type=Path, help="file with a machine's measured speeds, instead of --target")
    command.add_argument("--json", type=Path, help="file to write everything to")


def _add_plot(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_plot)
    command.description = "Draw amax, scale, saturation, underflow and SQNR of quantized tensors over the steps."
    command.add_argument("rows", type=Path, help="file that fp8pass.stats(model).to_jsonl(path) wrote")
    command.add_argument("--slots", default="*", help="name pattern (default: %(default)s)")
    command.add_argument("--out", type=Path, default=Path("fp8pass-stats.png"), help="picture (default: %(default)s)")


def _plot(args: argparse.Namespace) -> int:
    try:
        drawn = plots.plot(plots.read(args.rows), args.out, args.slots)
    except ImportError:
        print("fp8pass plot needs matplotlib: pip install 'fp8pass[demo]'", file=sys.stderr)
        return 2
    except (Fp8Error, OSError) as error:
        print(f"fp8pass plot: {error}", file=sys.stderr)
        return 2
    print(f"{args.out}: {', '.join(drawn)}")
    return 0


def _add_bisect(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_bisect)
    command.description = (
        "Run a training step again and again, with fewer and fewer matmuls in FP8: see fp8pass.bisect. "
        "The exit status is 0 if the check passes as it is, 1 if it does not, 2 for errors."
    )
    command.add_argument("step", metavar="module:step", help="a callable without arguments, which trains some steps")
    command.add_argument(
        "check",
        metavar="module:check",
        nargs="?",
        help="takes the result, returns whether it is right (default: all is finite)",
    )
    command.add_argument("--max-runs", type=int, default=100, help="most runs (default: %(default)s)")


def _bisect(args: argparse.Namespace) -> int:
    progress = logging.getLogger("fp8pass.bisect")
    progress.addHandler(logging.StreamHandler(sys.stderr))
    progress.setLevel(logging.INFO)
    try:
        check = named(args.check) if args.check else None
        bisection = bisect(named(args.step), check, max_runs=args.max_runs)
    except (Fp8Error, ValueError) as error:
        print(f"fp8pass bisect: {error}", file=sys.stderr)
        return 2
    print(bisection)
    return int(bisection.verdict != "passes")


def _add_explain(command: argparse.ArgumentParser) -> None:
    command.set_defaults(run=_explain)
    command.description = (
        "Trace a model's forward and backward. The exit status is 1 if matmuls ran outside of compiled code, or if "
        "fp8pass itself failed and left out what the report lists; 2 if compilation failed."
    )
    command.add_argument("spec", metavar="module:factory", help="a callable that returns (model or function, *inputs)")
    command.add_argument("--recipe", help="FP8 recipe (default: delayed, or FP8PASS_RECIPE)")
    command.add_argument("--target", help="the GPU to decide for, if it isn't the one that the inputs are on")
    command.add_argument("--forward", action="store_true", help="without the backward")
    command.add_argument("--kernels", action="store_true", help="generate Inductor's code too, for --html")
    command.add_argument("--memory", action="store_true", help="predict a step's memory on the target (default: h100)")
    command.add_argument("--html", type=Path, help="file to write a page to: table, graphs, kernels")
    command.add_argument("--json", type=Path, help="file to write the table to")


def _explain(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in ("recipe", "target") if getattr(args, name) is not None}
    try:
        config = make_config(given)
        function, *inputs = built(args.spec)
        report, failure = explain(function, *inputs, backward=not args.forward, config=config, kernels=args.kernels), ""
    except (Fp8Error, ValueError) as error:
        if not isinstance(error, Fp8Error) or error.report is None:
            print(f"fp8pass explain: {error}", file=sys.stderr)
            return 2
        report, failure = error.report, str(error)
    report.show()
    if args.html is not None:
        report.to_html(args.html)
    if args.json is not None:
        args.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n")
    try:
        if args.memory and not failure:
            _show_memory(args.spec, config)
    except (Fp8Error, ValueError) as error:
        failure = f"the memory is not known: {error}"
    if failure:
        print(f"fp8pass explain: {failure}", file=sys.stderr)
        return 2
    if outside := missed(report.gemms):
        print(f"fp8pass explain: {len(outside)} matmuls ran outside of compiled code", file=sys.stderr)
    return int(bool(outside or report.faults))


def _show_memory(spec: str, config: Config) -> None:
    if not isinstance(config.recipe, Recipe):
        raise Fp8Error("there is no recipe: write --recipe delayed, for example")
    show_memory(inspect(spec, str(config.target or "h100"), config.recipe.name, peer=PEERS[0]))


def _inspect(args: argparse.Namespace) -> int:
    try:
        inspection = inspect(
            args.spec, args.target, args.recipe,
            peer=args.compare, optimizer=args.optimizer, ptx=args.ptx, machine=args.machine,
        )  # fmt: skip
    except (Fp8Error, ValueError) as error:
        print(f"fp8pass inspect: {error}", file=sys.stderr)
        return 2
    show(inspection)
    if args.json is not None:
        args.json.write_text(json.dumps(asdict(inspection), indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
