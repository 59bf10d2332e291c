"""Run records: the data that all floors exchange, and the files of a run folder.

In: what a training run measures (`schema.StepRecord`, `EpochRecord`, `RunRecord`). Out: the same as files (`writer`,
`store`) and, read back, as statistics (`statistics`, `account`). `events` delivers records to listeners, `atomic`
writes files that are either whole or absent, `reading` reads stored files within limits, and `printable` makes text
from files safe to print on a terminal. Nothing here imports torch.
"""
