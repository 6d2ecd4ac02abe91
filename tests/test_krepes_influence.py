"Influence: the definition, the balance, the guard, the ranking, and what a copied landmark does."
import pytest
import torch
from oracles import influence_by_loops

from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.krepes.influence import influence, landmark_norms, top_landmarks
from peira_krepes.krepes.newton import gauss_newton
from peira_krepes.krepes.nystrom import whiten
from peira_krepes.objectives import PEIRA


def random(t=6, m=9, h=4, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(t, m, generator=g, dtype=torch.float64), torch.randn(m, h, generator=g, dtype=torch.float64)


def test_both_scores_are_their_definitions():
    K_x, dA = random()
    unsigned, signed, lengths = (torch.tensor(v, dtype=torch.float64) for v in influence_by_loops(K_x.tolist(), dA.tolist()))
    torch.testing.assert_close(influence(K_x, dA), unsigned, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(influence(K_x, dA, signed=True), signed, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(influence(K_x, dA, signed=True).sum(1), lengths, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_signed_scores_complete_and_bounded_by_unsigned(dtype, tolerance):
    K_x, dA = (x.to(dtype) for x in random(50, 200, 16))
    signed, unsigned = influence(K_x, dA, signed=True), influence(K_x, dA)
    torch.testing.assert_close(signed.sum(1), (K_x.double() @ dA.double()).norm(dim=1).to(dtype), rtol=tolerance, atol=tolerance)
    assert (signed.abs() <= unsigned * (1 + tolerance)).all()
    assert (signed < 0).any() and signed.dtype == dtype


def test_completeness_is_a_derivative():
    "d/d eps of the length of the shift, when the contribution of one landmark is scaled by 1 + eps."
    K_x, dA = random(4)
    scale = torch.ones_like(K_x).requires_grad_()
    ((K_x * scale) @ dA).norm(dim=1).sum().backward()
    torch.testing.assert_close(influence(K_x, dA, signed=True), scale.grad, rtol=1e-10, atol=1e-10)


def test_rotation_leaves_scores_and_scaling_scales_them():
    K_x, dA = random()
    R = torch.linalg.qr(torch.randn(4, 4, dtype=torch.float64))[0]
    for signed in (False, True):
        torch.testing.assert_close(influence(K_x, dA @ R, signed), influence(K_x, dA, signed), rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(influence(K_x, -3 * dA, signed), 3 * influence(K_x, dA, signed), rtol=1e-10, atol=1e-10)


def test_no_shift_no_direction():
    K_x, dA = random()
    assert not influence(torch.zeros_like(K_x), dA, signed=True).any()
    assert not influence(K_x, torch.zeros_like(dA), signed=True).any()
    opposed = torch.stack([dA[0], -3 * dA[0], dA[1]])
    rows = torch.tensor([[0.3, 0.1, 0.0], [0.3, 0.1, 1e-3]], dtype=torch.float64)
    for dtype in (torch.float64, torch.float32):                     # 0.3 - 3 x 0.1 is not zero in float32, and neither once it is cast to float64
        for A in (opposed, opposed.to(dtype)):
            scores = influence(rows.to(dtype), A, signed=True)
            assert not scores[0].any()
            assert abs(scores[1].sum() - 1e-3 * dA[1].norm()) < 1e-3 * 1e-3


def test_tiny_shifts_are_not_taken_for_zero():
    K_x, dA = random()
    for scale in (1e-30, 1e-150):
        torch.testing.assert_close(influence(K_x * scale, dA, signed=True) / scale, influence(K_x, dA, signed=True), rtol=1e-8, atol=1e-8)


def test_mixed_precision_graphs_and_layout():
    K_x, dA = random()
    scores = influence(K_x.float(), dA.clone().requires_grad_())
    assert scores.dtype == torch.float64 and not scores.requires_grad
    torch.testing.assert_close(influence(K_x.T.contiguous().T, dA.T.contiguous().T, True), influence(K_x, dA, True))
    assert influence(K_x.bfloat16(), dA.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(influence(K_x.numpy(), dA.numpy()), influence(K_x, dA))


def test_landmark_norms():
    K_x, dA = random()
    torch.testing.assert_close(landmark_norms(dA), torch.tensor([sum(v * v for v in row) ** 0.5 for row in dA.tolist()], dtype=torch.float64))
    torch.testing.assert_close(landmark_norms(dA), influence(torch.ones(1, 9, dtype=torch.float64), dA)[0])


# ---- ranking ---------------------------------------------------------------------------------------------------------
def test_ranking_in_both_directions():
    scores = torch.tensor([[0.5, -2.0, 0.1, 1.0], [-1.0, -3.0, -2.0, -4.0]])
    positions, values = top_landmarks(scores, 2)
    assert positions.tolist() == [[3, 0], [0, 2]] and values.tolist() == [[1.0, 0.5], [-1.0, -2.0]]
    positions, values = top_landmarks(scores, 2, largest=False)
    assert positions.tolist() == [[1, 2], [3, 1]]
    torch.testing.assert_close(values, scores.gather(1, positions))


@pytest.mark.parametrize("largest", [True, False])
def test_ties_go_by_position(largest):
    scores = torch.zeros(3, 500)
    scores[:, 250] = 1.0 if largest else -1.0
    positions, _ = top_landmarks(scores, 4, largest)
    assert positions.tolist() == [[250, 0, 1, 2]] * 3


def test_all_landmarks_is_a_full_ranking():
    scores = random()[0]
    positions, values = top_landmarks(scores, 9)
    assert (values.diff(dim=1) <= 0).all() and torch.equal(positions.sort(1)[0], torch.arange(9).expand(6, 9))


def test_refusals_name_the_argument():
    K_x, dA = random()
    with pytest.raises(ValueError, match="k must be between 1 and 9; got 10"): top_landmarks(K_x, 10)
    with pytest.raises(ValueError, match="scores must be finite.*row 1"): top_landmarks(K_x.index_fill(0, torch.tensor([1]), float("nan")), 2)
    with pytest.raises(ValueError, match=r"dA must have shape \(9, d\); got \(8, 4\)"): influence(K_x, dA[:-1])
    with pytest.raises(ValueError, match="K_x must be finite"): influence(K_x * torch.inf, dA)
    with pytest.raises(TypeError, match="dA must be a floating"): landmark_norms([1, 2])


# ---- a landmark listed twice -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("center", [False, True])
def test_copies_share_the_influence_evenly(copies, center):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(200, 3, generator=g, dtype=torch.float64)
    views = [x + 0.2 * torch.randn(200, 3, generator=g, dtype=torch.float64) for _ in range(2)]
    kernel = lambda u, v: torch.exp(-torch.cdist(u, v, compute_mode="donot_use_mm_for_euclid_dist").square())

    def explain(rows):
        w = whiten(kernel(x[rows], x[rows]), floor=1e-10)
        assert w.rank == 8
        moments = TwoViewMoments.from_features(*(w.coordinates(kernel(v, x[rows])) for v in views))
        step = gauss_newton(PEIRA(center=center), moments, w.start(8), damping=1e-2, tol=1e-10)
        K = kernel(x, x[rows])
        return K @ w.T @ step.Theta, influence(K, w.T @ (step.Theta - w.start(8))), influence(K, w.T @ (step.Theta - w.start(8)), signed=True)

    f, *once = explain([*range(8)])
    f_copied, *twice = explain([*range(8)] + [0] * copies)
    torch.testing.assert_close(f_copied @ f_copied.T, f @ f.T, rtol=1e-8, atol=1e-8)
    U, _, V = torch.linalg.svd(f_copied.T @ f)
    torch.testing.assert_close(f_copied @ U @ V, f, rtol=1e-8, atol=1e-8)      # the same function, after one rotation
    for one, two in zip(once, twice):
        torch.testing.assert_close(two[:, 1:8], one[:, 1:], rtol=1e-8, atol=1e-8)
        for copy in [0, *range(8, 8 + copies)]: torch.testing.assert_close(two[:, copy], one[:, 0] / (1 + copies), rtol=1e-8, atol=1e-8)
