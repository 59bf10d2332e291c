"""Check that all ranks hold bitwise the same model."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from frameworm.errors import ModelError

_MULTIPLIER = -7046029254386353131  # odd, with bits spread over the word, so that any change alters the sum
_CHUNK = 2**22


def fingerprint(tensor: Tensor) -> Tensor:
    """A 64-bit hash of the tensor's bits and their order, on its device."""
    flat = tensor.detach().contiguous().view(-1)
    words = flat.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device)
        # Integer overflow wraps around, as a hash needs.
        total += ((part + 1) * (place * _MULTIPLIER)).sum()
    return total


def check_replicas(
    model: nn.Module,
    step: int,
    group: dist.ProcessGroup | None = None,
    beside: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """Compare the parameters of all ranks; all ranks must call it.

    Args:
        model: The model.
        step: Number of the step, for the message.
        group: The ranks; None: all.
        beside: Parameters that train beside the model.

    Raises:
        ModelError: They differ; names the first parameter and the ranks that differ from rank 0.
    """
    both = (*model.named_parameters(), *(beside or {}).items())
    named = [(name, parameter) for name, parameter in both if parameter.numel()]
    if not named:
        return
    own = torch.stack([fingerprint(parameter) for _, parameter in named])
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, own, group=group)
    table = torch.stack(gathered).cpu()
    differs = table != table[0]
    columns = differs.any(0).nonzero().flatten().tolist()
    if columns:
        ranks = differs[:, columns[0]].nonzero().flatten().tolist()
        raise ModelError(
            f"after step {step} the ranks no longer hold the same model: {named[columns[0]][0]} of rank "
            f"{', '.join(map(str, ranks))} differs from rank 0 ({len(columns)} of {len(named)} parameters differ); "
            "look for code that changes parameters on one rank only, or for a broken machine"
        )
