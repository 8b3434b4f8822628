"""The best token is the one torch would take, ties and broken numbers included."""

import pytest
import torch

from medusa_cli.kernels.argmax import argmax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (1, 5, 301), (3, 4, 49)])
def test_it_is_the_one_torch_takes(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    logits = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    found = argmax(logits)
    assert torch.equal(found, logits.argmax(-1))
    assert found.dtype == torch.long


def test_of_equals_it_is_the_first() -> None:
    assert argmax(torch.tensor([[0.0, 2.0, 1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, -torch.inf])
def test_broken_numbers_are_taken_as_torch_takes_them(broken: float) -> None:
    logits = torch.tensor([[1.0, broken, 2.0, broken], [broken, broken, broken, broken]])
    assert torch.equal(argmax(logits), logits.argmax(-1))


def test_a_view_is_read_where_it_lies() -> None:
    logits = torch.randn(4, 6, 50)[:, ::2, 5:]
    with torch.inference_mode():
        assert torch.equal(argmax(logits), logits.argmax(-1))


def test_what_comes_back_can_be_gathered_with() -> None:
    with torch.inference_mode():
        logits = torch.randn(2, 3, 11)
        assert logits.gather(-1, argmax(logits)[..., None]).shape == (2, 3, 1)
