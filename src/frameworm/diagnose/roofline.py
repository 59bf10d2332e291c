"""Where a GPU's step time goes, and the most that each setting can gain.

From a trace: matrix products, attention, other kernels, exposed communication and transfers, and gaps by cause. If a
setting removed one of these entirely, the speedup would be `1 / (1 - share)`: no setting gains more.
"""

from __future__ import annotations

from frameworm.records.estimate import known
from frameworm.records.observations import Ceiling, Flops, Roofline
from frameworm.records.trace import ATTENTION, MATRIX_PRODUCTS, OTHER_KERNELS, TraceSummary

COMMUNICATION, TRANSFER, DATA_WAIT = "communication", "transfer", "data_wait"
SYNCHRONISATION, LAUNCH_GAPS = "synchronisation", "launch_gaps"
# The settings that can shrink a part of the step; a part without settings can only be improved in the script.
KNOBS: dict[str, tuple[str, ...]] = {
    MATRIX_PRODUCTS: ("gpu.mixed_precision", "gpu.tf32", "training.micro_batch"),
    ATTENTION: ("gpu.use_flash_attention", "data.batching"),
    OTHER_KERNELS: ("gpu.compile_model",),
    COMMUNICATION: ("parallel.compression", "parallel.bucket_cap_mb", "training.global_batch"),
    TRANSFER: ("data.pin_memory", "data.resident"),
    DATA_WAIT: ("data.num_workers", "data.resident"),
    SYNCHRONISATION: (),
    LAUNCH_GAPS: ("gpu.capture", "gpu.compile_model", "training.micro_batch"),
}
_SMALLEST_REST = 1e-3  # a step is never all gaps


def roofline(trace: TraceSummary | None, flops: Flops | None = None) -> Roofline | None:
    """Divide a step on the busiest GPU of a trace into parts; None without a trace.

    Args:
        trace: Trace of rank 0.
        flops: The model's arithmetic, to compute how close its products come to the peak.
    """
    device = None if trace is None else trace.device
    wall_s = None if device is None else known(device.wall_s)
    if device is None or not wall_s or not device.kernels_s:
        return None
    waits = device.waits_s
    times_s = {
        **{kind: device.kernels_s.get(kind, 0.0) for kind in (MATRIX_PRODUCTS, ATTENTION, OTHER_KERNELS)},
        COMMUNICATION: waits.get("communication", 0.0),
        TRANSFER: waits.get("transfer", 0.0),
        DATA_WAIT: waits.get("data_loading", 0.0),
        SYNCHRONISATION: waits.get("synchronisation", 0.0),
        LAUNCH_GAPS: sum(waits.get(cause, 0.0) for cause in ("host", "queued", "unknown")),
    }
    shares = {name: time_s / wall_s for name, time_s in times_s.items()}
    found = Roofline(shares=shares, products_of_peak=_products_of_peak(trace, shares, flops))
    found.ceilings = ceilings(found)
    return found


def ceilings(found: Roofline) -> list[Ceiling]:
    """Return the most that each part of the step could gain, largest first; parts of zero length are omitted.

    Matrix products have to be done, so only their time beyond the time at the peak can be removed.
    """
    gains = []
    for part, share in found.shares.items():
        left = share
        if part == MATRIX_PRODUCTS:
            left = 0.0 if found.products_of_peak is None else share * (1 - min(found.products_of_peak, 1.0))
        if left > 0:
            gains.append(Ceiling(part, left, 1 / max(1 - left, _SMALLEST_REST), list(KNOBS[part])))
    return sorted(gains, key=lambda item: -item.speedup)


def _products_of_peak(trace: TraceSummary | None, shares: dict[str, float], flops: Flops | None) -> float | None:
    """How close the products come to the achievable rate if it was measured, else to the device's peak."""
    if trace is None or flops is None or not shares[MATRIX_PRODUCTS]:
        return None
    peak = flops.achievable_per_s or flops.peak_per_s
    steps = [step.device_wall_s for step in trace.steps if step.device_wall_s]
    if peak is None or not steps:
        return None
    products_s = shares[MATRIX_PRODUCTS] * sum(steps) / len(steps)
    return flops.per_step * (1 - (flops.attention_share or 0.0)) / (peak * products_s)
