"""Two-view moments: exact merge, precision, gradients, and two processes with different row counts."""
import os
from functools import reduce
from operator import add

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings, strategies as st

from oracles import moments_by_loops
from peira_krepes.core.moments import TwoViewMoments

NAMES = ("mean_a", "mean_b", "S_aa", "S_bb", "S_ab")


def views(n, d=3, seed=0, dtype=torch.float64, shift=0.0):
    g = torch.Generator().manual_seed(seed)
    return tuple((torch.randn(n, d, generator=g, dtype=torch.float64) + shift).to(dtype) for _ in range(2))


def assert_same(m, other, atol=1e-10):
    assert m.n == other.n
    for k in NAMES: torch.testing.assert_close(getattr(m, k), getattr(other, k), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype, atol", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_values_against_plain_loops(dtype, atol):
    a, b = views(11, dtype=dtype, shift=0.5)
    m = TwoViewMoments.from_features(a, b, block_rows=4)
    assert m.n == 11 and m.d == 3 and m.S_ab.dtype == torch.float64
    for k, wanted in moments_by_loops(a, b).items(): np.testing.assert_allclose(getattr(m, k), wanted, rtol=0, atol=atol)
    torch.testing.assert_close(m.S_N, m.S_aa + m.S_bb, rtol=0, atol=0)
    torch.testing.assert_close(m.S_s, m.S_ab + m.S_ab.T, rtol=0, atol=0)
    for S in (m.S_aa, m.S_bb, m.S_N, m.S_s): assert torch.equal(S, S.T)


def test_worked_value_of_one_row():
    m = TwoViewMoments.from_features(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, -1.0]]))
    assert m.n == 1 and m.S_ab.tolist() == [[3, -1], [6, -2]] and m.S_s.tolist() == [[6, 5], [5, -4]] and m.S_N.tolist() == [[10, -1], [-1, 5]]
    assert all(getattr(m.centered(), k).abs().max() == 0 for k in NAMES)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.integers(1, 99), min_size=1, max_size=6, unique=True), shift=st.sampled_from([0.0, 1e3]))
def test_merge_of_any_split_equals_one_pass(cuts, shift):
    a, b = views(100, shift=shift)
    edges = [0, *sorted(cuts), 100]
    parts = [TwoViewMoments.from_features(a[i:j], b[i:j]) for i, j in zip(edges, edges[1:])]
    whole, scale = TwoViewMoments.from_features(a, b), max(1.0, shift**2)
    left, right = reduce(add, parts), reduce(lambda x, y: y + x, reversed(parts))
    for merged in (left, right, reduce(add, parts[::-1])): assert_same(merged, whole, atol=1e-12 * scale)
    if shift == 0: assert_same(left.centered(), whole.centered())


def test_merge_is_associative():
    x, y, z = (TwoViewMoments.from_features(*views(n, seed=n)) for n in (1, 5, 40))
    assert_same((x + y) + z, x + (y + z))


def test_merging_centred_batches_is_not_centring_the_union():
    a, b = views(20); a[10:] += 5
    parts = [TwoViewMoments.from_features(a[r], b[r]) for r in (slice(10), slice(10, 20))]
    assert ((parts[0] + parts[1]).centered().S_aa - (parts[0].centered() + parts[1].centered()).S_aa).diagonal().min() > 4


def test_float32_with_a_large_mean_keeps_its_covariance():
    a, b = views(5000, d=4, dtype=torch.float32, shift=1e3)
    exact = torch.cov(torch.cat([a, b], 1).double().T, correction=0)
    c = TwoViewMoments.from_features(a, b).centered()
    ours = torch.cat([torch.cat([c.S_aa, c.S_ab], 1), torch.cat([c.S_ab.T, c.S_bb], 1)])
    naive = (a.T @ a / len(a) - torch.outer(a.mean(0), a.mean(0))).double()
    assert (ours - exact).abs().max() < 1e-5 and (naive - exact[:4, :4]).abs().max() > 1e-2


def test_rows_sorted_by_class_do_not_hurt_the_pilot():
    a, b = views(4000, d=2, dtype=torch.float32); a[2000:] += 1e3; b[2000:] -= 1e3
    m, exact = TwoViewMoments.from_features(a, b, block_rows=100), TwoViewMoments.from_features(a.double(), b.double())
    for k in NAMES: torch.testing.assert_close(getattr(m, k), getattr(exact, k), rtol=1e-5, atol=0)


@pytest.mark.parametrize("rows", [1, 2, 16, 17, 1000])
def test_block_rows_change_nothing(rows):
    a, b = views(17, shift=2.0)
    assert_same(TwoViewMoments.from_features(a, b, block_rows=rows), TwoViewMoments.from_features(a, b), atol=1e-12)


def test_memory_layout_changes_nothing():
    a, b = views(12, d=4)
    big = torch.zeros(24, 8, dtype=torch.float64); big[::2, ::2] = a
    whole = TwoViewMoments.from_features(a, b)
    for x in (a.T.contiguous().T, big[::2, ::2], a.flip(0).flip(0)): assert_same(TwoViewMoments.from_features(x, b), whole, atol=1e-13)
    assert_same(TwoViewMoments.from_features(a.numpy(), b.numpy()), whole, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_upcast_before_the_products(dtype):
    a, b = views(500, dtype=dtype, shift=3.0)
    m = TwoViewMoments.from_features(a, b)
    for k, wanted in moments_by_loops(a.double(), b.double()).items(): np.testing.assert_allclose(getattr(m, k), wanted, rtol=1e-5)


def test_autocast_does_not_reach_the_products():
    a, b = views(64, dtype=torch.float32)
    whole = TwoViewMoments.from_features(a, b)
    with torch.autocast("cpu", dtype=torch.bfloat16): assert_same(TwoViewMoments.from_features(a, b), whole, atol=0)


def test_float32_sums_where_float64_is_missing():
    a, b = views(50, dtype=torch.float32)
    m = TwoViewMoments.from_features(a, b, dtype=torch.float32)
    assert m.S_ab.dtype == torch.float32
    assert_same(m.to(torch.float64), TwoViewMoments.from_features(a, b), atol=1e-5)
    with pytest.raises(ValueError, match="dtype must be one of"): TwoViewMoments.from_features(a, b, dtype=torch.float16)


def test_gradient_through_every_operation():
    a, b = (z.requires_grad_() for z in views(5, d=2))
    A = views(2, d=2, seed=3)[0].requires_grad_()
    def outputs(a, b, A):
        m = TwoViewMoments.from_features(a[:2], b[:2], block_rows=1) + TwoViewMoments.from_features(a[2:], b[2:])
        m = m.project(A).centered()
        return m.S_N, m.S_s, m.S_ab
    assert torch.autograd.gradcheck(outputs, (a, b, A)) and torch.autograd.gradgradcheck(outputs, (a, b, A))
    first = lambda a, b: tuple(getattr(TwoViewMoments.from_features(a, b), k) for k in NAMES)
    assert torch.autograd.gradcheck(first, (a, b))


def test_gradient_of_float32_features_is_the_float64_one():
    a, b = views(200, dtype=torch.float32, shift=100.0)
    def gradient(z): return torch.autograd.grad(TwoViewMoments.from_features(z, b.to(z)).centered().S_ab.square().sum(), z)[0]
    torch.testing.assert_close(gradient(a.clone().requires_grad_()).double(), gradient(a.double().requires_grad_()), rtol=0, atol=1e-6)


def test_projection_and_conversion():
    a, b = views(30); A = views(3, d=2, seed=5)[0]
    assert_same(TwoViewMoments.from_features(a, b).project(A), TwoViewMoments.from_features(a @ A, b @ A), atol=1e-12)
    m32 = TwoViewMoments.from_features(a, b).to(torch.float32)
    assert m32.S_aa.dtype == torch.float32 and m32.project(A).S_aa.dtype == torch.float32 and m32.to(device="cpu").n == 30
    with pytest.raises(ValueError, match="A must have shape"): TwoViewMoments.from_features(a, b).project(A.T)


def test_refusals():
    a, b = views(6)
    with pytest.raises(ValueError, match="at least 1 row"): TwoViewMoments.from_features(a[:0], b[:0])
    with pytest.raises(ValueError, match="same shape"): TwoViewMoments.from_features(a, b[:5])
    bad = a.clone(); bad[4, 1] = float("nan"); bad[5] = float("inf")
    with pytest.raises(ValueError, match="z_b must be finite; 2 of 6 rows .* first is row 4"): TwoViewMoments.from_features(a, bad)
    with pytest.raises(ValueError, match="block_rows"): TwoViewMoments.from_features(a, b, block_rows=0)
    m, wide = TwoViewMoments.from_features(a, b), TwoViewMoments.from_features(*views(6, d=4))
    with pytest.raises(ValueError, match="share features"): m + wide
    with pytest.raises(ValueError, match="share features"): m + m.to(torch.float32)
    with pytest.raises(TypeError): m + 1
    with pytest.raises(ValueError, match="n must be at least 1"): TwoViewMoments(0, *(getattr(m, k) for k in NAMES))
    with pytest.raises(ValueError, match="S_bb must have shape"): TwoViewMoments(6, m.mean_a, m.mean_b, m.S_aa, wide.S_bb, m.S_ab)


# ---- two processes ----

SPLIT, ROWS = 3, 10


def loss_of(m): return (m.centered().S_ab @ m.S_N).square().sum() + m.mean_a.sum() * m.mean_b.prod()


def worker(rank, folder):
    "One of two processes with 3 and 7 rows of a batch of 10, and the same linear encoder."
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    a, b = views(ROWS, d=4, shift=1.0)
    rows = slice(SPLIT) if rank == 0 else slice(SPLIT, ROWS)
    theta = views(4, d=3, seed=9)[0].requires_grad_()
    m = TwoViewMoments.from_features(a[rows] @ theta, b[rows] @ theta).all_reduce()
    loss = loss_of(m)
    gradient, = torch.autograd.grad(loss, theta)
    local = gradient.clone()
    dist.all_reduce(gradient)
    torch.save({"n": m.n, "loss": loss.detach(), "gradient": gradient / 2, "local": local} | {k: getattr(m, k).detach() for k in NAMES}, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0) # all is written; gloo's threads now and then abort in the interpreter's teardown


def test_two_processes_with_unequal_rows_equal_the_union(tmp_path):
    mp.spawn(worker, (str(tmp_path),), nprocs=2)
    a, b = views(ROWS, d=4, shift=1.0)
    theta = views(4, d=3, seed=9)[0].requires_grad_()
    union = TwoViewMoments.from_features(a @ theta, b @ theta)
    loss = loss_of(union)
    gradient, = torch.autograd.grad(loss, theta)
    ranks = [torch.load(tmp_path/f"{r}.pt") for r in (0, 1)]
    for got in ranks:
        assert got["n"] == ROWS
        for k in NAMES: torch.testing.assert_close(got[k], getattr(union, k).detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(got["loss"], loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(got["gradient"], gradient, rtol=1e-10, atol=1e-10)
    assert (ranks[0]["local"] - ranks[1]["local"]).abs().max() > 1e-3 # the processes did hold different rows


def test_all_reduce_without_a_group_is_the_identity():
    assert "RANK" not in os.environ or not dist.is_initialized()
    m = TwoViewMoments.from_features(*views(4))
    assert m.all_reduce() is m


def test_the_constructor_wants_tensors_of_one_precision():
    z, e = torch.zeros(3), torch.eye(3)
    for arguments, error, words in (((5, [0.0] * 3, z, e, e, e), TypeError, "mean_a must be a floating tensor"), ((5, z, None, e, e, e), TypeError, "mean_b"), ((5, z, z, e, e.long(), e), TypeError, "S_bb"),
                                    ((5, z, z, e, e, e.double()), ValueError, "S_ab must share dtype"), ((5, z[0], z, e, e, e), ValueError, r"mean_a must have shape \(d,\)"), ((5, e, z, e, e, e), ValueError, "mean_a must have shape")):
        with pytest.raises(error, match=words): TwoViewMoments(*arguments)


def test_projecting_under_autocast_keeps_the_precision():
    a, b = (torch.randn(30, 3, generator=torch.Generator().manual_seed(s)) for s in (0, 1))
    m, A = TwoViewMoments.from_features(a, b, dtype=torch.float32), torch.randn(3, 2, generator=torch.Generator().manual_seed(2))
    with torch.autocast("cpu", dtype=torch.bfloat16): found = m.project(A)
    assert found.S_ab.dtype == torch.float32 and torch.equal(found.S_ab, m.project(A).S_ab)
