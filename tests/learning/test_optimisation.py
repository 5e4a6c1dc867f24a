"""Half precision on a CPU computes the same, and leaves nothing changed behind."""

import pytest
import torch
import torch.nn.functional as F

from stam.learning.optimisation import autocast

CPU = torch.device("cpu")
is_allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed


def attention_and_gradient(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 3, 12, 8, generator=random).to(dtype) for _ in range(3))
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    found = F.scaled_dot_product_attention(query.requires_grad_(), key, value, attn_mask=mask)
    (gradient,) = torch.autograd.grad(found.square().sum(), query)
    return found.float(), gradient.float()


def test_attention_in_half_precision_agrees_with_single():
    with autocast(CPU, "bfloat16"):
        half = attention_and_gradient(torch.bfloat16)
    for found, wanted in zip(half, attention_and_gradient(torch.float32), strict=True):
        torch.testing.assert_close(found, wanted, atol=0.05, rtol=0.05)


def test_what_is_allowed_is_as_it_was():
    before = is_allowed()
    with autocast(CPU, "float32"):
        assert is_allowed() == before
    with pytest.raises(KeyError), autocast(CPU, "bfloat16"):
        assert is_allowed()
        raise KeyError
    assert is_allowed() == before
