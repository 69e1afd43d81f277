"""Report for every matmul whether it runs in FP8, without training: `fp8pass.explain`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from fp8pass.base._torch import TorchDynamoException, dynamo_config
from fp8pass.base.errors import Fp8Error
from fp8pass.base.names import is_users_file, location_of
from fp8pass.compiler.not_compiled import Outside, raise_if_missed
from fp8pass.graph.verdict import Gemm
from fp8pass.inspect.explain_backend import GraphToDraw, explain_only
from fp8pass.options.config import Config, make_config
from fp8pass.report.graph_view import Drawing, draw
from fp8pass.report.report import Picture, Report, collect, publish


def explain(
    function: Callable[..., Any] | nn.Module,
    *args: Any,
    backward: bool = True,
    config: Config | None = None,
    kernels: bool = False,
    **kwargs: Any,
) -> Report:
    """Return the verdict on every matmul of `function(*args, **kwargs)`: see `fp8pass.report.report.Gemm`.

    Traces the forward and, with `backward`, the backward for the given inputs, as
    `torch.compile(..., backend="fp8pass")` does, but runs only the forward, in high precision: it computes no gradients
    and creates no FP8 state. Random state and buffers are restored afterwards. The report also lists graph breaks, and
    which frames Dynamo recompiled and why.

    Args:
        function: A function or a module.
        *args: Positional arguments of `function`.
        backward: Whether to trace the backward too.
        config: The configuration; by default the one that `make_config()` returns.
        kernels: Whether Inductor generates code for the tensors' device, which it does not compile, for
            `Report.to_html` to show.
        **kwargs: Keyword arguments of `function`.

    Returns:
        A `Report` with one `Gemm` per matmul.

    Raises:
        Fp8Error: If Dynamo, AOTAutograd or Inductor fails, or if fp8pass fails under `Config(strict=True)`. The message
            names the user's line if it is known. The error's cause is torch's error; its `report` holds the verdicts
            found until then.
        TypeError: If `function` is not callable, or `config` is not a `Config`.
    """
    if not callable(function):
        raise TypeError(
            f"explain() takes a module or a function, and then its arguments, not {type(function).__name__}"
        )
    if not isinstance(config, Config | None):
        raise TypeError(f"config is {config!r}: pass a fp8pass.Config, such as Config(recipe=...)")
    # torch.compile keeps a module in `_orig_mod` and a function in `_torchdynamo_orig_callable`: compile that one.
    function = getattr(function, "_orig_mod", getattr(function, "_torchdynamo_orig_callable", function))
    config = config or make_config()
    outside = Outside([x for x in (function, *args) if isinstance(x, nn.Module)])
    later: list[GraphToDraw] = []
    compiled = torch.compile(function, backend=explain_only(config, later, outside.path_of))
    report = Report()
    # At its recompile limit Dynamo runs a frame without compiling it, and its matmuls would have no verdict.
    recompiles = dynamo_config.patch(recompile_limit=1 << 16, accumulated_recompile_limit=1 << 16)
    try:
        with (
            draw(kernels) if kernels else nullcontext() as drawing,
            collect() as report,
            recompiles,
            torch.random.fork_rng(),
            _restored_buffers(function),
            torch.set_grad_enabled(backward),
        ):
            with outside.watching():
                compiled(*args, **kwargs)
            gemms = outside.gemms(config)
            # First, so that the report of an error of `strict` has them.
            publish(Report(gemms=gemms))
            if config.strict:
                raise_if_missed(gemms)
    except (Fp8Error, TorchDynamoException) as error:
        report.error = _told(error)
        report.pictures = _Pictures(drawing, later, report.gemms)
        raise _failure(report) from error
    finally:
        outside.forget()
    if not report.graphs:
        report.notes.append(
            "Dynamo compiled nothing: all matmuls ran op by op, for the reasons given"
            if report.gemms
            else "Dynamo compiled nothing: the function has no tensor operations, or compilation is disabled."
        )
    report.pictures = _Pictures(drawing, later, report.gemms)
    if isinstance(function, nn.Module):
        _name_sizes(report, function)
    return report


def _name_sizes(report: Report, model: nn.Module) -> None:
    """Write the names of the model's inputs for sizes of these, which Dynamo sees as `args` of a wrapper."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in inspect.signature(model.forward).parameters.values() if p.kind in kinds]

    def named(match: re.Match[str]) -> str:
        return names[int(match[1])] if int(match[1]) < len(names) else match[0]

    for g in report.gemms:
        g.sizes = tuple(replace(s, stands_for=re.sub(r"^args\[(\d+)\]", named, s.stands_for)) for s in g.sizes)


class _Pictures(Sequence[Picture]):
    """The pictures of a report, which are drawn when they are first looked at: that takes as long as the verdicts.

    drawing: of graphs that are drawn already, with the generated code; None if they are not.
    """

    def __init__(self, drawing: Drawing | None, later: Sequence[GraphToDraw], gemms: Sequence[Gemm]) -> None:
        self._later = list(later)
        self._gemms = gemms
        self._drawn = None if drawing is None else drawing.finish(gemms)

    def _all(self) -> list[Picture]:
        if self._drawn is None:
            with draw() as drawing:
                for graph in self._later:
                    graph.draw_later()
            self._drawn, self._later = drawing.finish(self._gemms), []
        return self._drawn

    def __getitem__(self, index: Any) -> Any:
        return self._all()[index]

    def __len__(self) -> int:
        return len(self._all())


@contextmanager
def _restored_buffers(function: object) -> Iterator[None]:
    """Restore the buffers of a module, the running means of a batch norm for example, on exit."""
    if not isinstance(function, nn.Module):
        yield
        return
    buffers = {name: b.clone() for name, b in function.named_buffers()}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, saved in buffers.items():
                function.get_buffer(name).copy_(saved)


def _failure(report: Report) -> Fp8Error:
    error = Fp8Error(f"{report.error}. Before the error: {report.summary()}; all is in this error's `report`")
    error.report = report
    return error


def _told(error: Exception) -> str:
    """Return an error's message in one line, with the user's line if it is known."""
    reason: BaseException = error
    # Dynamo raises what a backend raised as BackendCompilerFailed, with the error as its inner_exception.
    while isinstance(inner := getattr(reason, "inner_exception", None), Exception):
        reason = inner
    lines = [line.strip() for line in str(reason).splitlines()]
    said = next((line for line in lines if line), type(reason).__name__).rstrip(".")
    if isinstance(reason, Fp8Error):
        return said
    if isinstance(reason, TorchDynamoException) and (
        got := re.search(r"\bgot \w+\((['\"])(.+)\1\)$", str(reason), re.M)
    ):
        said += f": {got[2].rstrip('.')}"  # the op's own error: Dynamo quotes it as "got RuntimeError('...')"
    kind = "" if isinstance(reason, TorchDynamoException) else f"{type(reason).__name__}: "
    where = _place(str(error)) or _place(str(reason))
    return f"{kind}{said}" + (f", at {where}" if where else "")


def _place(text: str) -> str:
    """Return the last line of the user's code in an error's text, as "file.py:12"; "" if it has none."""
    frames = re.findall(r'File "([^"]+)", line (\d+)', text)
    users = [(file, int(line)) for file, line in frames if is_users_file(file)]
    return location_of(*users[-1]) if users else ""
