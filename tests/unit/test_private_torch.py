"""Private API of torch is used in `_torch.py` only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import zero_infinity

PACKAGE = Path(zero_infinity.__file__).parent
WRAPPERS = PACKAGE / "_torch.py"
ROOTS = {"torch", "nn", "F", "dist"}
# Private attributes of torch's objects, which are met where a file does not say of what class an object is.
TENSOR = {"_cdata", "_version", "_base", "_grad", "_grad_fn", "_is_view", "_backward_hooks", "_weak_ref"}
TENSOR |= {"_post_accumulate_grad_hooks", "_make_subclass", "_make_wrapper_subclass", "_local_tensor", "_spec"}
GRAPH = {"_execution_engine", "_sequence_nr", "_input_metadata", "_register_hook_dict", "_raw_saved_self"}
MODULE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_call_impl", "_wrapped_call_impl"}
MODULE |= {"_forward_hooks", "_forward_pre_hooks", "_forward_hooks_always_called", "_backward_pre_hooks", "_apply"}
MODULE |= {"_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_named_members", "_slow_forward"}
MODULE |= {"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"}
MODULE |= {"_load_from_state_dict", "_save_to_state_dict", "_is_full_backward_hook", "_get_name", "_compiled_call_impl"}
OPTIMIZER = {"_opt_called", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks", "_hook_for_profile"}
OPTIMIZER |= {"_optimizer_state_dict_pre_hooks", "_optimizer_load_state_dict_pre_hooks", "_step_count"}
OTHER = {"_get_backend", "_timeout", "_VF", "_torchdynamo_disable", "_torchdynamo_disable_msg", "_dynamo"}
PRIVATE = TENSOR | GRAPH | MODULE | OPTIMIZER | OTHER


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def private_uses(source: str) -> list[str]:
    """The private API of torch that a module uses: `line: what`."""
    tree = ast.parse(source)
    roots = ROOTS | {name for node in ast.walk(tree) for name in names_from_torch(node)}
    slots = {id(part) for node in ast.walk(tree) if is_slots(node) for part in ast.walk(node)}
    uses = ((node, use) for node in ast.walk(tree) if id(node) not in slots for use in uses_of(node, roots))
    return [f"{node.lineno}: {use}" for node, use in sorted(uses, key=lambda found: found[0].lineno)]


def imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What is imported from torch, and the name that it gets."""
    if isinstance(node, ast.Import):
        names = [(alias.name, alias.asname or alias.name.partition(".")[0]) for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and not node.level:
        names = [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
    else:
        names = []
    yield from ((full, name) for full, name in names if full.partition(".")[0] == "torch")


def names_from_torch(node: ast.AST) -> Iterator[str]:
    yield from (name for _, name in imported(node))


def is_slots(node: ast.AST) -> bool:
    """The names of a class's own attributes are its own affair."""
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "__slots__" for t in node.targets)


def uses_of(node: ast.AST, roots: set[str]) -> Iterator[str]:
    yield from (f"import {full}" for full, _ in imported(node) if is_private(full))
    if isinstance(node, ast.Attribute) and is_private(node.attr):
        own = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
        if root_of(node) in roots or (node.attr in PRIVATE and not own):
            yield ast.unparse(node)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value in PRIVATE or node.value.startswith("torch._"):
            yield repr(node.value)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "setattr"):
        name = node.args[1]
        if root_of(node.args[0]) in roots and isinstance(name, ast.Constant) and is_private(str(name.value)):
            yield ast.unparse(node)


def root_of(node: ast.AST) -> str | None:
    """The name that a chain of attributes, calls and subscripts begins with."""
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute | ast.Subscript):
            node = node.value
        elif isinstance(node, ast.Call):
            node = node.func
        else:
            return None
    return node.id


def test_private_api_of_torch_is_used_in_one_file() -> None:
    found = [
        f"{path.relative_to(PACKAGE)}:{use}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != WRAPPERS
        for use in private_uses(path.read_text())
    ]
    assert not found, "private torch API outside of _torch.py; give it a wrapper there:\n" + "\n".join(found)


def test_the_wrappers_are_what_the_check_looks_for() -> None:
    assert len(private_uses(WRAPPERS.read_text())) > 30


@pytest.mark.parametrize(
    ("source", "use"),
    [
        ("import torch._dynamo", "import torch._dynamo"),
        ("from torch._C import Generator", "import torch._C.Generator"),
        ("from torch.utils import _pytree", "import torch.utils._pytree"),
        ("from torch.distributed.distributed_c10d import _get_default_group as f", "_get_default_group"),
        ("def f():\n    from torch._C import _autograd", "import torch._C._autograd"),
        ("torch._C.thing()", "torch._C"),
        ("nn.modules.batchnorm._NormBase", "_NormBase"),
        ("F._threshold(x)", "F._threshold"),
        ("dist.group.WORLD._anything", "_anything"),
        ("torch.ops.aten._grouped_mm", "_grouped_mm"),
        ("torch.empty(3)[0]._anything", "_anything"),
        ("from torch.optim import Adam\nAdam._anything", "Adam._anything"),
        ("import torch.library as lib\nlib._anything", "lib._anything"),
        ('getattr(torch.Tensor, "_anything")', "_anything"),
        ('sys.modules["torch._dynamo"]', "torch._dynamo"),
        ('module.__dict__["_call_impl"] = f', "_call_impl"),
        ("optimizer._opt_called = True", "_opt_called"),
        ("self.tensor._version", "_version"),
        *((f"x.{name}", name) for name in sorted(PRIVATE)),
    ],
)
def test_a_private_use_is_found(source: str, use: str) -> None:
    assert any(use in found for found in private_uses(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.__version__\ntorch.Tensor.data.__get__",
        "from torch.nn.utils import parametrize\nparametrize.is_parametrized(m)",
        'class A:\n    __slots__ = ("_version",)\n    def f(self):\n        return self._version',
        "from zero_infinity._torch import version_of",
        "import torchvision._C",
        "buffer._released",
        '"""A parameter\'s `_version`, and torch._C in a sentence."""',
    ],
)
def test_other_code_is_left_alone(source: str) -> None:
    assert private_uses(source) == []
