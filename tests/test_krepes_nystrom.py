"Whitening: identity kernel, copies, the cut, the signs, and a projection that projects."
import pytest
import torch

from peira_krepes.krepes.nystrom import Whitening, whiten


def points(n=40, d=3, seed=0): return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
def kernel(x, y): return torch.exp(-torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square() / 4)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-8), (torch.float32, 1e-4)])
def test_the_landmarks_kernel_becomes_the_identity(dtype, tolerance):
    K = kernel(points(12), points(12)).to(dtype)
    w = whiten(K, floor=1e-3)
    assert w.T.dtype == w.eigenvalues.dtype == torch.float64
    torch.testing.assert_close(w.T.T @ K.double() @ w.T, torch.eye(w.rank, dtype=torch.float64), rtol=tolerance, atol=tolerance)
    assert (w.eigenvalues.diff() <= 0).all() and w.eigenvalues[-1] > w.floor * w.eigenvalues[0]


@pytest.mark.parametrize("rank", [3, 10, 25])
def test_rank_and_pseudo_inverse_of_a_singular_kernel(rank):
    G = points(25, rank)
    w = whiten(G @ G.T)
    assert w.rank == rank == w.T.shape[1] == len(w.eigenvalues)
    torch.testing.assert_close(w.T @ w.T.T, torch.linalg.pinv(G @ G.T, hermitian=True, rtol=1e-6), rtol=1e-8, atol=1e-8)


def test_copies_change_neither_rank_nor_inner_products():
    x, once, copied = points(), [*range(15)], [*range(15), 0, 0, 7]
    w, v = (whiten(kernel(x[rows], x[rows]), floor=1e-10) for rows in (once, copied))
    assert w.rank == v.rank == 15
    phi, psi = w.coordinates(kernel(x, x[once])), v.coordinates(kernel(x, x[copied]))
    torch.testing.assert_close(phi @ phi.T, psi @ psi.T, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(v.T[[0, 7]], v.T[[15, 17]], rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(v.T[0], v.T[16], rtol=1e-8, atol=1e-8)


def test_nystrom_error_is_the_schur_complement():
    x = points()
    K, K_nm, K_mm = kernel(x, x), kernel(x, x[:10]), kernel(x[:10], x[:10])
    w = whiten(K_mm, floor=1e-12)
    residual = K - K_nm @ torch.linalg.solve(K_mm, K_nm.T)
    torch.testing.assert_close(K - w.coordinates(K_nm) @ w.coordinates(K_nm).T, residual, rtol=1e-8, atol=1e-8)
    missed = w.missed(K_nm, K.diagonal())
    torch.testing.assert_close(missed, residual.diagonal(), rtol=1e-8, atol=1e-8)
    assert missed[:10].abs().max() < 1e-10 and (missed[10:] > 0).all() and (missed <= 1).all()


def test_missed_is_a_share_whatever_the_scale_of_the_kernel():
    x = points()
    shares = [whiten(c * kernel(x[:10], x[:10])).missed(c * kernel(x, x[:10]), c * torch.ones(40)) for c in (1.0, 1e6, 1e-6)]
    for s in shares[1:]: torch.testing.assert_close(s, shares[0], rtol=1e-8, atol=1e-8)


def test_start_is_the_papers():
    x = points()
    K = kernel(x[:10], x[:10])
    w = whiten(K)
    A0 = w.T @ w.start(4)
    values, U = torch.linalg.eigh(K)
    expected = U.flip(1)[:, :4] / values.flip(0)[:4].sqrt()
    torch.testing.assert_close(A0 * A0[0].sign(), expected * expected[0].sign(), rtol=1e-8, atol=1e-8)
    with pytest.raises(ValueError, match=f"dim must be at most the rank.*{w.rank}; got {w.rank + 1}"): w.start(w.rank + 1)
    with pytest.raises(ValueError, match="dim must be at least 1"): w.start(0)


def test_signs_do_not_depend_on_the_eigensolver(monkeypatch):
    K = kernel(points(15), points(15))
    expected, solver = whiten(K), torch.linalg.eigh
    flips = torch.tensor([1.0, -1.0]).repeat(8)[:15].double()
    monkeypatch.setattr(torch.linalg, "eigh", lambda A: (solver(A)[0], solver(A)[1] * flips))
    assert torch.equal(whiten(K).T, expected.T)
    largest = expected.T.abs().argmax(0)
    assert (expected.T.gather(0, largest[None]) > 0).all()


def test_signs_of_tied_entries_go_by_the_first():
    "Two points that mirror each other: the second eigenvector is (1, -1), and rounding must not decide which entry is larger."
    for c in (0.3, 0.1, 1 / 3):
        w = whiten(torch.tensor([[1.0, c], [c, 1.0]], dtype=torch.float64))
        assert w.T[0, 1] > 0 > w.T[1, 1] and (w.T[:, 0] > 0).all()


def test_scale_cancels_in_rank_and_floor():
    K = kernel(points(20), points(20))
    one = whiten(K, floor=1e-4)
    for c in (1e-30, 1e30):
        other = whiten(K * c, floor=1e-4)
        assert (other.rank, other.floor) == (one.rank, one.floor)
        torch.testing.assert_close(other.T * c**0.5, one.T, rtol=1e-8, atol=1e-8)


def test_the_floor_cuts_where_it_says():
    K = torch.diag(torch.tensor([4.0, 1.0, 0.1, 4e-3, 4e-9], dtype=torch.float64))
    assert [whiten(K, floor).rank for floor in (0, 1e-10, 1e-6, 2e-3, 0.1, 0.5)] == [5, 5, 4, 3, 2, 1]
    assert whiten(K, 1e-3).floor == 1e-3                             # 4e-3 is at the floor: cut
    assert whiten(K, 1e-3).rank == 3


def test_the_floor_rises_to_the_most_negative_eigenvalue():
    K = torch.diag(torch.tensor([1.0, 1e-3, 1e-9, -1e-8], dtype=torch.float64))
    w = whiten(K, floor=1e-7)
    assert w.floor == 1e-7 and w.rank == 2
    rounded = torch.diag(torch.tensor([1.0, 1e-3, 1e-7, 3e-8, -5e-8]))
    w = whiten(rounded, floor=1e-12)                                 # float32: rounding explains 5 x 1.2e-7
    assert w.rank == 3 and abs(w.floor - 5e-8) < 1e-13


def test_an_indefinite_kernel_is_refused_with_its_eigenvalue():
    G = points(10, 4)
    v = torch.linalg.eigh(G @ G.T)[1][:, 0]
    K = G @ G.T - 0.239 * torch.outer(v, v)
    with pytest.raises(ValueError, match=r"K_mm must be positive semidefinite; its smallest eigenvalue is -2\.390e-01"): whiten(K)
    with pytest.raises(ValueError, match="positive semidefinite"): whiten(-torch.eye(3))


def test_other_refusals():
    K = kernel(points(6), points(6))
    with pytest.raises(ValueError, match="K_mm must be symmetric"): whiten(torch.triu(K))
    with pytest.raises(ValueError, match="K_mm must be square"): whiten(K[:4])
    with pytest.raises(ValueError, match="K_mm must not be zero"): whiten(torch.zeros(3, 3))
    with pytest.raises(ValueError, match="floor must be"): whiten(K, floor=1)
    with pytest.raises(ValueError, match="K_mm must be finite.*row 2"): whiten(K.index_fill(0, torch.tensor([2]), float("nan")))
    w = whiten(K)
    with pytest.raises(ValueError, match=r"K must have shape \(n, 6\)"): w.coordinates(K[:, :5])
    with pytest.raises(ValueError, match="diagonal must hold 6 positive numbers"): w.missed(K, torch.ones(5))


def test_non_contiguous_half_precision_and_single_landmark():
    K = kernel(points(20), points(20))
    w = whiten(K[::2, ::2], floor=1e-3)
    torch.testing.assert_close(w.T, whiten(K[::2, ::2].contiguous(), floor=1e-3).T)
    assert whiten(K.bfloat16().double().bfloat16(), floor=1e-1).T.dtype == torch.float64
    one = whiten(torch.tensor([[4.0]]))
    assert isinstance(one, Whitening) and one.rank == 1 and one.T.item() == 0.5


def test_agrees_with_scikit_learns_nystroem():
    peer = pytest.importorskip("sklearn.kernel_approximation").Nystroem(kernel="rbf", gamma=0.25, n_components=10, random_state=0)
    x = points()
    theirs = torch.from_numpy(peer.fit_transform(x.numpy()))
    rows = torch.as_tensor(peer.component_indices_)
    ours = whiten(kernel(x[rows], x[rows]), floor=1e-14).coordinates(kernel(x, x[rows]))
    torch.testing.assert_close(ours @ ours.T, theirs @ theirs.T, rtol=1e-8, atol=1e-8)
