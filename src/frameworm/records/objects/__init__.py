"""Runs in object storage: the one place that opens URLs.

In come URLs such as s3://bucket/runs/x, in the spelling of fsspec; out go bytes, listings and local copies of runs.
Object names come from outside: only names of a known form are used, and none leads out of the folder it is copied to.
"""
