"""A decoder with GPT-2's architecture, which predicts the next token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frameworm.errors import ModelError
from frameworm.models.causal_attention import causal_attention, suits_causal_kernels
from frameworm.models.feed_forward import feed_forward
from frameworm.models.linear_loss import linear_cross_entropy
from frameworm.models.products import linear
from frameworm.models.stream import Residual, as_stream, linear_parameters
from frameworm.models.stream_norm import norm_and_stream, suits_stream_norm

FUSED_FROM = 8192  # vocabulary size; below, all logits are small enough to hold at once


class GPT(nn.Module):
    """Token and position embeddings, pre-norm decoder layers, and a head that shares the token embedding's weights.

    With the default sizes and GPT-2's vocabulary of 50,257 it has 124,439,808 parameters. The layers are in `layers`,
    for code that wraps them one by one (checkpointing, sharding).

    Args:
        vocab_size: Rows of the token embedding.
        d_model: Width of the token vectors.
        n_heads: Attention heads per layer; divides `d_model`.
        num_layers: Number of decoder layers.
        max_seq_len: Longest context in tokens.
        dropout: Dropout after embeddings, attention and feed-forward; attention weights themselves are never dropped.
        fused_loss: Whether to compute the loss without holding all logits; auto does so on a GPU from 8,192 words on.
        residual: `half` keeps the residual stream in autocast's dtype, if autocast is on.
    """

    def __init__(
        self,
        vocab_size: int,
        d_model: int = 768,
        n_heads: int = 12,
        num_layers: int = 12,
        max_seq_len: int = 1024,
        dropout: float = 0.0,
        fused_loss: bool | Literal["auto"] = "auto",
        residual: Residual = "fp32",
    ) -> None:
        super().__init__()
        self.max_seq_len = max_seq_len
        self.fused_loss = fused_loss
        self.residual: Residual = residual
        self.token_embedding = nn.Embedding(vocab_size, d_model)
        self.position_embedding = nn.Embedding(max_seq_len, d_model)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(DecoderLayer(d_model, n_heads, dropout) for _ in range(num_layers))
        self.norm = nn.LayerNorm(d_model)
        self.apply(_initialise)
        # Each layer adds to the residual stream twice; this scale keeps its variance from growing with depth.
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)
            for projection in (layer.attention_output, layer.contract):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * num_layers))

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Predict the token after each one.

        Args:
            input_ids: Tokens, [batch, length].
            targets: The actual next tokens, [batch, length]; -100 does not count.

        Returns:
            The mean cross-entropy over the targets if given, else logits, [batch, length, vocabulary].
        """
        length = input_ids.size(1)
        if length > self.max_seq_len:
            raise ModelError(f"a batch is {length} tokens long, the model takes {self.max_seq_len} (model.max_seq_len)")
        positions = torch.arange(length, device=input_ids.device)
        hidden = self.dropout(self.token_embedding(input_ids) + self.position_embedding(positions))
        hidden = as_stream(hidden, self.residual)
        for layer in self.layers:
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        weight = self.token_embedding.weight
        if targets is not None and self._fuses(hidden):
            return linear_cross_entropy(hidden.flatten(0, 1), weight, targets.flatten())
        logits = F.linear(hidden, weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def autocast_parameters(self) -> Iterator[tuple[nn.Module, str]]:
        """Parameters that autocast casts wherever they are read; see engine/half_weights."""
        return linear_parameters(self)

    def _fuses(self, hidden: Tensor) -> bool:
        if self.fused_loss == "auto":
            return hidden.is_cuda and self.token_embedding.num_embeddings >= FUSED_FROM
        return bool(self.fused_loss)


class DecoderLayer(nn.Module):
    """Causal attention, then feed-forward, each on the normalised input and added to it.

    Attributes:
        own_kernels: Whether to use our own fused kernels where possible.
    """

    own_kernels = True

    def __init__(self, d_model: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        assert d_model % n_heads == 0
        self.n_heads = n_heads
        self.norm_attention = nn.LayerNorm(d_model)
        self.query_key_value = nn.Linear(d_model, 3 * d_model)
        self.attention_output = nn.Linear(d_model, d_model)
        self.norm_feedforward = nn.LayerNorm(d_model)
        self.expand = nn.Linear(d_model, 4 * d_model)
        self.activation = nn.GELU(approximate="tanh")
        self.contract = nn.Linear(4 * d_model, d_model)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        """Apply the layer to [batch, length, width]."""
        normed, onto, apart = self._open(hidden, self.norm_attention, self.attention_output.bias)
        result = self._attention(normed, onto, bias_gradient=not apart)
        hidden = hidden + self.dropout(result) if onto is None else result
        normed, onto, apart = self._open(hidden, self.norm_feedforward, self.contract.bias)
        result = self._feed_forward(normed, onto, bias_gradient=not apart)
        return hidden + self.dropout(result) if onto is None else result

    def _open(self, hidden: Tensor, norm: nn.LayerNorm, bias: Tensor) -> tuple[Tensor, Tensor | None, bool]:
        """Return a block's input, what its last product adds to, and whether its last bias has its gradient."""
        # A result that gets dropout cannot be added inside a product.
        if not self.own_kernels or (self.training and self.dropout.p > 0):
            return norm(hidden), None, False
        if suits_stream_norm(hidden):
            return *norm_and_stream(hidden, norm, bias), True
        return norm(hidden), hidden, False

    def _feed_forward(self, hidden: Tensor, onto: Tensor | None, bias_gradient: bool) -> Tensor:
        if self.own_kernels:
            layers = (self.expand, self.contract)
            return feed_forward(hidden, *layers, onto, activation=self.activation, bias_gradient=bias_gradient)
        result: Tensor = self.contract(self.activation(self.expand(hidden)))
        return result

    def _attention(self, hidden: Tensor, onto: Tensor | None, bias_gradient: bool) -> Tensor:
        batch, length, width = hidden.shape
        sizes = (batch, length, 3, self.n_heads, width // self.n_heads)
        project = self.query_key_value
        if self.own_kernels and suits_causal_kernels(hidden, self.n_heads):
            # Attention itself computes the gradient of the bias.
            heads = linear(hidden, project, bias_gradient=False).view(sizes)
            mixed = causal_attention(heads, project.bias)
        else:
            query, key, value = project(hidden).view(sizes).permute(2, 0, 3, 1, 4).unbind(0)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2)
        mixed = mixed.reshape(batch, length, width)
        if self.own_kernels:
            return linear(mixed, self.attention_output, onto, bias_gradient=bias_gradient)
        result: Tensor = self.attention_output(mixed)
        return result


def _initialise(module: nn.Module) -> None:
    """Initialise like GPT-2: normal weights, zero biases."""
    if isinstance(module, nn.Embedding | nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
