"""Starter files for users who have installed the package but have no clone of the repository.

In: the name of a starter and where to write it, or a training script. Out: files in that folder, and the commands to
run next. Existing files are never changed.
"""
