"""Record in the weight files that a script saves which switches were on while it trained.

A `torch.save` file is an archive: it gets one more entry, `frameworm.json`, which `torch.load` ignores. A safetensors
file gets one more entry in its header. What the script saved is unchanged.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from frameworm.attach.patches import Patches
from frameworm.attach.script import AfterImport
from frameworm.torch_private.execution import SAVE_ARCHIVE

ENTRY = "frameworm.json"
_Function = Callable[..., Any]


def sign_saved_files(about: Mapping[str, Any], patches: Patches) -> None:
    """Add information to every weight file that is saved from now on.

    Args:
        about: The information.
        patches: Records the changes, to undo them.
    """
    words = json.dumps(dict(about))
    if hasattr(*SAVE_ARCHIVE):
        patches.set(*SAVE_ARCHIVE, functools.partial(_saving, words.encode()))
    AfterImport("safetensors.torch", functools.partial(_sign_safetensors, words, patches)).arm()


def _saving(words: bytes, original: _Function) -> _Function:
    @functools.wraps(original)
    def save(obj: Any, archive: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(obj, archive, *args, **kwargs)
        archive.write_record(ENTRY, words, len(words))
        return result

    return save


def _sign_safetensors(words: str, patches: Patches) -> None:
    patches.set(sys.modules["safetensors.torch"], "save_file", functools.partial(_saving_safetensors, words))


def _saving_safetensors(words: str, original: _Function) -> _Function:
    @functools.wraps(original)
    def save_file(
        tensors: Any, filename: Any, metadata: dict[str, str] | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        return original(tensors, filename, {**(metadata or {}), "frameworm": words}, *args, **kwargs)

    return save_file
