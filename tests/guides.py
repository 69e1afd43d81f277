"""Print what five public guides to FP8 describe, statement by statement, with what fp8pass does and what shows it.

    python -m tests.guides

Exits with 1 if a test, script or page that a row names does not exist. `docs/guides.md` has the printed tables.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
GUIDES = {
    "jax": "[JAX: training in FP8](https://docs.jax.dev/en/latest/notebooks/fp8.html)",
    "te": "[TransformerEngine: using FP8](https://docs.nvidia.com/deeplearning/transformer-engine/user-guide/examples/fp8_primer.html)",
    "scale_inv": "[TransformerEngine, pull request 1083: scale-inverse as part of the data](https://github.com/NVIDIA/TransformerEngine/pull/1083)",
    "msamp": "[MS-AMP, issue 99: optimizer and memory](https://github.com/Azure/MS-AMP/issues/99)",
    "titan": "[torchtitan: float8](https://github.com/pytorch/torchtitan/blob/main/docs/float8.md)",
}


@dataclass(frozen=True)
class Statement:
    """One statement of a guide. shown: tests (`file::function`), scripts, or sections of pages (`page#section`)."""

    guide: str
    says: str
    does: str
    shown: tuple[str, ...]


def _s(guide: str, says: str, does: str, *shown: str) -> Statement:
    return Statement(guide, says, does, shown)


STATEMENTS = (
    _s(
        "jax",
        "operands in FP8 are multiplied directly, with scales of 1",
        "any dot of FP8 operands, by the rules of XLA",
        "tests/passes/joint/test_xla_rules.py::test_case",
    ),
    _s(
        "jax",
        "e4m3 times e5m2 without promotion",
        'the default, `fp8_format="hybrid"`',
        "tests/states/test_state.py::test_formats",
    ),
    _s(
        "jax",
        "search the compiled text for FP8 calls, to see that they are there",
        "`explain` has a verdict on each matmul; `strict=True` raises for a missing one",
        "tests/inspect/test_explain.py::test_the_table",
        "tests/compiler/test_backend.py::test_strict_raises_for_what_was_chosen_and_can_not_be_had",
    ),
    _s(
        "jax",
        "scales by `amax / MAX` of the tensor itself, from calibration, or from an algorithm of the user's",
        '`"dynamic"`; `calibrate` and `StaticScaling`; `scaling_factor_compute_algo`, `register_recipe`',
        "tests/quant/test_static.py::test_the_scales_are_those_of_the_largest_values_seen",
        "tests/quant/test_own_recipes.py::test_a_scale_from_a_history_against_the_oracle",
        "tests/quant/test_own_recipes.py::test_names_are_valid_wherever_a_recipe_is",
    ),
    _s(
        "jax",
        "`in_qdq` and `out_qdq` with explicit scales and histories, whose new values come back as gradients",
        "`in_qdq` and `out_qdq` with a `ScaleState`, a module with buffers: graphs write it in place, so that a "
        "training loop needs no other gradients than those of parameters",
        "tests/states/test_scale_state.py::test_against_the_oracle",
    ),
    _s(
        "jax",
        "the first step has a scale of 1",
        "the first step is scaled by the tensor's own amax, so that it does not saturate",
        "tests/compiler/test_backend.py::test_step_0_is_scaled_dynamically",
    ),
    _s(
        "jax",
        "layers take `Fp8DotGeneralOp`, with variables for each layer",
        "every matmul of any module, with a slot for each tensor; nothing to insert",
        "tests/compiler/test_backend.py::test_every_form_of_matmul",
    ),
    _s(
        "jax",
        "the collection `_overwrite_with_gradient`, which `TrainState` and the optimizer do not touch",
        "`fp8pass.state(model)`, beside parameters and optimizer; a run resumes bit for bit",
        "tests/states/test_state.py::test_resuming_continues_bit_for_bit",
    ),
    _s(
        "jax",
        "a parameter that is used several times: scales merge by maximum, as values of the dtype `fp32_max_grad`",
        "all uses in a step merge by maximum; no dtype, since state is not a gradient",
        "tests/states/test_scale_state.py::test_uses_within_a_step_merge_by_max",
        "tests/compiler/test_backend.py::test_shared_weights_share_their_slot",
    ),
    _s(
        "jax",
        "its example: for 2 and 3, a scale of 1 and a history of [3, 0, ...], where a sum of gradients would be 2 and "
        "[5, 0, ...]",
        "the same values",
        "tests/states/test_scale_state.py::test_uses_within_a_step_merge_by_max",
    ),
    _s(
        "jax",
        "NVIDIA GPUs from Hopper on",
        "from sm_89 on; the same numbers on a CPU",
        "tests/passes/kernels/test_emulate_matmuls.py::test_the_numbers_are_those_of_the_op",
    ),
    _s(
        "te",
        "the formats E4M3, E5M2 and HYBRID",
        '`fp8_format="hybrid"` or `"e4m3"`; e5m2 alone is refused, since no GPU multiplies it by itself',
        "tests/states/test_state.py::test_formats",
    ),
    _s(
        "te",
        "matrix multiplies and convolutions in FP8",
        "matmuls, and the convolutions that are matmuls; others are listed with their share of the FLOPs",
        "tests/passes/dynamo/test_convolutions_as_matmuls.py::test_against_the_float64_oracle",
        "tests/passes/dynamo/test_convolutions_as_matmuls.py::test_the_report_has_both_shares",
    ),
    _s(
        "te",
        '`DelayedScaling(fp8_format, amax_history_len=16, amax_compute_algo="max")`',
        "the same names, also `margin` and callables",
        "tests/states/test_state.py::test_margin_and_history_of_gradients",
        "tests/states/test_state.py::test_a_callable_algorithm",
    ),
    _s(
        "te",
        "`MXFP8BlockScaling(fp8_format=...)`",
        "`MXFP8Scaling(fp8_format=...)`",
        "tests/passes/joint/test_blockwise_mm.py::test_rewritten_for_the_gpu_that_has_the_kernel",
    ),
    _s(
        "te",
        "MXFP8 quantizes both orientations from the original tensor",
        "the same",
        "tests/passes/joint/test_blockwise_mm.py::test_elsewhere_it_stays_a_matmul_of_the_same_values",
    ),
    _s(
        "te",
        "`fp8_autocast(enabled, fp8_recipe)`: a region at run time",
        "`fp8pass.autocast` and `fp8pass.enabled`; each setting is compiled once",
        "tests/options/test_autocast.py::test_each_setting_is_compiled_once",
        "tests/options/test_autocast.py::test_calls_in_high_precision_leave_no_trace",
    ),
    _s(
        "te",
        "one operator writes its FP8 output and the amax",
        "kernels that quantize do; kernels of matmuls do where that was measured to be faster",
        "tests/passes/kernels/test_fuse_matmuls.py::test_one_kernel_writes_fp8_in_both_orientations_and_an_amax_for_each_tile",
        "docs/fused-matmuls.md#when-it-pays",
    ),
    _s(
        "te",
        "both dimensions must be multiples of 16: pad by hand",
        "padded in the kernel that quantizes",
        "tests/passes/joint/test_layout.py::test_unaligned_sizes_are_padded_with_zeros_and_the_result_is_sliced_back",
    ),
    _s(
        "te",
        "amaxes are reduced among ranks; the backward follows the forward's precision, outside of the region",
        "one all-reduce in each step; the backward is compiled with the forward",
        "tests/distributed/test_amax_reduction.py::test_amaxes_are_reduced_over_the_group_or_mesh",
        "tests/options/test_autocast.py::test_a_backward_follows_its_forward",
    ),
    _s(
        "te",
        "modules with FP8 inside: LayerNormLinear, LayerNormMLP, attention",
        "the compiler fuses any norm or activation with the quantization after it; attention itself stays in high "
        "precision, since no backward in FP8 is known to be exact or faster",
        "tests/inspect/test_traffic.py::test_traffic_and_launches",
        "docs/limits.md#when-the-recipe-chooses",
    ),
    _s(
        "te",
        "`cast_to_representable`: on such values FP8 and high precision differ by accumulation only",
        "`fp8pass.cast_to_representable`",
        "tests/quant/test_representable.py::test_only_accumulation",
    ),
    _s(
        "scale_inv",
        "the inverse of the scale belongs to the data; the kernel with FP8 output writes it: cast, activation, norms",
        "one kernel computes the inverses of all scales of a graph at the beginning of a step, and each matmul reads "
        "its own: one launch for a whole model, instead of a store in each kernel",
        "tests/passes/kernels/test_materialize.py::test_graph_of_the_scales_of_a_step",
    ),
    _s(
        "scale_inv",
        "a GEMM with FP8 output has a small kernel after it that updates the scale",
        "no kernel after it: the scale is known before, and amaxes of all tiles end in the launch that all share",
        "tests/inspect/test_traffic.py::test_one_launch_ends_the_amaxes_of_two_layers",
    ),
    _s(
        "scale_inv",
        "scales of blocks may be large, and must travel with the data",
        "scales of rows and of blocks are gathered with their data",
        "tests/passes/joint/test_quantize_collectives_by_row.py::test_no_bit_changes",
    ),
    _s(
        "scale_inv",
        "overlap of communication (Userbuffers), attention",
        "async tensor parallel in FP8, by Inductor",
        "tests/distributed/test_async_tensor_parallel.py::test_one_op_with_the_collective",
    ),
    _s(
        "scale_inv",
        "overhead on the CPU: 20% of a forward for clones of scales",
        "no clones: a call adds the state's tensors to its inputs",
        "bench/host_overhead.py",
    ),
    _s(
        "scale_inv",
        "the ONNX op that quantizes takes the scale of quantization",
        "`export_onnx` writes QuantizeLinear with the reciprocal that ONNX defines",
        "tests/integrations/test_export_onnx.py::test_onnxruntime_computes_the_same",
    ),
    _s(
        "msamp",
        "kernels of the optimizer are not optimized yet",
        "the update is generated, and reads and writes everything once",
        "tests/inspect/test_traffic.py::test_a_weight_and_its_state_are_read_once_in_the_update",
    ),
    _s(
        "msamp",
        "update weights on the fly while the backward runs",
        "`update_in_backward`: bit for bit as after it",
        "tests/train/test_early_updates.py::test_same_numbers_and_fewer_gradients",
    ),
    _s(
        "msamp",
        "batch uneven updates by a threshold of bytes; CUDA graphs and streams",
        "`update_bucket_bytes`; small tensors share a launch; CUDA graphs",
        "tests/train/test_early_updates.py::test_same_numbers_and_fewer_gradients",
        "tests/passes/kernels/test_split_foreach.py::test_positions_of_small_tensors",
        "tests/compiler/test_cudagraphs.py::test_whole_steps_under_cuda_graphs_are_those_without",
    ),
    _s(
        "msamp",
        "a weight's scale from an upper bound of its next amax, for SGD and Adam",
        '`weight_amax="predicted"`, with a proved bound',
        "tests/weights/test_weight_bounds.py::test_ratio_of_moments",
        "tests/weights/test_weight_bounds.py::test_copies_have_the_scale_of_the_bound",
        "bench/weight_amax.py",
    ),
    _s(
        "msamp",
        "the amax of the new weight is computed for the next step",
        "by the kernel that updates it",
        "tests/inspect/test_traffic.py::test_a_weight_and_its_state_are_read_once_in_the_update",
    ),
    _s(
        "msamp",
        "`sqrt(v)` in e5m2, with its own scale and the margin formula",
        '`optimizer_state="fp8"`, rounded stochastically, since steps of 0.1% vanish otherwise; also e4m3, blocks, and '
        "COAT's expansion of the range",
        "tests/weights/test_stochastic_rounding.py::test_a_second_moment_follows_that_of_float32",
        "tests/weights/test_stochastic_rounding.py::test_to_nearest_it_stays_where_it_was",
        "docs/train-step.md#moments-in-fp8",
    ),
    _s(
        "msamp",
        "weights in FP8, master weights in float16 with a scale: memory",
        "bfloat16 parameters, rounded stochastically once in each update, beside FP8 copies: as many bytes, and no "
        "other type of parameter",
        "tests/weights/test_moments.py::test_bytes_per_parameter",
        "docs/memory.md#settings-and-others",
        "docs/memory.md#losses",
    ),
    _s(
        "msamp",
        "gradients in FP8, and their all-reduce",
        "gradients are exchanged in FP8 and summed in float32, under DDP and FSDP2; in memory they stay as they are, "
        "and `update_in_backward` frees them",
        "tests/distributed/test_fp8_gradients.py::test_the_error_is_within_its_bound",
        "tests/distributed/test_fp8_gradients.py::test_collectives_are_those_of_the_scales",
    ),
    _s(
        "msamp",
        "adapt the precision over the training",
        "`Schedule`, by step, module and matmul",
        "tests/states/test_state.py::test_a_schedule_resumes_before_a_phase_that_has_not_begun",
    ),
    _s(
        "titan",
        "tensorwise and rowwise scales, `rowwise_with_gw_hp`",
        '`"delayed"`, `"dynamic"`, `"rowwise"`, `"rowwise_gw_hp"`',
        "tests/compiler/test_backend.py::test_one_step_is_exact",
    ),
    _s(
        "titan",
        "`enable_fsdp_float8_all_gather`, and scales precomputed with one all-reduce",
        "`fp8pass.fsdp.enable_fp8_all_gather`; a `train_step` precomputes them",
        "tests/distributed/test_fsdp.py::test_weights_travel_as_bytes",
        "tests/distributed/test_fsdp.py::test_all_scales_of_weights_take_one_reduction",
    ),
    _s(
        "titan",
        "`filter_fqns`, `auto_filter_small_kn`",
        "name patterns; `min_speedup` by M, K, N and the GPU",
        "tests/options/test_config.py::test_filter_patterns",
        "tests/gpu/test_roofline.py::test_few_rows_do_not_pay_though_torchaos_filter_takes_them",
    ),
    _s(
        "titan",
        "`Float8LinearConverter.Config`, in the trainer's config",
        "`fp8pass.integrations.torchtitan.in_fp8(config)`, and `--fp8.<option>` on its command line",
        "tests/integrations/test_torchtitan.py::test_options_come_from_the_config_and_its_command_line",
    ),
    _s(
        "titan",
        "tensor parallel gathers in FP8; with rowwise scales in high precision",
        "in FP8 with all scales that travel",
        "tests/distributed/test_tensor_parallel.py::test_what_sequence_parallel_gathers_is_fp8",
        "tests/passes/joint/test_quantize_collectives_by_row.py::test_no_bit_changes",
    ),
    _s(
        "titan",
        "microbenchmarks by M, K, N on an H100",
        "predicted by a roofline fitted to published points; `bench/h200.py` measures them",
        "docs/roofline.md#error-against-published-measurements",
        "docs/measured.md",
    ),
)


def _missing(reference: str) -> str:
    """Return what is wrong with a reference; "" if it names a test, a file, or a section of a page."""
    path, _, name = reference.replace("::", "#").partition("#")
    file = ROOT / path
    if not file.exists():
        return f"{path} does not exist"
    if not name:
        return ""
    if file.suffix == ".md":
        heads = [_anchor(line) for line in file.read_text().splitlines() if line.startswith("#")]
        return "" if name in heads else f"{path} has no section #{name}"
    functions = {n.name for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.FunctionDef)}
    return "" if name in functions else f"{path} has no test {name}"


def _anchor(heading: str) -> str:
    kept = (c for c in heading.lstrip("#").strip().lower() if c.isalnum() or c in " -_")
    return "".join(kept).replace(" ", "-")


def missing() -> list[str]:
    """Return what is wrong with the references of all statements."""
    return [f"{s.says[:40]}: {wrong}" for s in STATEMENTS for r in s.shown if (wrong := _missing(r))]


def _link(reference: str) -> str:
    path, _, name = reference.replace("::", "#").partition("#")
    text = name if path.endswith(".py") and name else Path(path).name
    target = f"../{path}" if not path.startswith("docs/") else path.removeprefix("docs/")
    return f"[`{text}`]({target}{f'#{name}' if path.endswith('.md') and name else ''})"


def tables() -> str:
    """Return a table of the statements of each guide."""
    parts = []
    for guide, title in GUIDES.items():
        rows = [f"### {title}", "", "| it says | fp8pass | shown by |", "|---|---|---|"]
        own = (s for s in STATEMENTS if s.guide == guide)
        rows += [f"| {s.says} | {s.does} | {', '.join(map(_link, s.shown))} |" for s in own]
        parts.append("\n".join(rows))
    return "\n\n".join(parts)


def main() -> None:
    """Print the tables, or what is wrong with them."""
    if wrong := missing():
        sys.exit("\n".join(wrong))
    print(tables())


if __name__ == "__main__":
    main()
