"""Scaling: how a run behaves with more devices, and what it needs.

In: stored runs, a measured or described network, the size of a model. Out: predictions (`predict`), the analysis of a
sweep (`analysis`), memory plans (`memory`) and the arithmetic of batch-size searches (`batch_search`). Pure functions
over records; no torch.
"""
