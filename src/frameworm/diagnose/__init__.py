"""Say why: from the record of a run to findings with cause, evidence, remedy and expected gain.

In: a `RunRecord`, or what `hardware.inspect` saw of a machine. Out: findings and a verdict (`rules/`), checks of a
machine (`machine/`), the optimisation checklist of a config (`checklist/`), graded targets (`targets`). The functions
are pure: they read no files and import no torch, so a stored run can be judged on a laptop.
"""
