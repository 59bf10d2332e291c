"""The communication of a run as text."""

from __future__ import annotations

from frameworm.records.observations import Compression
from frameworm.records.schema import RunRecord
from frameworm.report.kit.tables import data_size, seconds


def communication_text(record: RunRecord) -> str | None:
    """Communication per step; None for a run without measured communication."""
    if record.batch.world_size == 1:
        return None
    communication = record.communication
    parts = []
    if communication.total_s is not None:
        parts.append(f"{seconds(communication.total_s)} per step")
    if communication.exposed_s is not None:
        parts.append(f"{seconds(communication.exposed_s)} exposed")
    if communication.bytes_per_step is not None:
        parts.append(f"{data_size(communication.bytes_per_step)} per step")
    if communication.times_per_epoch is not None and communication.bytes_per_epoch is not None:
        sent = data_size(communication.bytes_per_epoch)
        parts.append(f"{communication.times_per_epoch:,} times and {sent} per epoch")
    if communication.compute_ratio is not None:
        parts.append(f"compute/communication {communication.compute_ratio:.3g}")
    if communication.compression is not None:
        parts.append(compression_text(communication.compression))
    return ", ".join(parts) or None


def compression_text(compression: Compression) -> str:
    """The compression method, and who chose it."""
    if compression.chosen_by != "auto":
        return f"compressed by {compression.method}"
    weighed = {item.method: item.measured_s for item in compression.candidates}
    own, plain = weighed.get(compression.method), weighed.get("off")
    if compression.method == "off":
        return "not compressed: auto found nothing faster"
    if own and plain:
        return f"compressed by {compression.method} (auto: steps of {seconds(own)} instead of {seconds(plain)})"
    return f"compressed by {compression.method} (auto)"
