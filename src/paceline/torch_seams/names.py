"""The table of torch's private names: each with its use here, and the public way if torch has one.

Each part of the table lists the names used in the file of that name in this folder. The table is plain data
without torch, so that all names can be checked at once: `tests/torch_seams/test_names.py` lists the names
that a torch lacks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TorchName:
    """A name of torch that Paceline uses although torch does not document it.

    Args:
        path: dotted, beginning with `torch`; the alternatives of different versions are separated by " or ".
        use: its purpose here.
        public: the public way, and why it is not sufficient; "" if there is none.
        fallback: what happens without it. A torch that lacks a name without fallback is refused.
    """

    path: str
    use: str
    public: str = ""
    fallback: str = ""

    @property
    def paths(self) -> list[str]:
        """The alternatives."""
        return self.path.split(" or ")


_C10D = "torch.distributed.distributed_c10d"
_DYNAMIC = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
_ITERATOR = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"
_NODES = "torch._C._functions"
_FSDP = "torch.distributed.fsdp._fully_shard"
_SHARED = "torch.distributed.fsdp._common_utils"
_COMPOSABLE = "torch.distributed._composable.checkpoint_activation"
_PL449 = "dp_shard is refused with PL449; other layouts work"
_ALL_ROUNDS = "a restart meets at a store of its own"
_ONE_STATE = "rounds are kept in an etcd, a folder or a store, and nodes beat there"

# Autograd nodes that only view, copy or cut their input: no value changes.
VIEW_NODES = (
    "AliasBackward0",
    "CloneBackward0",
    "ExpandBackward0",
    "PermuteBackward0",
    "ReshapeAliasBackward0",
    "SelectBackward0",
    "SliceBackward0",
    "SplitBackward0",
    "SplitWithSizesBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "SqueezeBackward2",
    "TBackward0",
    "ToCopyBackward0",
    "TransposeBackward0",
    "UnbindBackward0",
    "UnsafeViewBackward0",
    "UnsqueezeBackward0",
    "ViewAsComplexBackward0",
    "ViewAsRealBackward0",
    "ViewBackward0",
)

NAMES: dict[str, tuple[TorchName, ...]] = {
    "autograd": (*(TorchName(f"{_NODES}.{kind}", "verify recognises views by it") for kind in VIEW_NODES),),
    "recomputing": (
        TorchName(
            "torch.utils.checkpoint._checkpoint_without_reentrant_generator",
            "a forward that runs again draws the dropout masks of the first",
            "context_fn= belongs to the code that calls checkpoint",
        ),
        TorchName(f"{_COMPOSABLE}._checkpoint_without_reentrant_generator", "as above, its own reference"),
        TorchName(
            f"{_COMPOSABLE}.checkpoint",
            "recomputes a block in backward under the same parameter names",
            "checkpoint_wrapper changes the names of parameters",
        ),
    ),
    "devices": (TorchName("torch.cuda._is_in_bad_fork", "names a fork that has lost CUDA"),),
    "dispatch": (
        TorchName("torch.utils._python_dispatch.TorchDispatchMode", "sees every operation"),
        TorchName("torch.utils._python_dispatch._disable_current_modes", "hides operations from modes"),
        TorchName("torch._C._len_torch_dispatch_stack", "finds whether a mode is active"),
        TorchName("torch._C.DisableTorchFunction", "hides operations from function modes"),
        TorchName("torch._C._EnableTorchFunction", "shows them to a mode inside of such a context again"),
        TorchName("torch.overrides._get_current_function_mode", "leaves a mode while the model runs"),
        TorchName("torch._ops.OpOverload._schema", "finds what an operation draws and writes"),
    ),
    "elastic": (
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._bootstrap_store_info", _ALL_ROUNDS),
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._shared_tcp_store_server", _ALL_ROUNDS),
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._op_executor", _ONE_STATE),
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._get_store", _ALL_ROUNDS),
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._create_tcp_store_server", _ALL_ROUNDS),
        TorchName(f"{_DYNAMIC}._RendezvousState", _ONE_STATE),
        TorchName(f"{_DYNAMIC}._RendezvousStateHolder", _ONE_STATE),
        TorchName(f"{_DYNAMIC}._DistributedRendezvousOpExecutor", _ONE_STATE),
        TorchName(f"{_DYNAMIC}._DistributedRendezvousOpExecutor._state", _ONE_STATE),
        TorchName(f"{_DYNAMIC}._DistributedRendezvousOpExecutor._state_holder", _ONE_STATE),
        TorchName(f"{_DYNAMIC}._Action", _ONE_STATE),
        TorchName(
            "torch.distributed.elastic.multiprocessing.api.get_subprocess_handler",
            "ranks are started by a process that has imported torch",
        ),
        TorchName(f"{_AGENT}._rendezvous", "a rendezvous that comes short of --nnodes is refused"),
        TorchName(f"{_AGENT}._start_workers", "the launcher counts rounds"),
        TorchName(f"{_AGENT}._monitor_workers", "the launcher can be asked to stop"),
        TorchName(f"{_AGENT}._restart_workers", "a restart kills what is left of a round"),
        TorchName(f"{_AGENT}._stop_workers", "a restart kills what is left of a round"),
        TorchName(f"{_AGENT}._remaining_restarts", "the launcher reports how many restarts are left"),
    ),
    "fake": (
        TorchName("torch._subclasses.fake_tensor.FakeTensor", "recognises tensors without numbers"),
        TorchName("torch._subclasses.fake_tensor.FakeTensorMode", "runs a model for its shapes, to plan tp"),
    ),
    # `check_torch` in fsdp.py checks a sharded model again, and raises PL449.
    "fsdp": (
        TorchName(f"{_FSDP}._fsdp_api.AllGather", "gathers parameters through our buffers", "", _PL449),
        TorchName(f"{_FSDP}._fsdp_api.ReduceScatter", "sums gradients in the exact order", "", _PL449),
        TorchName("torch.distributed.fsdp.FSDPModule._get_fsdp_state", "reaches the records", "", _PL449),
        TorchName(f"{_FSDP}._fsdp_state.FSDPState._pre_forward", "shards a skipped block", "", _PL449),
        TorchName(f"{_FSDP}._fsdp_state.FSDPState._post_forward", "shards a skipped block", "", _PL449),
        TorchName(f"{_FSDP}._fsdp_state.FSDPState._pre_backward", "begins a block's backward", "", _PL449),
        TorchName(
            f"{_FSDP}._fsdp_state.FSDPState._register_pre_backward_hook",
            "begins backward in the order of one process",
            "",
            _PL449,
        ),
        TorchName(
            f"{_FSDP}._fsdp_param_group.FSDPParamGroup._register_post_backward_hook",
            "ends backward in the order of one process",
            "",
            _PL449,
        ),
        TorchName(
            f"{_SHARED}.collect_grad_tensors or {_SHARED}",
            "finds tensors in data classes, from torch 2.13 on",
            "",
            "data classes are passed over, as by torch",
        ),
        TorchName(
            f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups or "
            f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_group",
            "reaches the records of a module",
            "",
            _PL449,
        ),
        *(
            TorchName(f"{_FSDP}._fsdp_param_group.FSDPParamGroup.{name}", "acts before sums", "", _PL449)
            for name in ("fsdp_params", "post_backward", "reduce_grads")
        ),
        *(
            TorchName(f"{_FSDP}._fsdp_param.FSDPParam.{name}", "finds and clears parts", "", _PL449)
            for name in (
                "sharded_param",
                "padded_sharded_param_size",
                "unsharded_accumulated_grad",
                "_unsharded_param",
            )
        ),
    ),
    "groups": (
        TorchName(f"{_C10D}._world", "c10d's record of the groups of this process"),
        TorchName(f"{_C10D}._get_default_store", "ranks compare notes there without a collective"),
        TorchName(
            f"{_C10D}._World.group_count",
            "a start after one that failed names its groups like the other ranks",
        ),
        TorchName(
            "torch.distributed.device_mesh.DeviceMesh._flatten",
            "sums over several axes at once by one group",
        ),
    ),
    "loader": (
        TorchName(
            "torch.utils.data._utils.worker._worker_info",
            "shows a data set that cuts itself up by get_worker_info all of its samples",
        ),
        TorchName("torch.utils.data.DataLoader._iterator", "ends persistent workers"),
        TorchName(f"{_ITERATOR}._shutdown_workers", "ends workers before the loader is collected"),
        TorchName(f"{_ITERATOR}._workers", "has workers killed that ignore SIGTERM"),
    ),
    "meeting": (
        TorchName(
            "torch.distributed.rendezvous._create_c10d_store",
            "a script's own MASTER_PORT is served by its rank 0",
            "TORCHELASTIC_USE_AGENT_STORE, which counts for every port",
            "a script that sets MASTER_PORT waits until the watch reports PL810",
        ),
    ),
    "modules": (
        TorchName(
            "torch.nn.Module._parameters",
            "cuts parameters where they are kept, tied ones under each name",
            "named_parameters leaves out None, and setattr calls a module's own __setattr__",
        ),
        TorchName("torch.nn.Module._buffers", "as _parameters"),
        TorchName(
            "torch.nn.Module._apply",
            "converts a model to fp64, complex tensors to complex128",
            "Module.to and Module.double, which make complex tensors real or leave them as they are",
        ),
        TorchName("torch.nn.Module._modules", "distinguishes what a module keeps from a user's attributes"),
        TorchName(
            "torch.nn.Module._forward_pre_hooks",
            "dropout's hooks carry names, so that they are found again on copies of a model",
            "register_forward_pre_hook gives a handle that a copy of the module lacks",
        ),
        TorchName("torch.nn.Module._forward_hooks", "as _forward_pre_hooks"),
        TorchName("torch.nn.Module._forward_hooks_always_called", "as _forward_pre_hooks"),
        TorchName("torch.nn.Module._backward_pre_hooks", "lists a user's hooks"),
        TorchName("torch.nn.Module._backward_hooks", "as _backward_pre_hooks"),
        TorchName("torch.nn.Module._call_impl", "compiles a module's hooks too"),
        TorchName(
            "torch.nn.Module._compiled_call_impl",
            "compiles a module in place",
            "compile() passes over the frames of torch.nn's own classes",
        ),
        TorchName("torch.nn.modules.batchnorm._BatchNorm", "finds BatchNorm of any number of dimensions"),
        TorchName("torch.nn.modules.batchnorm._NormBase", "finds layers with running statistics"),
        TorchName("torch.nn.modules.dropout._DropoutNd", "finds torch's dropouts of any kind"),
        TorchName("torch.nn.init._no_grad_trunc_normal_", "records a draw of unknown length as one call"),
        TorchName(
            "torch.nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
            "experts differ between the replicas of the rest",
        ),
    ),
    "operators": (
        TorchName("torch._C._nn.scaled_dot_product_attention", "tells torch's attention from a user's"),
        TorchName("torch.ops.aten._grouped_mm", "runs experts for their shapes, to plan tp"),
        TorchName("torch._VF", "replaces dropout where torch's functionals look it up"),
        *(
            TorchName(f"torch._C._VariableFunctions.{name}", "draws dropout as torch does")
            for n in ("dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout")
            for name in (n, f"{n}_")
        ),
        TorchName(
            "torch._foreach_norm",
            "measures norms by one kernel",
            "torch.nn.utils.get_total_norm gives only the norm of all",
        ),
        TorchName("torch._foreach_add_", "adds by one kernel"),
        TorchName("torch._foreach_mul_", "multiplies by one kernel"),
        TorchName("torch._fused_sdp_choice", "finds out whether a kernel takes shared heads"),
        TorchName("torch.ops.aten._safe_softmax", "gives attention with masks the bits of torch's"),
        TorchName("torch._C._get_math_sdp_allow_fp16_bf16_reduction", "as _safe_softmax"),
    ),
    "profiling": (
        TorchName(
            "torch._C._profiler._ExperimentalConfig",
            "stops the profiler without building objects of all events",
            "torch.profiler takes it as an argument, and gives no other way to make one",
            "the last recorded step takes seconds longer",
        ),
        TorchName(
            "torch.autograd._profiler_enabled",
            "finds a script that runs torch's profiler itself",
            "",
            "its profiler and Paceline's end each other",
        ),
        TorchName(
            "torch.autograd.profiler._enable_profiler",
            "records annotations and collectives without operators",
            "torch.profiler, which has no argument for scopes",
            "all operators are recorded",
        ),
        TorchName(
            "torch._C._profiler.RecordScope",
            "records annotations and collectives without operators",
            "",
            "all operators are recorded",
        ),
        TorchName(
            "torch._C._distributed_c10d.Work.wait",
            "notes when a rank waits for a collective",
            "",
            "waits inside of a forward count as computation",
        ),
        TorchName(
            "torch.distributed._functional_collectives.wait_tensor",
            "notes when a rank waits for a collective",
            "",
            "waits inside of a forward count as computation",
        ),
    ),
    "saved": (
        TorchName(
            "torch.autograd.graph.Node._sequence_nr",
            "finds the module of what autograd has saved",
            "",
            "activations are not listed by module",
        ),
        TorchName(
            "torch.autograd.graph.Node._input_metadata",
            "finds the sizes of results that nothing saves",
            "",
            "a step's peak is estimated from what is saved",
        ),
        TorchName(
            "torch._C._functions.AddmmBackward0._saved_mat1",
            "sums what autograd has saved",
            "torch.autograd.graph.saved_tensors_hooks, which slow down every forward",
            "activations are not found",
        ),
        TorchName(
            "torch.distributed.tensor.DTensor._local_tensor",
            "finds the memory of a rank's part",
            "to_local, which autograd records",
            "parts are not counted",
        ),
        *(
            TorchName(
                f"{_FSDP}._fsdp_param.FSDPParam.{name}",
                "finds the module of a gathered parameter",
                "",
                "activations of sharded models are not listed by module",
            )
            for name in ("_module_info", "_unsharded_param")
        ),
        *(
            TorchName(f"torch.nn.Module.{name}", "names modules that may be under construction")
            for name in ("_parameters", "_buffers", "_modules")
        ),
    ),
    "starting": (
        TorchName("torch._logging._internal._init_logs", "applies TORCH_LOGS to a process that is warm"),
        TorchName(
            "torch.numa.binding._maybe_wrap_command_args_with_numa_binding",
            "follows --numa-binding as torchrun does",
        ),
    ),
    "tensors": (
        TorchName("torch.Tensor._version", "finds writes in place"),
        TorchName("torch.Tensor._base", "finds views"),
        TorchName("torch.UntypedStorage._cdata", "identifies a storage", "data_ptr is 0 on meta"),
        TorchName("torch.Tensor._backward_hooks", "moves hooks to the part of a parameter"),
        TorchName("torch.Tensor._post_accumulate_grad_hooks", "finds hooks that a layout would change"),
    ),
    "trees": tuple(
        TorchName(
            f"torch.utils._pytree.{name}",
            "walks batches, outputs and states of any form",
            "none: torch.utils has no public pytrees, and torch's own modules use these",
        )
        for name in (
            "TreeSpec",
            "keystr",
            "tree_flatten",
            "tree_flatten_with_path",
            "tree_iter",
            "tree_leaves",
            "tree_map",
            "tree_map_only",
            "tree_map_with_path",
            "tree_unflatten",
        )
    ),
    "watching": (
        TorchName(f"{_C10D}._world", "lists the groups of a rank", "", "groups are not named"),
        *(
            TorchName(f"{_C10D}._World.{name}", "lists the groups of a rank", "", "groups are not named")
            for name in ("pg_map", "pg_names", "pg_group_ranks", "default_pg", "group_count")
        ),
        TorchName(
            f"{_FSDP}._fsdp_param_group.FSDPParamGroup._with_fqn",
            "names the module of a collective of FSDP",
            "",
            "modules are not named",
        ),
        TorchName(
            "torch.distributed.pipelining.schedules._PipelineSchedule._n_microbatches",
            "compares the numbers of microbatches of ranks",
            "",
            "they are not compared",
        ),
        TorchName(
            "torch._C._distributed_c10d.ProcessGroup",
            "notes collectives that the Flight Recorder leaves out",
            "torch.distributed.ProcessGroup, which needs an import that the script may never make",
            "root ranks, operations, sends and receives are not compared",
        ),
        TorchName(
            "torch._C._distributed_c10d._dump_fr_trace",
            "reads the Flight Recorder",
            "",
            "collectives of gloo are not seen",
        ),
        TorchName(
            "torch._C._distributed_c10d._dump_nccl_trace or torch._C._distributed_c10d._dump_fr_trace",
            "reads the Flight Recorder of NCCL, in builds that have it",
            "",
            "collectives of NCCL are not seen",
        ),
        TorchName("torch._inductor", "is not imported by the recorder", "", "a reading takes seconds"),
        *(
            TorchName(
                f"torch._C._dynamo.eval_frame.{name}",
                "keeps the compiler out of the watch's functions",
                "torch.compiler.disable, which imports the compiler",
                "they are compiled as frames of their own",
            )
            for name in ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")
        ),
        *(
            TorchName(path, "looks at gradients after backward", "", "no rank is named for a gradient")
            for path in (
                "torch.autograd.Variable._execution_engine",
                "torch._C._current_graph_task_id",
            )
        ),
        TorchName("torch.Tensor._values", "reads sparse gradients", "", "sparse gradients are not read"),
    ),
    "observing": (
        *(
            TorchName(path, "compares what ranks train with and on", "", "mistakes in these are not found")
            for path in (
                "torch.nn.parallel.DistributedDataParallel._pre_forward",
                "torch.nn.parallel.DistributedDataParallel._module_parameters",
                "torch.nn.parallel.DistributedDataParallel._comm_hooks",
                "torch.nn.parallel.DistributedDataParallel.require_forward_param_sync",
                "torch.utils.data.dataloader._BaseDataLoaderIter",
                "torch.serialization._open_zipfile_writer_file",
                "torch.serialization._open_file",
                "torch.distributed.ProcessGroup._get_sequence_number_for_group",
                "torch.Tensor._backward_hooks",
                "torch._C._functions.NllLossBackward0._saved_reduction",
            )
        ),
    ),
}
