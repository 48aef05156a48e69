"""NVIDIA's management library without a GPU: what powerguard asks of `pynvml`, in the same words.

    nvml = FakeNvml([FakeGpu(draw_w=640.0), FakeGpu()])
    Limits(path, boot, nvml).lower(60.0)

A GPU draws what its job wants and its limit allows. Each can be lost, locked, or watched (`set_to`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


class NVMLError(Exception):
    """As `pynvml.NVMLError`: *value* is the library's code."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        return _TEXTS.get(self.value, f"NVML Error with code {self.value}")


NVML_ERROR_UNINITIALIZED = 1
NVML_ERROR_INVALID_ARGUMENT = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_NO_PERMISSION = 4
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_GPU_IS_LOST = 15

_TEXTS = {
    NVML_ERROR_UNINITIALIZED: "Uninitialized",
    NVML_ERROR_INVALID_ARGUMENT: "Invalid Argument",
    NVML_ERROR_NOT_SUPPORTED: "Not Supported",
    NVML_ERROR_NO_PERMISSION: "Insufficient Permissions",
    NVML_ERROR_LIBRARY_NOT_FOUND: "NVML Shared Library Not Found",
    NVML_ERROR_GPU_IS_LOST: "GPU is lost",
}


@dataclass
class FakeGpu:
    """One GPU, an H100's figures by default. Watts; *lost* and *locked* may be changed at any time."""

    uuid: str = ""
    name: str = "NVIDIA H100 80GB HBM3"
    wants_w: float = 640.0
    limit_w: float = 700.0
    default_w: float = 700.0
    least_w: float = 200.0
    most_w: float = 700.0
    lost: bool = False
    locked: bool = False  # setting its limit is refused
    fixed: bool = False  # has no limit that could be set
    set_to: list[float] = field(default_factory=list)

    @property
    def draw_w(self) -> float:
        """What it draws now."""
        return min(self.wants_w, self.limit_w)


class FakeNvml:
    """The module `pynvml`, as far as it is needed. *missing*: no driver is installed."""

    NVMLError = NVMLError

    def __init__(self, gpus: Iterable[FakeGpu] = (), *, missing: bool = False) -> None:
        self.gpus = list(gpus)
        for index, gpu in enumerate(self.gpus):
            gpu.uuid = gpu.uuid or f"GPU-{index:08x}-fake"
        self.missing = missing
        self.inits = 0  # not yet shut down

    def nvmlInit(self) -> None:  # noqa: N802 - the library's own name, as all of these
        if self.missing:
            raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND)
        self.inits += 1

    def nvmlShutdown(self) -> None:  # noqa: N802
        self._up()
        self.inits -= 1

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        self._up()
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeGpu:  # noqa: N802
        self._up()
        if not 0 <= index < len(self.gpus):
            raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
        return self._there(self.gpus[index])

    def nvmlDeviceGetUUID(self, handle: FakeGpu) -> str:  # noqa: N802
        return self._there(handle).uuid

    def nvmlDeviceGetName(self, handle: FakeGpu) -> str:  # noqa: N802
        return self._there(handle).name

    def nvmlDeviceGetPowerUsage(self, handle: FakeGpu) -> int:  # noqa: N802
        return round(self._there(handle).draw_w * 1000)

    def nvmlDeviceGetPowerManagementLimit(self, handle: FakeGpu) -> int:  # noqa: N802
        return round(self._limited(handle).limit_w * 1000)

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle: FakeGpu) -> int:  # noqa: N802
        return round(self._limited(handle).default_w * 1000)

    def nvmlDeviceGetPowerManagementLimitConstraints(self, handle: FakeGpu) -> list[int]:  # noqa: N802
        gpu = self._limited(handle)
        return [round(gpu.least_w * 1000), round(gpu.most_w * 1000)]

    def nvmlDeviceSetPowerManagementLimit(self, handle: FakeGpu, limit: int) -> None:  # noqa: N802
        gpu = self._limited(handle)
        if gpu.locked:
            raise NVMLError(NVML_ERROR_NO_PERMISSION)
        if not gpu.least_w <= limit / 1000 <= gpu.most_w:
            raise NVMLError(NVML_ERROR_INVALID_ARGUMENT)
        gpu.limit_w = limit / 1000
        gpu.set_to.append(gpu.limit_w)

    def _up(self) -> None:
        if self.inits <= 0:
            raise NVMLError(NVML_ERROR_UNINITIALIZED)

    def _there(self, gpu: FakeGpu) -> FakeGpu:
        self._up()
        if gpu.lost:
            raise NVMLError(NVML_ERROR_GPU_IS_LOST)
        return gpu

    def _limited(self, gpu: FakeGpu) -> FakeGpu:
        if self._there(gpu).fixed:
            raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
        return gpu
