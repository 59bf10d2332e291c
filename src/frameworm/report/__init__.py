"""Show it: text, tables, charts and pages from records.

In: records and the results of diagnose, scaling, guard and tune. Out: strings and files that need nothing else to be
read. `kit/` has what all reports share; `run/`, `tune/`, `scaling/` and `checks/` each show one kind of result. First
the data of a view is computed, then it is drawn. Nothing here imports torch.
"""
