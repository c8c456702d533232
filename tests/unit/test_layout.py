"""The layout of the package: a test file for every module, small files, few arguments, class names that stand once.

The lists are of what there was when the rules were made. They only shrink: an entry that is not needed any more fails.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[2]
SOURCE = PROJECT / "src" / "zero_infinity"
TESTS = PROJECT / "tests"

MAX_LINES = 450
MAX_ARGUMENTS = 8  # of __init__, besides self

# Modules without a test file at the mirrored path, and the file that tests them.
TESTED_ELSEWHERE: dict[str, str] = {
    "_torch.py": "unit/test_private_torch.py",
    "activations/activation_mover.py": "device/test_activations.py",
    "activations/device_activation_storage.py": "device/test_activations.py",
    "activations/activation_storage.py": "equivalence/test_activation_offload.py",
    "activations/recompute.py": "equivalence/test_activation_checkpointing.py",
    "api.py": "unit/test_public_api.py",
    "cli/bench.py": "cli/test_main.py",
    "cli/device_links.py": "device/test_bench_device.py",
    "cli/device_steps.py": "device/test_bench_device.py",
    "cli/exit_codes.py": "cli/test_main.py",
    "cli/export.py": "cli/test_train_checkpoints.py",
    "cli/generate_text.py": "cli/test_generate.py",
    "cli/plan.py": "cli/test_plan_command.py",
    "cli/plan_arguments.py": "cli/test_plan_command.py",
    "cli/plan_page.py": "page/test_plan_page.py",
    "cli/ranks.py": "cli/test_train_ranks.py",
    "cli/report_data.py": "cli/test_report.py",
    "cli/train_loop.py": "cli/test_train.py",
    "cli/train_output.py": "cli/test_train_workload.py",
    "cli/train_summary.py": "cli/test_train.py",
    "comm/lost_rank.py": "unit/comm/test_channel.py",
    "comm/transport.py": "multirank/test_survivors.py",
    "deferred_init.py": "equivalence/test_deferred_init.py",
    "meta_init.py": "equivalence/test_meta_device.py",
    "params/shared_edits.py": "scenarios/test_edits.py",
    "disable_modes.py": "equivalence/test_unusual_torch_features.py",
    "engine.py": "equivalence/test_models.py",
    "engine_builder.py": "equivalence/test_models.py",
    "engine_parts.py": "equivalence/test_models.py",
    "integrations/log_figures.py": "integrations/test_transformers.py",
    "integrations/pretrained_folder.py": "integrations/test_transformers.py",
    "interrupts.py": "faults/test_training_faults.py",
    "model_layout.py": "memory/test_budget.py",
    "models/hugging_face_config.py": "cli/test_hugging_face_shape.py",
    "optim/foreign_training.py": "equivalence/test_foreign_training.py",
    "optim/gradient_collectives.py": "multirank/test_options_over_ranks.py",
    "optim/gradient_flow.py": "equivalence/test_training_loops.py",
    "optim/gradient_parts.py": "equivalence/test_training_loops.py",
    "optim/make_training.py": "equivalence/test_models.py",
    "optim/optimizer_state_dict.py": "equivalence/test_optimizers.py",
    "optim/optimizer_state_io.py": "equivalence/test_optimizers.py",
    "optim/accumulated_gradients.py": "equivalence/test_training_loops.py",
    "optim/reduced_gradients.py": "scenarios/test_different_control_flow.py",
    "optim/sharded_gradients.py": "multirank/test_options_over_ranks.py",
    "optim/retained_gradient.py": "equivalence/test_training_loops.py",
    "optim/user_gradients.py": "equivalence/test_training_loops.py",
    "optim/training_observer.py": "equivalence/test_trace_of_a_run.py",
    "optim/training_step.py": "equivalence/test_training_loops.py",
    "optim/chunk_update.py": "equivalence/test_optimizers.py",
    "params/dtensor.py": "multirank/test_tensor_parallel.py",
    "params/dynamo.py": "equivalence/test_whole_model_operations.py",
    "params/environment.py": "multirank/test_models_over_ranks.py",
    "params/module_hooks.py": "equivalence/test_modules_of_torch.py",
    "params/offloaded_param.py": "equivalence/test_parameter_operations.py",
    "params/parameter_store.py": "equivalence/test_deferred_init.py",
    "params/precision.py": "equivalence/test_precision.py",
    "params/state_dict.py": "equivalence/test_whole_model_operations.py",
    "params/stream_weights.py": "integrations/test_trl.py",
    "params/uncopied_hook.py": "equivalence/test_whole_model_operations.py",
    "params/unshard.py": "equivalence/test_parameter_operations.py",
    "optim/flat_gradient.py": "device/test_transfers.py",
    "params/changing_buffers.py": "equivalence/test_activation_checkpointing.py",
    "params/forward_again.py": "device/test_device_room.py",
    "params/model_device.py": "device/test_device_choice.py",
    "tiers/compute_device.py": "equivalence/test_accelerator.py",
    "tiers/device_room.py": "device/test_device_room.py",
    "tiers/others_peak.py": "device/test_device_room.py",
    "tiers/emulated_accelerator.py": "equivalence/test_accelerator.py",
    "tiers/unit_gather.py": "unit/tiers/test_copier.py",
    "tiers/link.py": "device/test_activations.py",
    "tiers/pinned_ring.py": "device/test_transfers.py",
    "tiers/torch_accelerator.py": "device/test_transfers.py",
    "tiling/attach_tiles.py": "equivalence/test_tiling.py",
    "tiling/lazy_logits.py": "equivalence/test_tiling.py",
    "tiling/materialize.py": "equivalence/test_tiling.py",
    "tiling/tiled_init.py": "equivalence/test_deferred_init_in_tiles.py",
    "tiling/tiled_ops.py": "equivalence/test_tiling.py",
}
LONG_FILES: set[str] = set()
MANY_ARGUMENTS: set[str] = set()
SAME_NAMES: set[str] = set()


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, by its path in it."""
    paths = sorted(SOURCE.rglob("*.py"))
    return {str(path.relative_to(SOURCE)): ast.parse(path.read_text()) for path in paths}


def mirrored(module: str) -> Path:
    """Where the test of a module is: commands are tested by real invocations, integrations with the real packages."""
    path = Path(module)
    mirrored = path.with_name(f"test_{path.name}")
    return TESTS / mirrored if path.parts[0] in ("cli", "integrations") else TESTS / "unit" / mirrored


def classes() -> Iterator[tuple[str, ast.ClassDef]]:
    for module, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                yield module, node


def is_shorter(found: set[str], listed: set[str], what: str) -> None:
    """Nothing is found that is not listed, and nothing listed that is not found."""
    assert not found - listed, f"{what}: {sorted(found - listed)}"
    assert not listed - found, f"no longer needed in the list: {sorted(listed - found)}"


def test_every_module_has_a_test_file_at_its_path() -> None:
    missing = {
        module for module in modules() if not Path(module).name.startswith("__") and not mirrored(module).exists()
    }
    is_shorter(missing, set(TESTED_ELSEWHERE), "modules without a test file")


@pytest.mark.parametrize("module", TESTED_ELSEWHERE)
def test_what_is_tested_elsewhere_is_tested_there(module: str) -> None:
    assert (TESTS / TESTED_ELSEWHERE[module]).exists()


def test_no_file_is_long() -> None:
    long = {module for module in modules() if len((SOURCE / module).read_text().splitlines()) > MAX_LINES}
    is_shorter(long, LONG_FILES, f"files of more than {MAX_LINES} lines")


def test_no_constructor_takes_many_arguments() -> None:
    many = set()
    for _, node in classes():
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name == "__init__":
                arguments = method.args
                count = len(arguments.posonlyargs) + len(arguments.args) + len(arguments.kwonlyargs) - 1
                if count > MAX_ARGUMENTS and node.name != "Config":
                    many.add(node.name)
    is_shorter(many, MANY_ARGUMENTS, f"classes whose __init__ has more than {MAX_ARGUMENTS} arguments")


def test_a_public_class_name_stands_once() -> None:
    places = defaultdict(list)
    for module, node in classes():
        if not node.name.startswith("_"):
            places[node.name].append(module)
    twice = {name for name, found in places.items() if len(found) > 1}
    is_shorter(twice, SAME_NAMES, "class names that stand more than once")


def test_a_test_file_has_a_name_of_its_own() -> None:
    """Where folders are no packages, pytest and processes that tests start know a file by its name alone."""
    places = defaultdict(list)
    for path in sorted(TESTS.rglob("*.py")):
        if not (path.parent / "__init__.py").exists() and path.name != "conftest.py":
            places[path.name].append(str(path.relative_to(TESTS)))
    assert not [found for found in places.values() if len(found) > 1]
