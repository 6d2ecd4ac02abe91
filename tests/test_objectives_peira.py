"PEIRA's objective and its training loss: worked values, curvature, running statistics, frozen gradient, state."
import copy
import io

import pytest
import torch

from conformance import MomentConformance, paired, rotation
from oracles import moments_by_loops, peira_energy_by_loops
from peira_krepes.core.moments import TwoViewMoments
from peira_krepes.objectives import PEIRA, PEIRALoss
from peira_krepes.objectives.peira import _energy_and_rows


class TestPEIRA(MomentConformance):
    objectives = [PEIRA(), PEIRA(ridge=0.4, center=True)]

    @staticmethod
    def inner(objective, W_a, W_b):
        "G = W (W'W + ridge)^-1 W' of the stacked, optionally centred embeddings."
        if objective.center: W_a, W_b = W_a - W_a.mean(0), W_b - W_b.mean(0)
        W = torch.cat([W_a, W_b]) / len(W_a) ** 0.5
        return (W @ torch.linalg.inv(W.T @ W + objective.ridge * torch.eye(W.shape[1]).to(W)) @ W.T).flatten()

    @staticmethod
    def outer(objective, g):
        n = int(round(len(g) ** 0.5))
        G, eye = g.reshape(n, n), torch.eye(n, dtype=g.dtype)
        swap = eye.roll(n // 2, 0)
        return -(swap * G).sum() / 2 + objective.ridge ** 2 / 2 * torch.trace(G @ torch.linalg.inv(eye - G))


def signs(rho):
    "Sixteen equally likely pairs of signs with correlation rho, a multiple of 1/8."
    equal = round(8 * (1 + rho) / 2)
    x = torch.tensor([1.0] * 8 + [-1.0] * 8, dtype=torch.float64)[:, None]
    y = x * torch.tensor(([1.0] * equal + [-1.0] * (8 - equal)) * 2, dtype=torch.float64)[:, None]
    assert (x * y).mean() == rho
    return x, y


# ---- the objective ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("ridge", [0.1, 1.5])
def test_value_against_plain_loops(ridge, center):
    z_a, z_b = paired(9, 3)
    assert PEIRA(ridge, center).loss(z_a, z_b).item() == pytest.approx(peira_energy_by_loops([(z_a, z_b)], [1.0], ridge, center), abs=1e-10)


def test_binary_pair():
    x, y = signs(0.25)
    m = TwoViewMoments.from_features(0.2**0.5 * x, 0.2**0.5 * y)
    for objective in (PEIRA(0.1, center=True), PEIRA(0.1)):
        assert objective.value(m).item() == pytest.approx(-0.08, abs=1e-10)
        assert m.S_N.item() == pytest.approx(0.4, abs=1e-10) and objective.predictor(m).item() == pytest.approx(0.2, abs=1e-10)
    constant = torch.full_like(x, 0.45**0.5)
    pair = [torch.cat([0.2**0.5 * z, constant], 1) for z in (x, y)]
    assert PEIRA(0.1).loss(*pair).item() == pytest.approx(-0.485, abs=1e-10)
    assert PEIRA(0.1, center=True).loss(*pair).item() == pytest.approx(-0.08, abs=1e-10)


@pytest.mark.parametrize("rho, sign, expected", [(0.25, 1, -0.08), (-0.75, -1, -0.5 * (0.75**0.5 - 0.1) ** 2), (-0.75, 1, 0.0)])
def test_least_energy_over_the_scale(rho, sign, expected):
    "A negative correlation is used by untied encoders (opposite signs) and ignored by tied ones, whose best is collapse."
    x, y = signs(rho)
    energies = [PEIRA(0.1, center=True).loss(s * x, sign * s * y).item() for s in torch.linspace(0, 1.2, 401, dtype=torch.float64)]
    assert min(energies) == pytest.approx(expected, abs=1e-4) and min(energies) >= expected - 1e-12


def test_negative_correlation_worked_value():
    "rho = -.8 from its moments: N = 2 s^2 = sqrt(.8) - .1, Sigma = .8 N for opposite signs, -.8 N for a tied encoder."
    N = 0.8**0.5 - 0.1
    m = lambda cross: TwoViewMoments(10, torch.zeros(1).double(), torch.zeros(1).double(), *(torch.tensor([[v]]).double() for v in (N / 2, N / 2, cross * N / 2)))
    assert PEIRA(0.1, center=True).value(m(0.8)).item() == pytest.approx(-0.31556, abs=5e-6)
    assert PEIRA(0.1, center=True).value(m(-0.8)).item() > 0


def test_independent_views():
    x, y = signs(0.0)
    assert PEIRA(0.1).loss(*[torch.full_like(x, 0.45**0.5)] * 2).item() == pytest.approx(-0.405, abs=1e-10)
    for s in (0.1, 0.5, 1.0): assert PEIRA(0.1, center=True).loss(s * x, s * y).item() > 0
    assert PEIRA(0.1, center=True).loss(0 * x, 0 * y).item() == 0


def test_predictor_is_not_its_transpose():
    S = lambda *rows: torch.tensor(rows, dtype=torch.float64) / 2
    zero = torch.zeros(2, dtype=torch.float64)
    m = TwoViewMoments(5, zero, zero, S([1, 0], [0, 2]), S([1, 0], [0, 2]), S([0.5, 0.3], [0.3, 0.4]))
    P = PEIRA(0.5).predictor(m)
    assert P[0, 1].item() == pytest.approx(0.12, abs=1e-12) and P[1, 0].item() == pytest.approx(0.2, abs=1e-12)


def test_predictor_is_the_ridge_regression_of_each_view_on_the_other():
    z_a, z_b = paired(50, 4)
    P = PEIRA(0.3).predictor(TwoViewMoments.from_features(z_a, z_b)).requires_grad_()
    cost = ((z_a @ P.T - z_b).square().sum() + (z_b @ P.T - z_a).square().sum()) / 50 + 0.3 * P.square().sum()
    torch.testing.assert_close(torch.autograd.grad(cost, P)[0], torch.zeros(4, 4).double(), rtol=0, atol=1e-10)


def test_auxiliary_loss_is_zero_where_the_objective_is_not():
    "At a stationary point <W, grad E> = 0, so the auxiliary loss tells nothing there."
    x, y = signs(0.25)
    z_a, z_b = (0.2**0.5 * x).requires_grad_(), (0.2**0.5 * y).requires_grad_()
    energy = PEIRA(0.1).loss(z_a, z_b)
    g_a, g_b = torch.autograd.grad(energy, [z_a, z_b])
    assert abs(((z_a * g_a).sum() + (z_b * g_b).sum()).item()) < 1e-12 and energy.item() < -0.07


def test_curvature_does_not_depend_on_the_embedding_basis():
    K_a, K_b = paired(30, 5)
    moments, R = TwoViewMoments.from_features(K_a, K_b), rotation(3)
    A, D = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    plain, turned = PEIRA().curvature(A, moments), PEIRA().curvature(A @ R, moments)
    torch.testing.assert_close(turned.gradient, plain.gradient @ R, rtol=0, atol=1e-10)
    torch.testing.assert_close(turned.ggn(D @ R), plain.ggn(D) @ R, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", [dict(ridge=0), dict(ridge=-1), dict(ridge=float("nan")), dict(ridge="0.1"), dict(ridge=True), dict(center=1), dict(center="yes")])
def test_bad_parameters(options):
    with pytest.raises((ValueError, TypeError), match=next(iter(options))): PEIRA(**options)
    with pytest.raises((ValueError, TypeError), match=next(iter(options))): PEIRALoss(3, **options)


# ---- the training loss -----------------------------------------------------------------------------------------------
def frozen_gradient(z_a, z_b, Sigma, N, ridge, mean_a, mean_b):
    "Autograd of the auxiliary loss with an explicit inverse, P, Q and the means constant."
    u, v = z_a.clone().requires_grad_(), z_b.clone().requires_grad_()
    Q = torch.linalg.inv(N + ridge * torch.eye(len(N)).to(N))
    M = Q @ Sigma @ Q + ridge * torch.eye(len(N)).to(N)
    x, y = u - mean_a, v - mean_b
    return torch.autograd.grad((-(x @ Q * y).sum() + (x @ M * x).sum() / 2 + (y @ M * y).sum() / 2) / len(u), [u, v])


@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_value_and_gradient_over_several_batches(rate, center):
    "Value: E at the weighted average of all batches so far. Gradient: the auxiliary loss's on the last."
    loss, batches = PEIRALoss(3, ridge=0.2, rate=rate, center=center), []
    for step in range(4):
        batches.append(paired(5 + 3 * step, 3, seed=step, shift=step))
        z_a, z_b = (z.requires_grad_() for z in batches[-1])
        value = loss(z_a, z_b)
        weights = [rate * (1 - rate) ** (step - s) for s in range(step + 1)]
        plain = [(a.detach(), b.detach()) for a, b in batches]
        assert value.item() == pytest.approx(peira_energy_by_loops(plain, weights, 0.2, center), abs=1e-10)
        means = [sum(w * b[i].mean(0) for w, b in zip(weights, plain)) / sum(weights) * center for i in (0, 1)]
        wanted = frozen_gradient(*plain[-1], loss.Sigma, loss.N, 0.2, *means)
        for g, w in zip(torch.autograd.grad(value, [z_a, z_b]), wanted): torch.testing.assert_close(g, w, rtol=0, atol=1e-8)
        assert loss.ema_weight.item() == pytest.approx(1 - (1 - rate) ** (step + 1), abs=1e-12)


@pytest.mark.parametrize("center", [False, True])
def test_first_batch_and_rate_one_are_the_plain_objective(center):
    def check(loss, seed):
        z_a, z_b = (z.requires_grad_() for z in paired(10, 4, seed=seed))
        wanted = PEIRA(0.1, center).loss(z_a, z_b)
        got = loss(z_a, z_b)
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)
        for g, w in zip(torch.autograd.grad(got, [z_a, z_b]), torch.autograd.grad(wanted, [z_a, z_b])): torch.testing.assert_close(g, w, rtol=0, atol=1e-10)
    for rate in (0.001, 0.05): check(PEIRALoss(4, rate=rate, center=center), 0)
    memory = PEIRALoss(4, rate=1, center=center)
    for seed in range(3): check(memory, seed)


def test_statistics_are_corrected_symmetric_and_centred():
    batches = [paired(6, 3, seed=s, shift=2.0 * s) for s in range(5)]
    plain, centred = PEIRALoss(3, rate=0.3), PEIRALoss(3, rate=0.3, center=True)
    for b in batches: plain(*b), centred(*b)
    weights = [0.3 * 0.7 ** (4 - s) for s in range(5)]
    average = lambda f: sum(w * f(*b) for w, b in zip(weights, batches)) / sum(weights)
    a, b = average(lambda x, y: x.mean(0)), average(lambda x, y: y.mean(0))
    N, Sigma = average(lambda x, y: (x.T @ x + y.T @ y) / 6), average(lambda x, y: (x.T @ y + y.T @ x) / 6)
    torch.testing.assert_close(plain.N, N, rtol=0, atol=1e-10)
    torch.testing.assert_close(plain.Sigma, Sigma, rtol=0, atol=1e-10)
    torch.testing.assert_close(centred.N, N - torch.outer(a, a) - torch.outer(b, b), rtol=0, atol=1e-10)
    torch.testing.assert_close(centred.Sigma, Sigma - torch.outer(a, b) - torch.outer(b, a), rtol=0, atol=1e-10)
    for S in (plain.N, plain.Sigma, centred.N, centred.Sigma): assert torch.equal(S, S.T)
    assert torch.linalg.eigvalsh(centred.N)[0] > 0


def test_a_change_of_rate_keeps_the_correction_exact():
    loss, (z_a, z_b) = PEIRALoss(3, rate=0.05), paired(8, 3)
    for rate in (0.05, 0.5, 0.01):
        loss.rate = rate
        loss(z_a, z_b)
    torch.testing.assert_close(loss.N, TwoViewMoments.from_features(z_a, z_b).S_N, rtol=0, atol=1e-12)


def test_gradient_through_the_average_loses_the_trace_term():
    "Along W, the trace term of the naive loss has exactly rate / beta of the frozen one's gradient, the penalty all of it."
    loss, rate = PEIRALoss(3, ridge=0.2, rate=0.1), 0.1
    for s in range(2): loss(*paired(20, 3, seed=s))
    before = copy.deepcopy(loss)
    z_a, z_b = (z.requires_grad_() for z in paired(20, 3, seed=2))
    value = loss(z_a, z_b)
    batch = TwoViewMoments.from_features(z_a, z_b)
    Sigma, N, *_ = before._statistics(before._entered(batch))
    trace = -torch.linalg.solve(N + 0.2 * torch.eye(3).double(), Sigma).trace() / 2
    through, = torch.autograd.grad(trace, z_a, retain_graph=True)
    penalty, = torch.autograd.grad(0.1 * batch.S_N.trace(), z_a)
    frozen, = torch.autograd.grad(value, z_a)
    torch.testing.assert_close(through * loss.ema_weight / rate, frozen - penalty, rtol=0, atol=1e-10)


def test_rate_one_memorises_and_averages_do_not():
    "Free embeddings of B rows reach -min(k,B)(1-ridge)^2/2 on their own batch, though the views are independent."
    for rows, k in ((6, 4), (3, 4)):
        free = torch.randn(2, rows, k, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
        loss = PEIRALoss(k, rate=1)
        optimiser = torch.optim.LBFGS([free], max_iter=400, tolerance_grad=1e-9, tolerance_change=0, line_search_fn="strong_wolfe")
        def closure():
            optimiser.zero_grad()
            value = loss(*free)
            value.backward()
            return value
        optimiser.step(closure)
        assert loss(*free).item() == pytest.approx(-0.5 * min(rows, k) * 0.81, abs=1e-8)


def test_rows_solved_against_the_batch_are_those_of_explicit_matrices():
    z_a, z_b = paired(7, 12)                                      # fewer rows than columns
    m = TwoViewMoments.from_features(z_a, z_b)
    value, rows = _energy_and_rows(torch.cat([z_a, z_b]), m.S_s, m.S_N, 0.1)
    wanted = frozen_gradient(z_a, z_b, m.S_s, m.S_N, 0.1, 0, 0)
    torch.testing.assert_close(rows / 7, torch.cat(wanted), rtol=0, atol=1e-8)
    torch.testing.assert_close(value, PEIRA().value(m), rtol=0, atol=1e-10)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e2, 1e4])
def test_float32_is_close_to_float64_at_every_scale(scale):
    "Badly conditioned statistics (scale 1e4: condition 1e9) are solved in float64, so digits are kept."
    z_a, z_b = (scale * z for z in paired(16, 24, dtype=torch.float32))
    got, wanted = PEIRALoss(24), PEIRALoss(24)
    u, v = (z.clone().requires_grad_() for z in (z_a, z_b))
    x, y = (z.double().requires_grad_() for z in (z_a, z_b))
    value, exact = got(u, v), wanted(x, y)
    assert value.dtype == torch.float32 and value.item() == pytest.approx(exact.item(), rel=1e-4, abs=1e-4)
    for g, w in zip(torch.autograd.grad(value, [u, v]), torch.autograd.grad(exact, [x, y])):
        assert (g.double() - w).norm() < 1e-4 * w.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_autocast(dtype):
    z_a, z_b = (z.to(dtype).requires_grad_() for z in paired(16, 4))
    value = PEIRALoss(4)(z_a, z_b)
    value.backward()
    wanted = PEIRALoss(4)(z_a.detach().float(), z_b.detach().float())
    assert value.dtype == torch.float32 and z_a.grad.dtype == dtype and torch.equal(value.detach(), wanted)
    with torch.autocast("cpu", dtype=torch.bfloat16): assert torch.equal(PEIRALoss(4)(z_a.detach().float(), z_b.detach().float()), wanted)


def test_casts_of_the_model_leave_the_statistics_in_float64():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), PEIRALoss(4))
    model[1](*paired(8, 4))
    before = model[1].N
    for cast in (model.half, model.bfloat16, model.float): assert cast()[1].ema_N.dtype == torch.float64 and torch.equal(model[1].N, before)
    assert model.to("meta")[1].ema_N.device.type == "meta"
    with pytest.raises(ValueError, match=r"must be on meta.*got cpu.*Move the loss"): model[1](*paired(8, 4))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["zero", "all rows equal", "duplicated columns", "two rows"])
@pytest.mark.parametrize("center", [False, True])
def test_degenerate_batches(center, kind, dtype):
    z_a, z_b = paired(12, 4)
    if kind == "zero": z_a, z_b = z_a * 0, z_b * 0
    if kind == "all rows equal": z_a, z_b = (z[:1].repeat(12, 1) for z in (z_a, z_b))
    if kind == "duplicated columns": z_a, z_b = (z[:, :1].repeat(1, 4) for z in (z_a, z_b))
    if kind == "two rows": z_a, z_b = z_a[:2], z_b[:2]
    z_a, z_b = (z.to(dtype).requires_grad_() for z in (z_a, z_b))
    loss = PEIRALoss(4, center=center)
    for _ in range(2):
        value = loss(z_a, z_b)
        for g in torch.autograd.grad(value, [z_a, z_b]): assert torch.isfinite(g).all()
        assert torch.isfinite(value)


def test_non_contiguous_views():
    z_a, z_b = paired(9, 4)
    wide = torch.zeros(9, 8, dtype=torch.float64)
    wide[:, ::2] = z_a
    torch.testing.assert_close(PEIRALoss(4)(wide[:, ::2], z_b.T.contiguous().T), PEIRALoss(4)(z_a, z_b), rtol=0, atol=1e-12)


def test_only_one_view_needs_a_gradient():
    z_a, z_b = paired(9, 4)
    z_a.requires_grad_()
    PEIRALoss(4)(z_a, z_b).backward()
    assert z_a.grad is not None and not PEIRALoss(4)(z_a.detach(), z_b).requires_grad


def test_scaled_backward():
    z_a, z_b = (z.requires_grad_() for z in paired(9, 4))
    once, = torch.autograd.grad(PEIRALoss(4)(z_a, z_b), z_a)
    scaled, = torch.autograd.grad(PEIRALoss(4)(z_a, z_b) * 1024 + 1, z_a)
    torch.testing.assert_close(scaled, 1024 * once, rtol=1e-12, atol=0)


def test_second_derivatives_raise():
    z_a, z_b = (z.requires_grad_() for z in paired(9, 4))
    with pytest.raises(RuntimeError, match="no second derivative"): torch.autograd.grad(PEIRALoss(4)(z_a, z_b), z_a, create_graph=True)
    hessian = torch.autograd.functional.hessian(lambda a: PEIRA().loss(a, z_b), z_a)
    assert torch.isfinite(hessian).all() and hessian.abs().max() > 1e-3


# ---- state -----------------------------------------------------------------------------------------------------------
def state(loss): return {k: t.clone() for k, t in loss.state_dict().items()}
def same(a, b): return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_evaluation_leaves_the_state_alone_and_no_grad_training_does_not():
    loss, (z_a, z_b) = PEIRALoss(3), paired(8, 3)
    loss(z_a, z_b)
    before, other = state(loss), paired(8, 3, seed=1)
    evaluated = loss.eval()(*other)
    assert same(before, state(loss))
    with torch.no_grad(): trained = loss.train()(*other)
    assert torch.equal(evaluated, trained) and not same(before, state(loss))
    fresh = PEIRALoss(3).eval()
    torch.testing.assert_close(fresh(z_a, z_b), PEIRA().loss(z_a, z_b), rtol=0, atol=1e-10)
    with pytest.raises(RuntimeError, match="before its first batch"): fresh.Sigma


def test_resuming_from_a_state_dict_is_exact():
    straight, first = PEIRALoss(3, center=True), PEIRALoss(3, center=True)
    batches = [paired(8, 3, seed=s, dtype=torch.float32) for s in range(6)]
    values = [straight(*b) for b in batches]
    for b in batches[:3]: first(*b)
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = PEIRALoss(3, center=True)
    second.load_state_dict(torch.load(file, weights_only=True))
    for wanted, b in zip(values[3:], batches[3:]): assert torch.equal(second(*b), wanted)
    assert same(state(second), state(straight)) and same(state(copy.deepcopy(second)), state(second))
    with pytest.raises(RuntimeError, match="size mismatch"): PEIRALoss(4, center=True).load_state_dict(second.state_dict())


def test_updates_are_out_of_place():
    loss = PEIRALoss(3)
    loss(*paired(8, 3))
    held = loss.ema_N
    kept = held.clone()
    loss(*paired(8, 3, seed=1))
    assert torch.equal(held, kept) and loss.ema_N is not held
    z_a, z_b = (z.requires_grad_() for z in paired(8, 3))
    first, second = loss(z_a, z_b), loss(z_a, z_b)                # two forward passes, then backward through both
    (first + second).backward()
    assert torch.isfinite(z_a.grad).all()


def test_a_refused_batch_leaves_the_state_alone():
    loss, (z_a, z_b) = PEIRALoss(3), paired(8, 3)
    loss(z_a, z_b)
    before, broken = state(loss), z_a.clone()
    broken[5, 1] = float("nan")
    huge = [(1e30 * z).float() for z in (z_a, z_b)]
    for a, b, error, words in ((broken, z_b, ValueError, "z_a .* row 5"), (z_a, -z_b / 0, ValueError, "z_b"), (z_a[:1], z_b[:1], ValueError, "at least 2 row"), (z_a, z_b[:4], ValueError, "same shape"),
                               (z_a[:, :2], z_b[:, :2], ValueError, "3 columns"), (z_a.long(), z_b.long(), TypeError, "z_a"), (*huge, FloatingPointError, "overflow")):
        with pytest.raises(error, match=words): loss(a, b)
        assert same(before, state(loss))


@pytest.mark.parametrize("options", [dict(dim=0), dict(dim=2.0), dict(dim=3, rate=0), dict(dim=3, rate=1.01), dict(dim=3, rate=float("nan"))])
def test_bad_constructor_arguments(options):
    with pytest.raises((ValueError, TypeError), match="rate" if "rate" in options else "dim"): PEIRALoss(**options)


def test_printed_form_tells_the_parameters():
    assert repr(PEIRALoss(8, 0.2, 0.1, True)) == "PEIRALoss(dim=8, ridge=0.2, rate=0.1, center=True)"
    assert repr(PEIRA()) == "PEIRA(ridge=0.1, center=False)"


def test_statistics_beyond_float64_are_refused_and_leave_the_state_alone():
    "Rank 4 of 24 and a second moment 1e24 times the ridge: rounding hides the ridge, and the factorisation fails."
    loss, (z_a, z_b) = PEIRALoss(24), paired(30, 24)
    loss(z_a, z_b)
    before = state(loss)
    with pytest.raises(FloatingPointError, match="no Cholesky factor in torch.float64.*Scale the features down"): PEIRALoss(24)(1e12 * z_a[:2], 1e12 * z_b[:2])
    with pytest.raises(FloatingPointError): loss(1e14 * z_a[:2], 1e14 * z_b[:2])
    assert same(before, state(loss))


# ---- training --------------------------------------------------------------------------------------------------------
def gaussian_pair(c, n=400):
    "Features with exactly these sample correlations across views, zero cross terms and unit second moments."
    c = torch.tensor(c, dtype=torch.float64)
    basis = torch.linalg.qr(torch.randn(n, 2 * len(c), generator=torch.Generator().manual_seed(0), dtype=torch.float64))[0] * n**0.5
    return basis[:, :len(c)], c * basis[:, :len(c)] + (1 - c**2).sqrt() * basis[:, len(c):]


def test_training_a_linear_encoder_reaches_the_closed_form_minimum():
    "Correlations .9 .5 .2 0 after a rotation; ridge .3 keeps modes above .09."
    c = torch.tensor([0.9, 0.5, 0.2, 0.0], dtype=torch.float64)
    x_a, x_b = (x @ rotation(4) for x in gaussian_pair(c.tolist()))
    W, loss = torch.nn.Parameter(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) / 4), PEIRALoss(4, ridge=0.3, rate=0.5)
    optimiser = torch.optim.SGD([W], lr=0.05)
    for _ in range(500):
        optimiser.zero_grad()
        loss(x_a @ W, x_b @ W).backward()
        optimiser.step()
    least = -0.5 * ((c[:3].sqrt() - 0.3) ** 2).sum().item()
    assert PEIRA(0.3).loss(x_a @ W, x_b @ W).item() == pytest.approx(least, abs=1e-6)
    torch.testing.assert_close((torch.linalg.eigvalsh(loss.N) + 0.3)[1:] ** 2, c[:3].flip(0), rtol=0, atol=1e-3)


@pytest.mark.parametrize("step", [0.004, 0.02])
def test_growth_of_a_mode_in_an_unused_column_under_stale_statistics(step):
    "Each step multiplies the lag by (1 - rate)(1 + 2 step (c/ridge - ridge)): stable at .004, a rotation at .02."
    ridge, rate, c = 0.3, 0.05, 0.9
    x_a, x_b = gaussian_pair([c, 0.5])
    W = torch.diag(((torch.tensor([c, 0.5]).double().sqrt() - ridge) / 2).sqrt()) @ torch.eye(2, 3).double()
    loss = PEIRALoss(3, ridge, rate)
    loss(x_a @ W, x_b @ W)
    loss.load_state_dict({k: t / loss.ema_weight for k, t in loss.state_dict().items()})    # as after infinitely many steps
    W[0, 2] += 1e-5
    gradients = []
    for _ in range(25):
        W.requires_grad_()
        g, = torch.autograd.grad(loss(x_a @ W, x_b @ W), W)
        W = (W - step * g).detach()
        gradients.append(g[0, 2].item())
    wanted = (1 - rate) * (1 + 2 * step * (c / ridge - ridge))
    assert (wanted < 1) == (step < 0.01)
    for first, second in zip(gradients, gradients[1:]): assert second / first == pytest.approx(wanted, rel=1e-4)


# statistics carried along with the network ------------------------------------------------------------------------------------

def carried_by_loops(batches, rate, dim):
    "Corrected statistics of the recursion S_t = m_t(now) + (1 - eta_t)(S_(t-1) - m_t(before)), eta_t = eta / (1 - (1-eta)^t)."
    S = None
    for t, (now, before) in enumerate(batches, start=1):
        eta = rate / (1 - (1 - rate) ** t)
        moments = lambda pair: {k: torch.as_tensor(v) for k, v in moments_by_loops(*pair).items() if k != "n"}
        m, old = moments(now), moments(before)
        S = m if S is None else {k: m[k] + (1 - eta) * (S[k] - old[k]) for k in m}
    return S

def drifting(steps=4, n=12, dim=3, seed=0):
    g = torch.Generator().manual_seed(seed)
    W, batches = torch.randn(dim, dim, generator=g, dtype=torch.float64), []
    for _ in range(steps):
        x = torch.randn(2, n, dim, generator=g, dtype=torch.float64) + 0.5
        step = W + 0.1 * torch.randn(dim, dim, generator=g, dtype=torch.float64)
        batches.append(((x[0] @ step, x[1] @ step), (x[0] @ W, x[1] @ W)))
        W = step
    return batches

@pytest.mark.parametrize("center", [False, True])
def test_carried_statistics_are_the_recursion_written_as_loops(center):
    loss, batches = PEIRALoss(3, rate=0.3, center=center), drifting()
    for now, before in batches: loss(*now, previous=before)
    S = carried_by_loops(batches, 0.3, 3)
    a, b = S["mean_a"], S["mean_b"]
    N, Sigma = S["S_aa"] + S["S_bb"], S["S_ab"] + S["S_ab"].T
    if center: N, Sigma = N - torch.outer(a, a) - torch.outer(b, b), Sigma - torch.outer(a, b) - torch.outer(b, a)
    assert torch.linalg.eigvalsh(N)[0] > 0 # nothing was mended here
    torch.testing.assert_close(loss.N, N, rtol=0, atol=1e-10)
    torch.testing.assert_close(loss.Sigma, Sigma, rtol=0, atol=1e-10)

def test_a_network_that_stands_still_carries_nothing():
    plain, carried = PEIRALoss(3, rate=0.3), PEIRALoss(3, rate=0.3)
    for now, _ in drifting():
        assert torch.equal(plain(*now), carried(*now, previous=now))
    torch.testing.assert_close(plain.N, carried.N, rtol=0, atol=1e-14)

def test_carried_statistics_have_no_lag_in_a_steady_drift():
    "Over many draws the mean error is zero within five standard errors; the plain average's is its predicted lag."
    errors = {True: [], False: []}
    for seed in range(40):
        g = torch.Generator().manual_seed(seed)
        losses = {carry: PEIRALoss(1, rate=0.1) for carry in errors}
        for t in range(40):
            z = torch.randn(2, 20, 1, generator=g, dtype=torch.float64)
            for carry, loss in losses.items(): loss(*(1.05**t * z), previous=tuple(1.05 ** (t - 1) * z) if carry else None)
        for carry, loss in losses.items(): errors[carry].append(loss.N.item() / (2 * 1.05 ** (2 * 39)) - 1)
    for carry, wanted in ((True, 0.0), (False, sum(0.1 * 0.9**j * 1.05 ** (-2 * j) for j in range(40)) / (1 - 0.9**40) - 1)):
        e = torch.tensor(errors[carry])
        assert abs(e.mean().item() - wanted) < 5 * e.std().item() / 40**0.5
    assert wanted < -0.3

def test_negative_eigenvalues_of_a_carried_N_are_removed_and_nothing_else():
    loss = PEIRALoss(3, rate=0.3)
    z = torch.eye(3, dtype=torch.float64) * torch.tensor([1.0, 1.0, 1e-3], dtype=torch.float64)
    loss(z, z)
    now, before = z * 1.0, z + torch.tensor([0.0, 0.0, 2.0], dtype=torch.float64) # the third coordinate shrank on this batch by more than there is
    loss(now, now, previous=(before, before))
    raw = PEIRALoss(3, rate=0.3)
    raw(z, z)
    averages = raw._entered(TwoViewMoments.from_features(now, now), TwoViewMoments.from_features(before, before))
    values, vectors = torch.linalg.eigh(averages["N"] / averages["weight"])
    assert values[0] < -0.1
    torch.testing.assert_close(loss.N, (vectors * values.clamp_min(0)) @ vectors.T, rtol=0, atol=1e-10)
    assert torch.linalg.eigvalsh(loss.N)[0] > -1e-12

def test_previous_embeddings_are_checked_like_views_and_leave_the_state():
    loss, ((now, before), *_) = PEIRALoss(3), drifting()
    loss(*now)
    state = {k: v.clone() for k, v in loss.state_dict().items()}
    broken = before[0].clone()
    broken[2, 1] = float("nan")
    for bad, error in (((broken, before[1]), r"previous\[0\] must be finite.*row 2"), ((before[0][:5], before[1][:5]), r"previous\[0\] must have shape"), ((before[0][:, :2], before[1][:, :2]), r"previous\[0\] must have shape"), ((before[0], before[1][:5]), r"previous\[1\] must have shape")):
        with pytest.raises(ValueError, match=error): loss(*now, previous=bad)
    for bad in (before[0], before[:1], 3):
        with pytest.raises(TypeError, match="previous must be a pair"): loss(*now, previous=bad)
    with pytest.raises(FloatingPointError, match="overflow"): loss(*now, previous=tuple(1e200 * z for z in before))
    assert all(torch.equal(v, state[k]) for k, v in loss.state_dict().items())

@pytest.mark.parametrize("center", [False, True])
def test_the_gradient_with_carried_statistics_is_the_auxiliary_losses(center):
    loss, batches = PEIRALoss(3, ridge=0.2, rate=0.3, center=center), drifting()
    for now, before in batches[:-1]: loss(*now, previous=before)
    (z_a, z_b), before = batches[-1]
    u, v = z_a.clone().requires_grad_(), z_b.clone().requires_grad_()
    got = torch.autograd.grad(loss(u, v, previous=before), (u, v))
    S = carried_by_loops(batches, 0.3, 3)
    x, y = (z - S[m] if center else z for z, m in ((u, "mean_a"), (v, "mean_b")))
    Q = torch.linalg.inv(loss.N + 0.2 * torch.eye(3).double())
    inner = Q @ loss.Sigma @ Q + 0.2 * torch.eye(3).double()
    auxiliary = (-(x @ Q * y).sum() + (x @ inner * x).sum() / 2 + (y @ inner * y).sum() / 2) / len(u)
    for g, e in zip(got, torch.autograd.grad(auxiliary, (u, v))): torch.testing.assert_close(g, e, rtol=0, atol=1e-8)


@pytest.mark.parametrize("center", [False, True])
def test_statistics_made_in_inference_mode_can_be_loaded_into_and_trained_with(center):
    loss, plain, other = PEIRALoss(3, rate=0.3, center=center), PEIRALoss(3, rate=0.3, center=center), PEIRALoss(3, rate=0.3, center=center)
    z_a, z_b = paired(20, 3)
    with torch.inference_mode(): value = loss(z_a, z_b)
    assert torch.equal(value, plain(z_a, z_b)) and torch.equal(loss.N, plain.N)
    other(z_b, z_a + 1)
    loss.load_state_dict(other.state_dict())
    assert torch.equal(loss.N, other.N)
    with torch.inference_mode(): seen = z_a.clone()
    loss(seen, z_b); other(z_a, z_b)
    assert torch.equal(loss.Sigma, other.Sigma)
    u = z_a.clone().requires_grad_()
    loss(u, z_b).backward()
    assert u.grad.isfinite().all() and u.grad.norm() > 0


def test_previous_embeddings_may_come_in_another_precision():
    loss, twin, (now, before) = PEIRALoss(3), PEIRALoss(3), drifting()[0]
    before = tuple(z.bfloat16() for z in before)
    assert torch.equal(loss(*now, previous=before), twin(*now, previous=tuple(z.to(now[0].dtype) for z in before))) and torch.equal(loss.N, twin.N)
