"""Argument checks: what passes is returned in the wanted form, what fails names the argument, the value and the remedy."""
import numpy as np
import pytest
import torch

from peira_krepes.core.checks import check_choice, check_count, check_indices, check_matrix, check_number, check_views


@pytest.mark.parametrize("value", [2, 2.0, np.float32(2), np.int64(2), np.array(2.0), torch.tensor(2.0), torch.tensor([2])])
def test_numbers_come_back_as_floats(value):
    x = check_number(value, "ridge")
    assert x == 2.0 and type(x) is float


def test_interval_ends_are_as_stated():
    assert check_number(0, "x", low=0) == 0 and check_number(1, "x", high=1) == 1
    with pytest.raises(ValueError, match=r"x must be a finite number in \(0, 1\]; got 0"): check_number(0, "x", low=0, high=1, open_low=True)
    with pytest.raises(ValueError, match=r"\[0, 1\); got 1"): check_number(1, "x", low=0, high=1, open_high=True)
    with pytest.raises(ValueError, match=r"\(-inf, 3\]; got 4"): check_number(4, "x", high=3)
    with pytest.raises(ValueError, match=r"\[0, inf\); got -1"): check_number(-1, "x", low=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_numbers_are_finite(value):
    with pytest.raises(ValueError, match="finite"): check_number(value, "x")


@pytest.mark.parametrize("value", [True, np.bool_(True), "1", None, [1.0], 1j, torch.ones(2), np.ones((2, 1))])
def test_other_kinds_are_no_numbers(value):
    with pytest.raises(TypeError, match="x must be a number"): check_number(value, "x")


def test_counts():
    assert check_count(np.int32(3), "dim") == 3 and type(check_count(np.int32(3), "dim")) is int
    assert check_count(0, "dim", low=0) == 0
    for value in (3.0, True, "3", None):
        with pytest.raises(TypeError, match="dim must be a whole number"): check_count(value, "dim")
    with pytest.raises(ValueError, match="at least 1; got 0"): check_count(0, "dim")
    with pytest.raises(ValueError, match="between 1 and 4; got 5"): check_count(5, "dim", high=4)


def test_choices_compare_kind_and_value():
    assert check_choice("a", "x", ("a", "b")) == "a"
    with pytest.raises(ValueError, match="x must be one of 1, 2; got True"): check_choice(True, "x", (1, 2))
    with pytest.raises(ValueError, match="'a', 'b'; got 'c'"): check_choice("c", "x", ("a", "b"))


def test_matrices_keep_their_graph_and_precision():
    x = torch.randn(3, 2, requires_grad=True)
    assert check_matrix(x, "x") is x
    for dtype in (np.float16, np.float32, np.float64):
        assert check_matrix(np.ones((3, 2), dtype=dtype), "x").numpy().dtype == dtype
    assert check_matrix(np.arange(6.0).reshape(3, 2)[::-1], "x")[0, 0] == 4
    read_only = np.ones((3, 2)); read_only.setflags(write=False)
    assert check_matrix(read_only, "x").shape == (3, 2)


@pytest.mark.parametrize("x", [torch.ones(2, 2).long(), np.ones((2, 2), dtype=int), np.ones((2, 2), dtype=bool), [[1.0]], None,
                               np.array([["a"]]), np.array([[None]]), torch.ones(2, 2, dtype=torch.complex64)])
def test_matrices_are_floating(x):
    with pytest.raises(TypeError, match="K_x must be a floating tensor or array"): check_matrix(x, "K_x")


def test_matrix_shapes_and_bad_rows():
    for shape in ((4,), (4, 3, 1), (4, 0)):
        with pytest.raises(ValueError, match="x must have shape"): check_matrix(torch.ones(shape), "x")
    with pytest.raises(ValueError, match=r"\(5, 3\); got \(4, 3\)"): check_matrix(torch.ones(4, 3), "x", rows=5, columns=3)
    with pytest.raises(ValueError, match="at least 1 row"): check_matrix(torch.ones(0, 3), "x")
    x = torch.ones(6, 3); x[4, 0], x[2, 1] = float("nan"), float("inf")
    with pytest.raises(ValueError, match="2 of 6 rows hold NaN or infinity, the first is row 2"): check_matrix(x, "x")


def test_views_agree():
    a = torch.ones(4, 3)
    with pytest.raises(ValueError, match="same shape"): check_views(a, a[:3])
    with pytest.raises(ValueError, match="share dtype"): check_views(a, a.double())
    with pytest.raises(ValueError, match="z_a must have at least 2"): check_views(a[:1], a[:1])
    assert len(check_views(a[:1], a[:1], min_rows=1)[0]) == 1
    with pytest.raises(ValueError, match="z_b must be finite"): check_views(a, a * float("nan"))


@pytest.mark.parametrize("indices", [[2, 0], (2, 0), np.array([2, 0], dtype=np.uint8), torch.tensor([2, 0], dtype=torch.int32)])
def test_indices_of_any_kind(indices):
    idx = check_indices(indices, "landmarks", 3)
    assert idx.dtype == torch.int64 and idx.tolist() == [2, 0]


def test_indices_refused():
    for wrong in ([0.0], [True, False], torch.tensor([1j])):
        with pytest.raises(TypeError, match="whole numbers"): check_indices(wrong, "landmarks", 3)
    for wrong, words in (([0, 3], "0..2; got 3 at position 1"), ([-1], "got -1"), ([1, 0, 1], "1 comes 2 times"), ([], "non-empty"), ([[0]], "non-empty list")):
        with pytest.raises(ValueError, match=words): check_indices(wrong, "landmarks", 3)
    assert check_indices([1, 1], "landmarks", 3, distinct=False).tolist() == [1, 1]
