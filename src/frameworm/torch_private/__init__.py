"""Everything of torch's private API that frameworm uses, and nothing else: one name per use, with what it is for.

In: tensors, modules, optimizers, loaders and groups of torch. Out: what torch offers only under a name that begins with
an underscore. torch may rename such a thing in any release. Then `tests/torch_private` fails and says which; users get
a `TorchVersionError` at the first use, or what each docstring names instead. No other module may use a private name of
torch's (`tests/test_architecture.py`).
"""
