"""Folders of checkpoints that are not those of the model, and what is loaded of them."""

from __future__ import annotations

import torch.distributed as dist
from safetensors.torch import save_file

from cute_kernels.model.parallel import load
from tests.model.parallel import cases


def checkpoint(change: dict):
    """A call that loads a checkpoint of a config with other settings."""

    def call(meshes: dict) -> None:
        folder = cases.shared_folder()
        if dist.get_rank() == 0:
            net = cases.model("llama")
            net.save_pretrained(folder)
            for name, value in change.items():
                setattr(net.config, name, value)
            net.config.save_pretrained(folder)
        dist.barrier()
        load.from_pretrained(folder, mesh=meshes[2])

    return call


def with_tensors(change: dict):
    """A call that loads a checkpoint, some tensors of which are others: name -> function of it."""

    def call(meshes: dict) -> None:
        folder = cases.shared_folder()
        if dist.get_rank() == 0:
            net = cases.model("llama")
            net.config.save_pretrained(folder)
            tensors = net.state_dict()
            tensors |= {name: function(tensors) for name, function in change.items()}
            save_file(tensors, folder / "model.safetensors")
        dist.barrier()
        load.from_pretrained(folder, mesh=meshes[2])

    return call


def without_tensors(meshes: dict) -> None:
    folder = cases.shared_folder()
    if dist.get_rank() == 0:
        cases.model("llama").config.save_pretrained(folder)
    dist.barrier()
    load.from_pretrained(folder, mesh=meshes[2])
