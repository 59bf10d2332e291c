"""Diagnosis: turns the record of a run into findings with cause, evidence, remedy and expected gain.

In: a `RunRecord`, or what `hardware.inspect` found on a machine. Out: findings and a verdict (`rules/`), checks of a
machine (`machine/`), the optimisation checklist of a config (`checklist/`), graded targets (`targets`). The functions
are pure: they read no files and import no torch, so a stored run can be judged on a laptop.
"""
