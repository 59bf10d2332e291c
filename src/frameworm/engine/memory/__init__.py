"""How much memory a training needs and holds.

In: a config (planning) or a running training (guarding). Out: a plan from a dry run that allocates nothing (`planner`,
`dry_run`), what holds memory now (`holdings`), and timely reactions when memory gets short (`guard`, `garbage`).
"""
