"""Jagged and keyed tensors behave as those of torchrec, with which the same tests run where it is installed."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest
import torch

import thermocline.torchrec as ours

SIZES = {"a": [2], "b": [1, 1]}
INSTALLED = importlib.util.find_spec("torchrec") is not None


@pytest.fixture(
    params=[
        "thermocline.torchrec",
        pytest.param("torchrec", marks=pytest.mark.skipif(not INSTALLED, reason="torchrec is not installed")),
    ]
)
def lib(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def kjt_of(lib: Any, weights: bool = False) -> Any:
    #      example 0   1    2
    # a    [0, 1]  []   [2]
    # b    [3]     [4]  [5, 6, 7]
    values = torch.arange(8)
    return lib.KeyedJaggedTensor(
        ["a", "b"],
        values,
        values / 2 if weights else None,
        lengths=torch.tensor([2, 0, 1, 1, 1, 3], dtype=torch.int32),
    )


def bags(tensor: Any) -> list[list[float]]:
    return [bag.tolist() for bag in tensor.to_dense()]


def test_keyed_jagged_tensor(lib: Any) -> None:
    kjt = kjt_of(lib, weights=True)
    assert (kjt.keys(), kjt.stride(), kjt.stride_per_key()) == (["a", "b"], 3, [3, 3])
    assert kjt.offsets().tolist() == [0, 2, 2, 3, 4, 5, 8]
    assert (kjt.length_per_key(), kjt.offset_per_key()) == ([3, 5], [0, 3, 8])
    assert not kjt.variable_stride_per_key()
    assert kjt.inverse_indices_or_none() is None
    assert bags(kjt["b"]) == [[3], [4], [5, 6, 7]]
    assert kjt["b"].weights().tolist() == [1.5, 2, 2.5, 3, 3.5]
    assert {key: bags(part) for key, part in kjt.to_dict().items()} == {
        "a": [[0, 1], [], [2]],
        "b": [[3], [4], [5, 6, 7]],
    }
    assert kjt_of(lib).weights_or_none() is None
    assert kjt.to("cpu").sync().unsync().keys() == ["a", "b"]


def test_offsets_give_lengths(lib: Any) -> None:
    kjt = lib.KeyedJaggedTensor.from_offsets_sync(["a"], torch.arange(3), torch.tensor([0, 1, 1, 3]))
    assert kjt.lengths().tolist() == [1, 0, 2]
    assert kjt.stride() == 3


def test_permute_split_and_concat(lib: Any) -> None:
    kjt = kjt_of(lib, weights=True)
    turned = kjt.permute([1, 0])
    assert turned.keys() == ["b", "a"]
    assert turned.values().tolist() == [3, 4, 5, 6, 7, 0, 1, 2]
    assert turned.lengths().tolist() == [1, 1, 3, 2, 0, 1]
    assert turned.weights().tolist() == [1.5, 2, 2.5, 3, 3.5, 0, 0.5, 1]
    first, second = kjt.split([1, 1])
    assert (first.keys(), second.keys()) == (["a"], ["b"])
    assert second.values().tolist() == [3, 4, 5, 6, 7]
    joined = lib.KeyedJaggedTensor.concat([second, first])
    assert joined.keys() == ["b", "a"]
    assert joined.values().tolist() == turned.values().tolist()
    again = lib.KeyedJaggedTensor.from_jt_dict(kjt.to_dict())
    assert again.values().tolist() == kjt.values().tolist()
    assert again.lengths().tolist() == kjt.lengths().tolist()


def test_empty(lib: Any) -> None:
    empty = lib.KeyedJaggedTensor.empty(is_weighted=True)
    assert (empty.keys(), empty.values().numel(), empty.weights().numel()) == ([], 0, 0)
    assert lib.KeyedJaggedTensor.empty_like(kjt_of(lib)).keys() == []


def test_jagged_tensor(lib: Any) -> None:
    dense = torch.tensor([[1, 2, 3], [4, 5, 6]])
    jagged = lib.JaggedTensor.from_dense_lengths(dense, torch.tensor([2, 0]))
    assert bags(jagged) == [[1, 2], []]
    jagged = lib.JaggedTensor.from_dense([torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0, 9.0])])
    assert jagged.offsets().tolist() == [0, 1, 1, 4]
    assert jagged.to_padded_dense().tolist() == [[1, 0, 0], [0, 0, 0], [7, 8, 9]]
    assert jagged.to_padded_dense(2, 5.0).tolist() == [[1, 5], [5, 5], [7, 8]]
    vectors = torch.arange(8.0).reshape(4, 2).requires_grad_()
    padded = lib.JaggedTensor(vectors, lengths=torch.tensor([1, 0, 3])).to_padded_dense(2)
    assert padded.tolist() == [[[0, 1], [0, 0]], [[0, 0], [0, 0]], [[2, 3], [4, 5]]]
    padded.sum().backward()
    assert vectors.grad is not None
    assert vectors.grad.tolist() == [[1, 1], [1, 1], [1, 1], [0, 0]]


def test_keyed_tensor(lib: Any) -> None:
    parts = [torch.ones(2, 1), 2 * torch.ones(2, 2), 3 * torch.ones(2, 3)]
    kt = lib.KeyedTensor.from_tensor_list(["a", "b", "c"], parts)
    assert (kt.keys(), kt.length_per_key(), list(kt.offset_per_key())) == (["a", "b", "c"], [1, 2, 3], [0, 1, 3, 6])
    assert kt.values().shape == (2, 6)
    assert kt["b"].tolist() == [[2, 2], [2, 2]]
    assert {key: part.tolist() for key, part in kt.to_dict().items()}["c"] == [[3, 3, 3], [3, 3, 3]]
    other = lib.KeyedTensor(["d"], [1], 4 * torch.ones(2, 1))
    first, second = lib.KeyedTensor.regroup([kt, other], [["d", "a"], ["c", "a"]])
    assert first.tolist() == [[4, 1], [4, 1]]
    assert second.tolist() == [[3, 3, 3, 1], [3, 3, 3, 1]]
    named = lib.KeyedTensor.regroup_as_dict([kt, other], [["d", "a"], ["b", "c"]], ["x", "y"])
    assert {name: part.shape[1] for name, part in named.items()} == {"x": 2, "y": 5}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ours.KeyedJaggedTensor(["a"], torch.arange(2)), "neither lengths nor offsets are given"),
        (
            lambda: ours.KeyedJaggedTensor(["a"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64), stride=3),
            "2 bags do not match 1 keys and stride 3",
        ),
        (
            lambda: ours.KeyedJaggedTensor(
                ["a"], torch.arange(2), lengths=torch.ones(2, dtype=torch.int64), stride_per_key_per_rank=[[2]]
            ),
            "stride_per_key_per_rank is given: a batch size per feature is not supported",
        ),
        (
            lambda: ours.KeyedJaggedTensor.from_jt_dict(
                {key: ours.JaggedTensor(torch.arange(2), lengths=torch.tensor(sizes)) for key, sizes in SIZES.items()}
            ),
            "a batch size per feature is not supported: give every feature the same number of examples",
        ),
        (lambda: ours.KeyedTensor(["a"], [2], torch.ones(3, 3)), "do not match values of shape"),
    ],
)
def test_mistakes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
