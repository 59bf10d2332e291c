"""The live page over run folders: what training writes, shown during a run and afterwards.

In: the files of runs below one folder, read in small portions and never written (`files`, `bins`, `run`). Out: rows of
all runs (`catalogue`), curves and findings of one (`run`, `judging`, `view`), over HTTP with a token (`server`,
`security`) to a page of static files (`static/`). It needs no torch: a laptop can watch a cluster's shared folder.
"""
