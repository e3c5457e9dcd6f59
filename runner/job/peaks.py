"""What the vendors say a device can compute at most. MFU is measured against it."""

from __future__ import annotations

from runner.job.shapes import Device

# FLOP/s of one device as torch sees it: (16 bit on tensor or matrix cores with fp32 accumulation,
# fp32 without TF32). Dense: data sheets print numbers with 2:4 sparsity, which are twice as high.
# The first name that is in the device's name counts, so longer names come first.
# Sources: the data sheet of each device by NVIDIA; for GeForce and RTX Ada the architecture white
# papers ("GA102", "Ada", appendix), for TITAN RTX the Turing one; GB200 is a 72nd part of an NVL72.
# AMD: data sheets of MI210, MI250, MI250X, MI300A, MI300X and MI325X, fp32 on matrix cores. torch
# sees each of the two dies (GCD) of an MI250 or MI250X as a device: half of the card.
PEAKS: dict[str, tuple[float, float]] = {
    "GB200": (2500e12, 80e12),
    "B200": (2250e12, 75e12),
    "GH200": (989e12, 67e12),
    "H200 NVL": (835e12, 60e12),
    "H200": (989e12, 67e12),
    "H100 PCIe": (756e12, 51e12),
    "H100 NVL": (835e12, 60e12),
    "H100": (989e12, 67e12),
    "H800 PCIe": (756e12, 51e12),
    "H800": (989e12, 67e12),
    "H20": (148e12, 44e12),
    "A100": (312e12, 19.5e12),
    "A800": (312e12, 19.5e12),
    "A40": (149.7e12, 37.4e12),
    "A30": (165e12, 10.3e12),
    "A10G": (70e12, 35e12),
    "A10": (125e12, 31.2e12),
    "RTX A6000": (154.8e12, 38.7e12),
    "RTX 6000 Ada": (364.2e12, 91.1e12),
    "L40S": (362e12, 91.6e12),
    "L40": (181e12, 90.5e12),
    "L4": (121e12, 30.3e12),
    "V100-PCIE": (112e12, 14e12),
    "V100S": (130e12, 16.4e12),
    "V100": (125e12, 15.7e12),
    "T4": (65e12, 8.1e12),
    "TITAN RTX": (130e12, 16.3e12),
    "RTX 4090": (165e12, 82.6e12),
    "RTX 3090": (71e12, 35.6e12),
    "MI325X": (1307e12, 163.4e12),
    "MI300X": (1307e12, 163.4e12),
    "MI300A": (980.6e12, 122.6e12),
    "MI250X": (191.5e12, 47.9e12),
    "MI250": (181e12, 45.3e12),
    "MI210": (181e12, 45.3e12),
}
_WHOLE_NAMES = frozenset({"H20", "A10", "A30", "A40", "L4", "T4", "L40"})
"""Names that other devices' names begin with: these must be a whole part of the name."""


def peak_flops(device: Device, precision: str) -> float | None:
    """FLOP/s of one device in `precision` (bf16, fp16, tf32, fp32); None where it is not known."""
    parts = device.name.replace("-", " ").split()
    for name, (low, full) in PEAKS.items():
        if (name in parts) if name in _WHOLE_NAMES else (name in device.name):
            # TF32 is half as fast as 16 bits where there is any (data sheets); MI200s have none.
            tf32 = full if name.startswith("MI2") else low / 2
            return {"fp32": full, "tf32": tf32}.get(precision, low)
    return None
