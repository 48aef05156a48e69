"""DTensors (FSDP2, tensor parallelism): each rank keeps its local shard, and where it lies in the whole."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

from powerguard.errors import StateError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Whether *value* is a DTensor; doesn't import what only a sharded run needs."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(value: DTensor) -> torch.Tensor:
    """The local shard, sharing memory, as a plain tensor."""
    local: torch.Tensor = value.to_local().detach()
    return local


def describe_dtensor(value: DTensor, path: str) -> tuple[torch.Tensor, dict[str, Any]]:
    """(the local shard, its place in the whole). Raises StateError for placements that have no place."""
    mesh = value.device_mesh
    facts: dict[str, Any] = {
        "shape": list(value.shape),
        "placements": [describe_placement(p, path) for p in value.placements],
        "mesh": describe_mesh(mesh),
    }
    facts["offset"] = local_offset(value)
    coordinate = mesh.get_coordinate()
    facts["coordinate"] = list(coordinate) if coordinate is not None else None
    if isinstance(value, torch.nn.Parameter):
        facts["parameter"] = True
    return local_of(value), facts


def local_offset(value: DTensor) -> list[int]:
    """Where the local shard starts in the whole."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return list(offset)


def like(value: DTensor, dtype: torch.dtype) -> DTensor:
    """An uninitialised DTensor laid out as *value*; no communication."""
    from torch.distributed.tensor import DTensor

    local = torch.empty_like(local_of(value), dtype=dtype, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
    )


def describe_mesh(mesh: DeviceMesh) -> dict[str, Any]:
    """What makes two meshes the same for us."""
    names = mesh.mesh_dim_names
    return {"shape": list(mesh.shape), "names": list(names) if names else None, "device": mesh.device_type}


def describe_placement(placement: Any, path: str) -> list[str | int]:
    """A placement as a list; raises StateError where the local values aren't a part of the whole."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return ["replicate"]
    if kind == "Shard":
        return ["shard", placement.dim]
    if kind == "_StridedShard":
        return ["strided_shard", placement.dim, placement.split_factor]
    raise StateError(
        f"{path} is a DTensor with placement {placement}, whose local values mean nothing by themselves",
        todo="redistribute it before the boundary",
    )


def find_meshes(values: list[Any]) -> list[DeviceMesh]:
    """The meshes of all DTensors among *values*, each once."""
    meshes: list[DeviceMesh] = []
    for value in values:
        if is_dtensor(value) and value.device_mesh not in meshes:
            meshes.append(value.device_mesh)
    return meshes


def mesh_like(meshes: list[DeviceMesh], facts: dict[str, Any]) -> DeviceMesh:
    """The mesh of this run that fits the one recorded; raises StateError where there is none."""
    for mesh in meshes:
        if describe_mesh(mesh) == facts:
            return mesh
    raise StateError(
        f"the checkpoint was sharded over a mesh of {facts['shape']}, this run has none like it",
        todo="resume with the same mesh, or export the generation to DCP and load that",
    )


def wrap_local(local: torch.Tensor, facts: dict[str, Any], mesh: DeviceMesh) -> DTensor:
    """A DTensor around a loaded local shard; no communication."""
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import Placement, _StridedShard

    placements: list[Placement] = []
    for kind, *rest in facts["placements"]:
        if kind == "replicate":
            placements.append(Replicate())
        elif kind == "shard":
            placements.append(Shard(*rest))
        else:
            placements.append(_StridedShard(rest[0], split_factor=rest[1]))
    shape = torch.Size(facts["shape"])
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)
