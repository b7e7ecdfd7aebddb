"""Test aid inside vLLM's workers: the two variable-size collectives that its CPU build lacks, over gloo.

Mixture-of-experts models over data parallel ranks need them. Loaded by ``--worker-extension-cls moe_patch.Ext``.
"""

import torch
import torch.distributed as dist
from vllm.distributed.device_communicators import base_device_communicator as communicators


def _gather(self, tensor, sizes):
    sizes = sizes or [tensor.shape[0]] * self.world_size
    padded = tensor.new_zeros((max(sizes), *tensor.shape[1:]))
    padded[: tensor.shape[0]] = tensor
    parts = [torch.empty_like(padded) for _ in range(self.world_size)]
    dist.all_gather(parts, padded.contiguous(), group=self.device_group)
    return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def all_gatherv(self, input_, dim=0, sizes=None):
    """Gather tensors of different lengths from all ranks."""
    if isinstance(input_, list):
        return [_gather(self, tensor, sizes) for tensor in input_]
    return _gather(self, input_, sizes)


def reduce_scatterv(self, input_, dim=-1, sizes=None):
    """Sum over the ranks and keep this rank's rows."""
    total = input_.float()
    dist.all_reduce(total, group=self.device_group)
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    rank = dist.get_rank(self.device_group)
    first = sum(sizes[:rank])
    return total[first : first + sizes[rank]].to(input_.dtype)


for kind in [communicators.DeviceCommunicatorBase, *communicators.DeviceCommunicatorBase.__subclasses__()]:
    kind.all_gatherv = all_gatherv
    kind.reduce_scatterv = reduce_scatterv


class Ext:
    """What vLLM mixes into its worker class; loading this module was the point."""
