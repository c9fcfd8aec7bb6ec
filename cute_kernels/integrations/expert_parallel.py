"""``ep_implementation="cute_kernels"``: transformers' expert parallelism with the bits of one rank.

    from cute_kernels.integrations import transformers as integration
    integration.register()
    model = AutoModelForCausalLM.from_pretrained(
        ..., experts_implementation="cute_kernels",
        distributed_config=DistributedConfig(
            fsdp_size=8, ep_size=8, ep_implementation="cute_kernels"))

transformers cuts the parameters and applies FSDP2; tokens travel by ``ck.moe.dispatch``.
"""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.distributed.expert_parallel import EPImplementation

from . import experts as integration


class ExpertParallel(EPImplementation):
    """Experts of a module, of which every rank of the expert group has a contiguous part.

    Where the ranks of a tensor-parallel group hold one batch, each takes consecutive tokens of it,
    so that an expert's rows are in the order of the batches.  Ranks compare sizes and dtypes in the
    first call of each module.
    """

    def __init__(self, module: torch.nn.Module, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh):
        super().__init__(module, ep_mesh, tp_mesh)
        self.module, self.verify = module, True

    def __call__(
        self,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Return the weighted sum of its experts for each token of this rank's batch."""
        inputs = hidden_states, top_k_index, top_k_weights
        if self.tp_mesh.size() > 1:
            inputs = tuple(self._slice(t) for t in inputs)
        out = integration.parallel_experts(
            self.module, *inputs, group=self.ep_mesh, verify=self.verify
        )
        self.verify = False
        return self._join(out, hidden_states) if self.tp_mesh.size() > 1 else out

    def _slice(self, t: torch.Tensor) -> torch.Tensor:
        """Take this rank's rows of a batch that its tensor-parallel group shares."""
        shared = DTensor.from_local(t, self.tp_mesh, [Replicate()], run_check=False)
        return shared.redistribute(placements=[Shard(0)]).to_local()

    def _join(self, rows: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
        """Gather the rows of a shared batch on every rank of its tensor-parallel group."""
        size = torch.Size((batch.shape[0], rows.shape[1]))
        stride = (rows.shape[1], 1)
        parts = DTensor.from_local(
            rows, self.tp_mesh, [Shard(0)], run_check=False, shape=size, stride=stride
        )
        return parts.full_tensor()
