"""Fingerprints see every changed bit and every exchange of places, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hasten.extensions.divergence.fingerprint import CHUNK, Fingerprints

CPU = torch.device("cpu")
DTYPES = (
    *(
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float16,
        torch.float8_e4m3fn,
        torch.complex64,
    ),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def made(dtype: torch.dtype, size: int) -> Tensor:
    return torch.randint(
        0, 2, (size,), generator=torch.Generator().manual_seed(size)
    ).to(dtype)


def bits_flipped(tensor: Tensor, byte: int, bit: int) -> Tensor:
    changed = tensor.clone()
    changed.view(torch.uint8)[byte] ^= 1 << bit
    return changed


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_flipped_bit_is_seen_wherever_it_is(dtype: torch.dtype) -> None:
    prints = Fingerprints()
    g = torch.Generator().manual_seed(0)
    for size in (1, 7, 2 * CHUNK + 5):
        tensor = made(dtype, size)
        initial_print = int(prints.compute_all([tensor], CPU))
        assert int(prints.compute_all([tensor.clone()], CPU)) == initial_print
        for _ in range(8):
            byte = int(
                torch.randint(tensor.numel() * tensor.element_size(), (), generator=g)
            )
            assert (
                int(
                    prints.compute_all(
                        [
                            bits_flipped(
                                tensor, byte, 0 if dtype == torch.bool else byte % 8
                            )
                        ],
                        CPU,
                    )
                )
                != initial_print
            )


def test_places_rows_signs_and_nans_count() -> None:
    prints = Fingerprints()
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    nan = x.clone()
    nan[2, 2] = float("nan")
    altered = [
        x.flip(0),
        x.flip(1),
        x.t().reshape(5, 4),
        -x,
        nan,
        torch.zeros_like(x),
        x * (1 + 1e-7),
    ]
    two_signs = x.clone()
    two_signs[0, 0] *= -1
    two_signs[3, 1] *= -1
    fingerprints = prints.compute_all([x, two_signs, *altered], CPU).tolist()
    assert len(set(fingerprints)) == len(fingerprints)
    assert (
        prints.compute_all([nan], CPU).tolist()
        == prints.compute_all([nan.clone()], CPU).tolist()
    )


def test_a_tensor_has_the_same_fingerprint_at_the_same_place_in_any_memory_format() -> (
    None
):
    prints = Fingerprints()
    image = torch.randn(2, 3, 4, 5)
    assert (
        prints.compute_all([image], CPU).tolist()
        == prints.compute_all(
            [image.to(memory_format=torch.channels_last)], CPU
        ).tolist()
    )
    assert prints.compute_all([], CPU).tolist() == []
    assert prints.compute_all([torch.empty(0), torch.empty(0, 3)], CPU).tolist() == [
        0,
        0,
    ]


@pytest.mark.parametrize("size", [1, 10, 256, 1000, CHUNK + 3])
def test_what_stands_beside_a_tensor_does_not_change_its_fingerprint(size: int) -> None:
    prints = Fingerprints()
    x, neighbour = torch.randn(size), torch.randn(300)
    expected_print = int(prints.compute_all([x], CPU))
    assert prints.compute_all([neighbour, x, x.double(), neighbour, x], CPU)[
        [1, 4]
    ].tolist() == [
        expected_print,
        expected_print,
    ]


def test_many_small_tensors_have_fingerprints_of_their_own() -> None:
    prints = Fingerprints()
    tensors = [torch.full((CHUNK // 3,), float(i)) for i in range(1, 9)]
    initial_prints = prints.compute_all(tensors, CPU)
    tensors[5] = tensors[5] + 1
    assert (prints.compute_all(tensors, CPU) != initial_prints).tolist() == [
        i == 5 for i in range(8)
    ]
