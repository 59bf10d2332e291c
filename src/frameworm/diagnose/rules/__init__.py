"""The rules that name the bottleneck of a run.

In: the records of a run, gathered once as `Facts` (`accounting`). Out: a `Judgement` (`judge`): findings, the
costliest first, and a verdict. `device`, `machine`, `ranks` and `time` hold the rules, each a function from facts to
a finding or None; `cost` decides what is worth saying.
"""
