"""Configuration: the settings of a run as typed values.

In: a YAML file, `FRAMEWORM_*` variables and `--set` overrides. Out: a checked `Config` (`load.load_config`), and the
same config with every `auto` decided for a machine and a number of processes (`resolve.resolve`). `schema` has every
key with its default and a sentence on what it does; `problems` and `keys` turn mistakes into messages that name the
key, the line and the nearest valid key. Nothing here imports torch.
"""
