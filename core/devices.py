"""GPUs as data: what a datasheet promises of their memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class GPU:
    """A GPU's memory: bytes per second of the datasheet, bytes that its driver reports, and how results call the device."""

    bandwidth: float
    memory: float
    device: str


GIB = 2**30
GPUS = {
    "a100": GPU(2.04e12, 80 * GIB, "NVIDIA A100-SXM4-80GB"),
    "h100": GPU(3.35e12, 80 * GIB, "NVIDIA H100 80GB HBM3"),
    "h200": GPU(4.8e12, 140 * GIB, "NVIDIA H200"),
    "b200": GPU(8.0e12, 179 * GIB, "NVIDIA B200"),
    "b300": GPU(8.0e12, 268 * GIB, "NVIDIA B300 SXM6 AC"),
    "l40s": GPU(0.864e12, 45 * GIB, "NVIDIA L40S"),
    "rtx-pro-6000": GPU(1.79e12, 95 * GIB, "NVIDIA RTX PRO 6000 Blackwell Server Edition"),
    "rtx-5090": GPU(1.79e12, 31 * GIB, "NVIDIA GeForce RTX 5090"),
    "rtx-4090": GPU(1.01e12, 24 * GIB, "NVIDIA GeForce RTX 4090"),
}


def find(name: str) -> GPU:
    """The GPU of that name; ValueError names the known ones."""
    if name.lower() not in GPUS:
        raise ValueError(f"gpu: expected one of {', '.join(GPUS)}, got {name!r}")
    return GPUS[name.lower()]
