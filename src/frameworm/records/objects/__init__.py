"""Runs in object storage: the only place that opens URLs.

In: URLs such as s3://bucket/runs/x, in fsspec's spelling. Out: bytes, listings and local copies of runs. Object names
come from outside, so only names of a known form are used, and none leads out of the folder it is copied to.
"""
