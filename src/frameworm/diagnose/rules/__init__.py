"""The rules that name the bottleneck of a run.

In: the records of a run, gathered once as `Facts` (`accounting`). Out: a `Diagnosis` (`judge`): findings, the
costliest first, and a verdict. `device`, `machine`, `ranks` and `time` contain the rules, each a function from facts to
a finding or None; `cost` decides what is worth reporting.
"""
