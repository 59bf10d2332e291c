"""How samples become batches: padded, bucketed or packed, on the host or on the device.

In: token lengths (declared, or found by `found_lengths`) and the order of an epoch. Out: an order with little padding
(`arrange`), packed batches without padding (`packed`, `chunks`), the same assembled on the device (`resident`), batches
of equal samples assembled there (`equal_samples`), and token counts of each step (`counts`).
"""
