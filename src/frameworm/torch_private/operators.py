"""Single operations whose public function would choose another kernel or do more."""

from __future__ import annotations

import torch

from frameworm.torch_private.lookup import function

_aten = torch.ops.aten
# What `torch.dropout` and its relatives are attributes of, for layers that call them there.
FUNCTIONS = torch._VF

# Softmax of half precision into fp32 in one pass, as GPUs do it; dry runs on the CPU ask for it by name.
softmax_to = function(torch, "_softmax")
log_softmax_to = function(torch, "_log_softmax")
# The gradient of a softmax from its result; autograd would keep more.
softmax_backward = function(_aten, "_softmax_backward_data")
# Attention of sequences of different lengths, with dropout, which `varlen_attn` has not.
flash_attention_varlen = function(_aten, "_flash_attention_forward")
# torch's attention for CPUs and its gradient, for groups of sequences of one length.
cpu_attention = function(_aten, "_scaled_dot_product_flash_attention_for_cpu")
cpu_attention_backward = function(_aten, "_scaled_dot_product_flash_attention_for_cpu_backward")
# The kernels that a GPU would choose, in a dry run without one.
flash_attention = function(_aten, "_scaled_dot_product_flash_attention")
efficient_attention = function(_aten, "_scaled_dot_product_efficient_attention")
