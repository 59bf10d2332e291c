"""A transformer encoder that classifies texts.

Nothing in `forward` waits for the device: lengths remain tensors, so the model can be compiled and captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.errors import ModelError
from frameworm.models.attention import packed_self_attention, sequence_of_tokens
from frameworm.models.stream import Residual, as_stream, linear_parameters

# Largest samples x tokens for which a matrix product sums a packed batch; beyond, that matrix would be too large.
_LARGEST_MEMBERSHIP = 2**26


class TextClassifier(nn.Module):
    """Token and position embeddings, pre-norm encoder layers, mean over the real tokens, one linear head.

    The layers are in `layers`, for code that wraps them one by one (checkpointing, sharding).

    Args:
        vocab_size: Rows of the token embedding.
        num_classes: Width of the result.
        d_model: Width of the token vectors.
        n_heads: Attention heads per layer; divides `d_model`.
        num_layers: Number of encoder layers.
        dim_feedforward: Width of the feed-forward part.
        max_seq_len: Longest input in tokens.
        dropout: Dropout after embeddings, attention and feed-forward; attention weights themselves are never dropped.
        pad_id: Token whose embedding stays zero.
        residual: `half` keeps the residual stream in autocast's dtype, if autocast is on.
    """

    accepts_packed = True

    def __init__(
        self,
        vocab_size: int,
        num_classes: int,
        d_model: int = 128,
        n_heads: int = 4,
        num_layers: int = 2,
        dim_feedforward: int = 256,
        max_seq_len: int = 128,
        dropout: float = 0.1,
        pad_id: int = 0,
        residual: Residual = "fp32",
    ) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.residual: Residual = residual
        self.token_embedding = nn.Embedding(vocab_size, d_model, padding_idx=pad_id)
        self.position_embedding = nn.Embedding(max_seq_len, d_model)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(EncoderLayer(d_model, n_heads, dim_feedforward, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.head = nn.Linear(d_model, num_classes)
        self.apply(_initialise)

    def forward(
        self,
        input_ids: Tensor,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Score each text of a padded batch (`lengths` given) or of a packed one (`offsets` and `positions`).

        Args:
            input_ids: Tokens. Padded: [batch, length]; tokens beyond a text's length are ignored. Packed: [tokens], the
                texts end to end, then a tail of padding.
            lengths: Real tokens of each text, [batch], at least 1.
            offsets: Boundaries of the texts and of the tail's pieces, [pieces + 1]. The last `ceil(tokens /
                max_seq_len)` pieces are reserved for the tail; the others are the texts. An empty text is missing.
            positions: Position of each token in its own text, [tokens].

        Returns:
            Logits, [batch, classes].
        """
        if offsets is not None and positions is not None:
            return self._packed(input_ids, offsets, positions)
        if lengths is None:
            raise ModelError("give lengths with a padded batch, or offsets and positions with a packed one")
        length = input_ids.size(1)
        if length > self.max_seq_len:
            raise ModelError(f"a batch is {length} tokens long, the model takes {self.max_seq_len} (model.max_seq_len)")
        positions = torch.arange(length, device=input_ids.device)
        real = None if _are_full(lengths, length) else positions < lengths.unsqueeze(1)
        hidden = _dropped(self.token_embedding(input_ids) + self.position_embedding(positions), self.dropout)
        # Flatten to one row of tokens once; otherwise every linear layer would flatten it and restore the shape.
        hidden = as_stream(hidden, self.residual).flatten(0, 1)
        attended = None if real is None else real[:, None, None, :]
        batch = input_ids.size(0)
        for layer in self.layers:
            hidden = layer(hidden, (batch, length), attended)
        hidden = self.norm(hidden).view(batch, length, hidden.size(1))
        if real is not None:
            hidden = hidden * real.unsqueeze(2).to(hidden.dtype)
        pooled = hidden.sum(1) / lengths.unsqueeze(1).to(hidden.dtype)
        logits: Tensor = self.head(pooled)
        return logits

    def autocast_parameters(self) -> Iterator[tuple[nn.Module, str]]:
        """Parameters that autocast casts wherever they are read; see engine/half_weights."""
        return linear_parameters(self)

    def _packed(self, input_ids: Tensor, offsets: Tensor, positions: Tensor) -> Tensor:
        texts = offsets.size(0) - 1 - -(-input_ids.size(0) // self.max_seq_len)
        if texts < 1:
            raise ModelError(
                f"offsets with {offsets.size(0)} borders leave no text beside the tail of {input_ids.size(0)} tokens; "
                f"pack with the model's max_seq_len, {self.max_seq_len}"
            )
        hidden = _dropped(self.token_embedding(input_ids) + self.position_embedding(positions), self.dropout)
        hidden = as_stream(hidden, self.residual)
        for layer in self.layers:
            hidden = layer(hidden, offsets=offsets, max_length=self.max_seq_len)
        logits: Tensor = self.head(_mean_per_text(self.norm(hidden), offsets[: texts + 1]))
        return logits


class EncoderLayer(nn.Module):
    """Attention, then feed-forward, each on the normalised input and added to it."""

    def __init__(self, d_model: int, n_heads: int, dim_feedforward: int, dropout: float) -> None:
        super().__init__()
        assert d_model % n_heads == 0
        self.n_heads = n_heads
        self.norm_attention = nn.LayerNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.attention_output = nn.Linear(d_model, d_model)
        self.norm_feedforward = nn.LayerNorm(d_model)
        self.expand = nn.Linear(d_model, dim_feedforward)
        self.activation = nn.GELU(approximate="tanh")
        self.contract = nn.Linear(dim_feedforward, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        hidden: Tensor,
        padded: tuple[int, int] = (0, 0),
        attended: Tensor | None = None,
        offsets: Tensor | None = None,
        max_length: int = 0,
    ) -> Tensor:
        """Apply the layer to [tokens, width]: a batch of texts by tokens (`padded`), or texts between `offsets`.

        `attended` is True for tokens that may be attended to, broadcast to [batch, heads, length, length].
        """
        normalised = self.norm_attention(hidden)
        if offsets is None:
            mixed = self._attention(normalised, padded, attended)
        else:
            mixed = self._packed_attention(normalised, offsets, max_length)
        hidden = hidden + _dropped(mixed, self.dropout)
        expanded = self.activation(self.expand(self.norm_feedforward(hidden)))
        result: Tensor = hidden + _dropped(self.contract(expanded), self.dropout)
        return result

    def _attention(self, hidden: Tensor, padded: tuple[int, int], attended: Tensor | None) -> Tensor:
        width = hidden.size(1)
        heads = self.query_key_value(hidden).view(*padded, 3, self.n_heads, width // self.n_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=attended)
        result: Tensor = self.attention_output(mixed.transpose(1, 2).reshape(hidden.shape))
        return result

    def _packed_attention(self, hidden: Tensor, offsets: Tensor, max_length: int) -> Tensor:
        tokens, width = hidden.shape
        heads = self.query_key_value(hidden).view(tokens, 3, self.n_heads, width // self.n_heads)
        mixed = packed_self_attention(heads, offsets, max_length)
        result: Tensor = self.attention_output(mixed.reshape(tokens, width))
        return result


def _dropped(hidden: Tensor, dropout: nn.Dropout) -> Tensor:
    """Apply dropout, without a call if there is none."""
    result: Tensor = dropout(hidden) if dropout.p else hidden
    return result


def _are_full(lengths: Tensor, length: int) -> bool:
    """Whether a batch is known to have no padding, and so needs no mask; checked only on a CPU."""
    asks = type(lengths) is Tensor and lengths.is_cpu and not torch.compiler.is_compiling()
    return asks and bool((lengths == length).all())


def _mean_per_text(hidden: Tensor, offsets: Tensor) -> Tensor:
    """Average over each text's tokens, [texts, width]; 0 for an empty text. Ignores tokens after the last boundary."""
    tokens, texts = hidden.size(0), offsets.size(0) - 1
    starts, ends = offsets[:-1].unsqueeze(1), offsets[1:].unsqueeze(1)
    if hidden.device.type != "cpu" and texts * tokens <= _LARGEST_MEMBERSHIP:
        token = torch.arange(tokens, device=hidden.device, dtype=offsets.dtype)
        member = (token >= starts) & (token < ends)
        # In the dtype of `hidden`: as in a padded batch, autocast does not affect the mean.
        with _without_autocast(hidden.device.type):
            total = member.to(hidden.dtype) @ hidden
    else:
        text = sequence_of_tokens(offsets, tokens)  # the tail gets the index after the last text
        total = hidden.new_zeros(texts + 1, hidden.size(1)).index_add(0, text, hidden)[:texts]
    return total / (ends - starts).clamp(min=1).to(hidden.dtype)


def _without_autocast(device_type: str) -> AbstractContextManager[Any]:
    # Checked by name, as the compiler cannot trace torch's own check for devices with autocast.
    return torch.autocast(device_type, enabled=False) if device_type in ("cpu", "cuda") else nullcontext()


def _initialise(module: nn.Module) -> None:
    """Initialise small embeddings, Glorot matrices and zero biases: at these sizes the model learns without warm-up."""
    if isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
        if module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()
    elif isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.zeros_(module.bias)
