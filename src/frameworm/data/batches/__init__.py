"""How samples of unequal length become batches: padded, bucketed or packed.

In: token lengths and the order of an epoch. Out: an order with little padding (`arrange`), packed batches without
padding (`packed`, `chunks`), the same put together on the device (`resident`), and token counts of each step
(`counts`).
"""
