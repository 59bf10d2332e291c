"""Text, tables, charts and pages from records.

In: records and the results of diagnose, scaling, guard and tune. Out: strings and self-contained files. `kit/` has
what all reports share; `run/`, `tune/`, `scaling/` and `checks/` each show one kind of result. A view first computes
its data and then draws it. Nothing here imports torch.
"""
