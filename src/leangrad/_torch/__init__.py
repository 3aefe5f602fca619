"""Every private torch name that leangrad uses, each in one small function with a plain fallback.

Nothing outside this folder may touch a name of torch that starts with an underscore and is not documented, but for
those of [Note: names that are used in place]. A name that a torch release drops makes leangrad plainer, never wrong:
the fallback is always the answer that promises less.

[Note: names that are used in place]
The ledger reads a few private names of tensors and nodes for every saved tensor, thousands of times in a step, where a
call of Python more would be felt. `ledger/` uses these where it needs them:

    tensor._version, tensor._base, tensor._is_view()
    node._sequence_nr(), node._saved_<name>, node._raw_saved_<name>

Their check is `ledger_names_present`: if one of them is gone no region opens, and lean models run plain.

tensors, autograd, checkpoints, dispatch, modules, modes, settings, cuda      by subject
compiler      torch.compile: what the compiled engine asks of AOTAutograd and Inductor; it is not imported here
present       whether this torch has all of these names
"""

from leangrad._torch.autograd import (
    HOOK_NODE,
    after_backward,
    backward_elsewhere,
    convolution_settings,
    engine_reaches,
    graph_is_kept,
    graph_task,
    has_tensor_hooks,
    hook_of,
    innermost_pack_hook,
    keeps_output,
    next_sequence_nr,
    node_class,
    only_saves_on_cpu,
    output_facts,
    output_nbytes,
    outputs_nbytes,
    packed,
    passed_no_hook,
    saved_tensor_hooks,
    saved_tensor_hooks_active,
    saved_tensor_hooks_allowed,
)
from leangrad._torch.checkpoints import (
    CHECKPOINTS,
    checkpoint_frame,
    copy_unseen,
    is_checkpoint,
    is_checkpointing,
    is_recomputation,
    is_selective,
    reentrant_checkpoint,
    unseen,
)
from leangrad._torch.cuda import compile_kernel, current_device, is_capturing, raw_stream
from leangrad._torch.dispatch import DispatchMode, missing_dispatch_names, schema, storage_address, strided_parts
from leangrad._torch.modes import (
    autocast_may_be_on,
    dispatch_modes_active,
    forward_mode_active,
    is_profiling,
    is_traced,
    is_watched,
    muted_kineto,
    no_override,
    peak_bytes,
    transforms_active,
)
from leangrad._torch.modules import (
    bare_modules,
    forward_pre_hooks,
    has_global_hooks,
    has_hooks,
    has_hooks_of_others,
    is_sharded,
    norm_tensors,
    registries,
    remove_forward_hooks,
)
from leangrad._torch.present import ledger_names_present, private_names
from leangrad._torch.settings import changed_settings, failed_allocations, product_settings
from leangrad._torch.tensors import (
    called_through_c,
    direct,
    fused_rms_norm,
    fused_rms_norm_backward,
    has_memory,
    is_number,
    is_python_evaluating,
    is_view,
    mutates,
    norms,
    reference_counts,
    scale_,
    softmax_backward,
    storage_holders,
    storage_is_shared,
    tensor_without_memory,
    version,
    versions,
    without_batches,
)

__all__ = [
    "CHECKPOINTS",
    "HOOK_NODE",
    "DispatchMode",
    "after_backward",
    "autocast_may_be_on",
    "backward_elsewhere",
    "bare_modules",
    "called_through_c",
    "changed_settings",
    "checkpoint_frame",
    "compile_kernel",
    "convolution_settings",
    "copy_unseen",
    "current_device",
    "direct",
    "dispatch_modes_active",
    "engine_reaches",
    "failed_allocations",
    "forward_mode_active",
    "forward_pre_hooks",
    "fused_rms_norm",
    "fused_rms_norm_backward",
    "graph_is_kept",
    "graph_task",
    "has_global_hooks",
    "has_hooks",
    "has_hooks_of_others",
    "has_memory",
    "has_tensor_hooks",
    "hook_of",
    "innermost_pack_hook",
    "is_capturing",
    "is_checkpoint",
    "is_checkpointing",
    "is_number",
    "is_profiling",
    "is_python_evaluating",
    "is_recomputation",
    "is_selective",
    "is_sharded",
    "is_traced",
    "is_view",
    "is_watched",
    "keeps_output",
    "ledger_names_present",
    "missing_dispatch_names",
    "mutates",
    "muted_kineto",
    "next_sequence_nr",
    "no_override",
    "node_class",
    "norm_tensors",
    "norms",
    "only_saves_on_cpu",
    "output_facts",
    "output_nbytes",
    "outputs_nbytes",
    "packed",
    "passed_no_hook",
    "peak_bytes",
    "private_names",
    "product_settings",
    "raw_stream",
    "reentrant_checkpoint",
    "reference_counts",
    "registries",
    "remove_forward_hooks",
    "saved_tensor_hooks",
    "saved_tensor_hooks_active",
    "saved_tensor_hooks_allowed",
    "scale_",
    "schema",
    "softmax_backward",
    "storage_address",
    "storage_holders",
    "storage_is_shared",
    "strided_parts",
    "tensor_without_memory",
    "transforms_active",
    "unseen",
    "version",
    "versions",
    "without_batches",
]
