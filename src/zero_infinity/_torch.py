"""Every use of torch's private API, one named wrapper each.

Owns the knowledge of torch's internals: no other module of the package names a private attribute, function or module of
torch (`tests/unit/test_private_torch.py` checks it). It knows nothing of this library.

A wrapper says why the public API is not enough, and with which torch versions the tests were run. On a hot path it is
an alias of the C function.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn, overrides
from torch._C import _autograd
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._subclasses import fake_tensor
from torch.distributed.distributed_c10d import Store, _get_process_group_store
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer
from torch.utils import _pytree
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

_Optimizer = TypeVar("_Optimizer", bound=Optimizer)

# ---------------------------------------------------------------------- torch functions, modes, transforms

# Context: no `__torch_function__` of a tensor subclass is called. torch's guide to extending names this class, and no
# public one. torch 2.13.
no_torch_function = torch._C.DisableTorchFunctionSubclass

# Context: no torch.func transform (vmap, grad) applies. torch.func has no way to leave one. torch 2.13.
no_func_transforms = temporarily_clear_interpreter_stack

# Context: no torch function or dispatch mode (FakeTensorMode, a default device) applies. Public modes can be entered,
# but not left. torch 2.13.
no_modes = _disable_current_modes

# True for a tensor inside of a torch.func transform, which has no storage to look at. torch 2.13.
is_func_tensor: Callable[[torch.Tensor], bool] = is_functorch_wrapped_tensor


def inside_func_transform() -> bool:
    """True inside of a torch.func transform. torch.func does not tell. torch 2.13."""
    return peek_interpreter_stack() is not None


def inside_mode() -> bool:
    """True if a torch function or dispatch mode is active. The public API has no such question. torch 2.13."""
    return bool(torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack())


def inside_dispatch_mode() -> bool:
    """True if a dispatch mode is active, which applies to one thread. No public equivalent. torch 2.13."""
    return bool(torch._C._len_torch_dispatch_stack())


def change_function_modes(change: Callable[[list[Any]], list[Any]]) -> None:
    """Replace this thread's stack of torch function modes, the bottom first, as `set_default_device` does for its own
    mode. In public a mode is a context, which must be left in order. torch 2.13."""
    modes = [overrides._pop_mode() for _ in range(torch._C._len_torch_function_stack())]
    for mode in change(modes[::-1]):
        overrides._push_mode(mode)


# The function that `nn.Module._apply` calls before it replaces a parameter's data: an offloaded parameter sees in its
# `__torch_function__` that it is about to be converted. torch 2.13.
HAS_COMPATIBLE_TYPE: Callable[..., bool] = torch._has_compatible_shallow_copy_type

# Exchanges what two tensors hold. `torch.utils.swap_tensors` refuses a tensor that has weak references. torch 2.13.
swap_tensor_impl: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl

# Names of private getters, setters and methods of a tensor that read or write no element. Code of torch calls them on
# any parameter, so an offloaded one has to answer. torch 2.13.
METADATA_GETTERS = ("_version", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "_grad", "_grad_fn")
METADATA_SETTERS = ("_backward_hooks",)
METADATA_METHODS = ("_is_view",)

# ---------------------------------------------------------------------- autograd

# The number of the backward that this thread is in, -1 outside of any. Autograd tells nobody in public. torch 2.13.
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id

# True if the backward that runs was called with retain_graph=True. torch 2.13.
keeps_graph: Callable[[], bool] = _autograd._get_current_graph_task_keep_graph

# Whether the backward that runs will execute this node; a RuntimeError in torch.autograd.grad for a leaf. `autograd.
# Function` has `needs_input_grad`, which does not depend on the backward. torch 2.13.
will_execute_node: Callable[[Any], bool] = torch._C._will_engine_execute_node


def call_after_backward(callback: Callable[[], None]) -> None:
    """Call it when the backward that runs has ended: public hooks belong to one tensor or node. torch 2.13."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def sequence_number(node: Any) -> int:
    """Numbers an autograd node in the order in which nodes were made. No public equivalent. torch 2.13."""
    number: int = node._sequence_nr()
    return number


# Saved-tensor hooks. The public `saved_tensors_hooks` pushes and pops as well, but tells nobody what is on top, and we
# call whoever was there before. A module's forward hooks push and pop in different calls, so a context does not do.
# All in torch 2.13.
push_saved_tensor_hooks: Callable[[Callable[..., Any], Callable[..., Any]], None] = (
    _autograd._push_saved_tensors_default_hooks
)
pop_saved_tensor_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks
saved_tensor_hooks_allowed: Callable[[], bool] = _autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]


def top_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The pack and unpack hook on top, also while hooks are being traced. torch 2.13."""
    top: tuple[Callable[..., Any], Callable[..., Any]] | None = _autograd._top_saved_tensors_default_hooks(True)
    return top


# ---------------------------------------------------------------------- tensors and storages


def version_of(tensor: torch.Tensor) -> int:
    """The number of in-place changes that autograd knows of; in public it can only be increased. torch 2.13."""
    return tensor._version


def root_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that a view is a view of, the tensor itself if it is no view. No public equivalent. torch 2.13."""
    base = tensor._base
    return tensor if base is None else base


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """True if a hook is registered on its gradient. In public hooks can only be added. torch 2.13."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def gradient_hooks(tensor: torch.Tensor) -> tuple[int, int]:
    """How many hooks there are on its gradient: called before it is accumulated, and after that. torch 2.13."""
    return len(tensor._backward_hooks or ()), len(tensor._post_accumulate_grad_hooks or ())


def storage_id(storage: torch.UntypedStorage) -> int:
    """The address of the C++ storage: tells storages apart, also empty ones and those without memory. torch 2.13."""
    address: int = storage._cdata
    return address


def num_storage_uses(tensor: torch.Tensor) -> int:
    """How many references there are to its storage, from C++ and Python. No public equivalent. torch 2.13."""
    uses: int = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return uses


# The tensor as a view that is negated when it is read. In public only `conj().imag` makes such a view. torch 2.13.
negated_view: Callable[[torch.Tensor], torch.Tensor] = torch._neg_view


def without_storage(
    kind: type[torch.Tensor],
    shape: torch.Size,
    *,
    dtype: torch.dtype,
    device: torch.device,
    strides: tuple[int, ...] | None = None,
    offset: int | None = None,
) -> torch.Tensor:
    """A tensor of a subclass with a shape and no memory, as torch's guide to `__torch_dispatch__` does. torch 2.13."""
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        kind, shape, strides=strides, storage_offset=offset, dtype=dtype, device=device
    )
    return made


def of_class(kind: type[torch.Tensor], values: torch.Tensor) -> torch.Tensor:
    """A tensor of a subclass that has these values, as `nn.Parameter` makes itself, whatever arguments the class
    takes. torch 2.13."""
    return torch.Tensor._make_subclass(kind, values, False)


# True for a tensor subclass that is made of other tensors, which torch.compile asks, too. torch 2.13.
is_wrapper_subclass: Callable[[torch.Tensor], bool] = is_traceable_wrapper_subclass

_DISPATCH_KEYS = (torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set())


def outside_dispatch() -> AbstractContextManager[None]:
    """Inside, tensors are as ordinary code sees them, also in a `__torch_dispatch__`, below autograd, where torch
    counts no versions and makes no views that know what they are views of. No public equivalent. torch 2.13."""
    guard: AbstractContextManager[None] = torch._C._ForceDispatchKeyGuard(*_DISPATCH_KEYS)
    return guard


def order_of_norms(tensors: list[torch.Tensor]) -> list[int]:
    """The order in which `clip_grad_norm_` adds up the norms of these gradients. It decides about the last bit of the
    sum, and torch does not offer the sum alone. torch 2.13."""
    with_none: list[torch.Tensor | None] = list(tensors)
    groups = torch._C._group_tensors_by_device_and_dtype([with_none], True)
    return [number for _, numbers in groups.values() for number in numbers]


# Flatten and restore nested lists, tuples and dicts, also those that others registered. torch 2.13 has no public one.
tree_flatten = _pytree.tree_flatten
tree_unflatten = _pytree.tree_unflatten
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map

# ---------------------------------------------------------------------- DTensors


def local_tensor(dtensor: Any) -> torch.Tensor:
    """This rank's part. `to_local()` makes a view, with autograd, that is another tensor. torch 2.13."""
    local: torch.Tensor = dtensor._local_tensor
    return local


def set_local_tensor(dtensor: Any, local: torch.Tensor) -> None:
    """Replace this rank's part in place: `from_local` makes another DTensor. torch 2.13."""
    dtensor._local_tensor = local


def spec_of(dtensor: Any) -> Any:
    """Mesh, placements and shape in one object, to make another DTensor like it. torch 2.13."""
    return dtensor._spec


def dtensor_around(local: torch.Tensor, spec: Any) -> torch.Tensor:
    """A DTensor with this local part. `from_local` goes through autograd and works out the spec again. torch 2.13."""
    from torch.distributed.tensor import DTensor

    return DTensor(local, spec, requires_grad=False)


# ---------------------------------------------------------------------- modules

# The base class of batch norms and instance norms; the public ones have no other in common. torch 2.13.
NormWithStatistics = _NormBase


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """The module's table of buffers, to exchange one and put it back. Assigning an attribute calls `__setattr__` of
    the user's class and the hooks of `register_module_buffer_registration_hook`. torch 2.13."""
    return module._buffers


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The module's own buffers that a state_dict has. `named_buffers` also yields the others. torch 2.13."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def state_dict_pre_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """The hooks that were registered. In public they can only be added. torch 2.13."""
    return list(module._state_dict_pre_hooks.values())


def call_of(module: nn.Module) -> Callable[..., Any]:
    """What `module(...)` runs: forward and all hooks. torch 2.13."""
    call: Callable[..., Any] = module._call_impl
    return call


def own_call(module: nn.Module) -> Callable[..., Any] | None:
    """What `replace_call` has put on this module. torch 2.13."""
    return module.__dict__.get("_call_impl")


def reset_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Undo a `replace_call`, before which `own_call` was this. torch 2.13."""
    if call is None:
        module.__dict__.pop("_call_impl", None)
    else:
        module.__dict__["_call_impl"] = call


def replace_call(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let `module(...)` run this, hooks included: public hooks run before and after forward, not around it, and
    `__call__` is looked up on the class. torch 2.13."""
    module.__dict__["_call_impl"] = call


# ---------------------------------------------------------------------- optimizers


def copy_without_step_hooks(optimizer: _Optimizer) -> _Optimizer:
    """A shallow copy that calls none of the user's step hooks. In public they can only be added. torch 2.13.

    `copy.copy` would leave out what a class keeps on itself beside defaults, groups and states.
    """
    copied = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.__dict__.pop("step", None)  # a scheduler has wrapped the original's
    copied._optimizer_step_pre_hooks = OrderedDict()
    copied._optimizer_step_post_hooks = OrderedDict()
    return copied


def plain_step(kind: type[Optimizer]) -> Callable[..., Any]:
    """The `step` of an optimizer class without torch's wrapper for profiling and hooks, which takes 60 us a call.
    torch marks a wrapped one as `hooked`. torch 2.13."""
    step: Callable[..., Any] = kind.step
    return getattr(step, "__wrapped__", step) if getattr(step, "hooked", None) else step


def share_step_hooks(optimizer: Optimizer, other: Optimizer) -> None:
    """A step of `other` calls the step hooks of both, also later ones. In public they can only be added. torch 2.13."""
    other._optimizer_step_pre_hooks = optimizer._optimizer_step_pre_hooks
    other._optimizer_step_post_hooks = optimizer._optimizer_step_post_hooks


def state_dict_hooks(optimizer: Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """The hooks to call before and after `state_dict()`. torch 2.13 has no way to call them without making one."""
    before, after = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    return list(before.values()), list(after.values())


def mark_stepped(optimizer: Optimizer) -> None:
    """Tell a learning-rate scheduler that this optimizer has stepped; otherwise it warns. torch 2.13."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- torch.compile


def dynamo_disable() -> Callable[..., Any] | None:
    """`torch._dynamo.disable` if the compiler is loaded. `torch.compiler.disable` would load it (seconds). torch 2.13.

    None also while the compiler is being imported.
    """
    return getattr(sys.modules.get("torch._dynamo"), "disable", None)


def mark_not_compiled(function: Any, reason: str) -> None:
    """Mark a function as `torch.compiler.disable` does, without loading the compiler. torch 2.13."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason


def compile_lock() -> Any:
    """The lock that a thread holds while it compiles; None if the compiler is not loaded. torch 2.13."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "compile_lock", None)


def libtorch_path() -> str:
    """The extension module, by which symbols of the libraries that torch was linked with are found. torch 2.13."""
    return torch._C.__file__


# ---------------------------------------------------------------------- process groups


def store_of(group: dist.ProcessGroup) -> Store:
    """The store that a process group was made with. In public only one who made it has it. torch 2.13."""
    return _get_process_group_store(group)


def timeout_of(group: dist.ProcessGroup, device: torch.device) -> timedelta:
    """The timeout that a group was made with, of its backend for `device`. In public it can only be set. A
    RuntimeError or AttributeError if the group has no such backend. torch 2.13."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def cpu_backend_of(group: dist.ProcessGroup) -> Any:
    """What a group exchanges tensors of the CPU with; None if it cannot. No public equivalent. torch 2.13."""
    try:
        return group._get_backend(torch.device("cpu"))
    except RuntimeError:
        return None


# ---------------------------------------------------------------------- tensors without memory, counted operations

# A mode in which tensors have shapes and no values. torch exports it nowhere in public. torch 2.13.
FakeTensorMode = fake_tensor.FakeTensorMode
# What operations raise in it that need values. torch 2.13.
NEEDS_VALUES = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedOperatorException,
)
# Where the mode logs the operations that led to an error. torch 2.13.
FAKE_TENSOR_LOGGER = fake_tensor.__name__


def flops_by_operator(attention: Callable[..., int], experts: Callable[..., int]) -> dict[Any, Any]:
    """For `FlopCounterMode(custom_mapping=...)`: the operators behind `scaled_dot_product_attention` on the CPU and
    `grouped_mm`, which it does not know in torch 2.13. The counter sees operators, of which these are private."""
    aten = torch.ops.aten
    return {aten._scaled_dot_product_flash_attention_for_cpu: attention, aten._grouped_mm: experts}
