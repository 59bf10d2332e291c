"""The names of all settings, and which of them a wrong name probably meant."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from frameworm.config.describe import CLOSE, likeness, section_of, suggest

KeyPath = tuple[str | int, ...]
Tree = dict[KeyPath, FieldInfo]

# Names of the same setting in other libraries.
ELSEWHERE: dict[str, KeyPath] = {
    "amp": ("gpu", "mixed_precision"),
    "batch": ("training", "global_batch"),
    "bf16": ("gpu", "mixed_precision"),
    "ffn_dim": ("model", "dim_feedforward"),
    "fp16": ("gpu", "mixed_precision"),
    "grad_clip": ("training", "clip_norm"),
    "gradient_accumulation_steps": ("training", "accumulation"),
    "gradient_checkpointing": ("memory", "activation_checkpointing"),
    "heads": ("model", "n_heads"),
    "hidden_size": ("model", "d_model"),
    "layers": ("model", "num_layers"),
    "learning_rate": ("training", "lr"),
    "max_epochs": ("training", "epochs"),
    "n_layers": ("model", "num_layers"),
    "num_epochs": ("training", "epochs"),
    "num_heads": ("model", "n_heads"),
    "per_device_batch_size": ("training", "batch_size"),
    "scheduler": ("training", "schedule"),
    "torch_compile": ("gpu", "compile_model"),
    "use_amp": ("gpu", "mixed_precision"),
    "workers": ("data", "num_workers"),
}


def dotted(path: KeyPath) -> str:
    """Format a path as users write it: `observe.sinks[0]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            name = part if part.isprintable() else repr(part)[1:-1]
            text += f".{name[:80]}" if text else name[:80]
    return text


def key_tree(root: type[BaseModel], model_section: type[BaseModel] | None = None) -> Tree:
    """Return every setting below a section class, including sections; `model` follows the workload's model section."""
    return dict(_walk(root, (), model_section))


def _walk(
    section: type[BaseModel], prefix: KeyPath, model_section: type[BaseModel] | None
) -> Iterator[tuple[KeyPath, FieldInfo]]:
    for name, field in section.model_fields.items():
        path = (*prefix, name)
        yield path, field
        inner = model_section if path == ("model",) and model_section is not None else section_of(field)
        if inner is not None:
            yield from _walk(inner, path, model_section)


def is_section(tree: Tree, path: KeyPath) -> bool:
    """True if the key is a top-level section."""
    return len(path) == 1 and path in tree and section_of(tree[path]) is not None


def nearest_key(unknown: KeyPath, tree: Tree) -> tuple[KeyPath, float]:
    """Return the setting that an unknown key most likely meant, and how similar they are.

    The same name in another section wins, then a similar one in the same section, then a similar one anywhere.
    """
    leaf = str(unknown[-1])
    alias = ELSEWHERE.get(leaf.lower().replace("-", "_"))
    if alias in tree:
        return alias, 1.0
    whole = dotted(unknown)
    namesakes = [path for path in tree if path[-1] == leaf]
    if namesakes:
        return max(namesakes, key=lambda path: likeness(whole, dotted(path))), 1.0
    siblings = [path for path in tree if path[:-1] == unknown[:-1]]
    sibling, sibling_likeness = _best(leaf, siblings)
    anyone, anyone_likeness = _best(leaf, list(tree))
    if sibling is not None and (sibling_likeness >= CLOSE or anyone_likeness < 0.75):
        return sibling, sibling_likeness
    if siblings or len(unknown) == 1:
        return anyone or (), anyone_likeness
    # The section itself is misspelt, so compare the whole name.
    return max(((path, likeness(whole, dotted(path))) for path in tree), key=lambda pair: pair[1])


def _best(leaf: str, paths: Sequence[KeyPath]) -> tuple[KeyPath | None, float]:
    if not paths:
        return None, 0.0
    best = max(paths, key=lambda path: likeness(leaf, str(path[-1])))
    return best, likeness(leaf, str(best[-1]))


def unknown_key_text(unknown: KeyPath, tree: Tree) -> str:
    """Message for an unknown key, with the nearest valid one."""
    path, alike = nearest_key(unknown, tree)
    return "unknown key" + suggest(dotted(path), alike)
