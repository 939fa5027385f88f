"""Devices of tensors."""

from __future__ import annotations

from . import singa_wrap


def get_default_device() -> singa_wrap.Device:
    return singa_wrap.Platform.GetDefaultDevice()


def create_cuda_gpu_on(number: int) -> singa_wrap.Device:
    return singa_wrap.Platform.CreateCudaGPUsOn([number])[0]
