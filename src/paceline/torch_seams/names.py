"""The table of torch's private names: each with its use here, and the public way where torch has one.

A part of the table is what the file of that name in this folder touches. It is plain data without torch, so
that all of it can be looked up at once: `tests/torch_seams/test_names.py` lists what a torch lacks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TorchName:
    """A name of torch's that Paceline uses although torch does not document it.

    Args:
        path: dotted, from `torch` on; alternatives that different versions have are divided by " or ".
        use: what it is used for.
        public: the public way, and why it does not do; "" where there is none.
        fallback: what happens without it. Names that have none are refused when they are missing.
    """

    path: str
    use: str
    public: str = ""
    fallback: str = ""

    @property
    def paths(self) -> list[str]:
        """Each alternative."""
        return self.path.split(" or ")


_C10D = "torch.distributed.distributed_c10d"
_DYNAMIC = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent"
_NODES = "torch._C._functions"
_ALL_ROUNDS = "a restart meets at a store of its own"

# Nodes of autograd that only view, copy or cut their input: no value changes.
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
    "ViewBackward0",
)

NAMES: dict[str, tuple[TorchName, ...]] = {
    "autograd": (*(TorchName(f"{_NODES}.{kind}", "verify recognises views by it") for kind in VIEW_NODES),),
    "elastic": (
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._bootstrap_store_info", _ALL_ROUNDS),
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._shared_tcp_store_server", _ALL_ROUNDS),
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._state_holder", "clocks of nodes may differ"),
        TorchName(f"{_DYNAMIC}.DynamicRendezvousHandler._op_executor", "clocks of nodes may differ"),
        TorchName(f"{_DYNAMIC}._DistributedRendezvousOpExecutor._state_holder", "clocks of nodes may differ"),
        TorchName(f"{_DYNAMIC}._BackendRendezvousStateHolder._backend", "clocks of nodes may differ"),
        TorchName(f"{_DYNAMIC}._BackendRendezvousStateHolder._settings", "clocks of nodes may differ"),
        TorchName(f"{_DYNAMIC}._BackendRendezvousStateHolder._state", "clocks of nodes may differ"),
        TorchName(f"{_DYNAMIC}._BackendRendezvousStateHolder._sanitize", "clocks of nodes may differ"),
        TorchName(f"{_AGENT}._rendezvous", "a rendezvous that comes short of --nnodes is refused"),
        TorchName(f"{_AGENT}._start_workers", "the launcher counts rounds"),
        TorchName(f"{_AGENT}._monitor_workers", "the launcher can be asked to stop"),
        TorchName(f"{_AGENT}._restart_workers", "a restart kills what is left of a round"),
        TorchName(f"{_AGENT}._stop_workers", "a restart kills what is left of a round"),
        TorchName(f"{_AGENT}._remaining_restarts", "the launcher reports how many restarts are left"),
    ),
    "groups": (
        TorchName(f"{_C10D}._world", "c10d's record of the groups of this process"),
        TorchName(
            f"{_C10D}._World.group_count",
            "a start after one that failed names its groups like the other ranks",
        ),
    ),
    "modules": (
        TorchName(
            "torch.nn.Module._forward_pre_hooks",
            "dropout's hooks carry names, so that they are found again on copies of a model",
            "register_forward_pre_hook gives a handle that a copy of the module lacks",
        ),
        TorchName("torch.nn.Module._forward_hooks", "as _forward_pre_hooks"),
        TorchName("torch.nn.Module._forward_hooks_always_called", "as _forward_pre_hooks"),
    ),
    "scaling": (
        TorchName(
            "torch.amp.GradScaler._scale",
            "a first step without a microbatch has no scale yet",
            "get_scale gives the initial scale then",
        ),
        TorchName(
            "torch.amp.GradScaler._per_optimizer_states",
            "all ranks scale by one finding, that of the global norm",
            "unscale_ looks at this rank's gradients only",
        ),
    ),
    "tensors": (
        TorchName(
            "torch.Tensor._reduce_ex_internal",
            "pickling is told by its frame, so that a recorded tensor is refused and not read",
        ),
    ),
}
