"KREPES against a dense float64 pipeline; identities, files, samples, refusals; and an encoder that is left alone."
import copy
import json
import warnings
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from oracles import audit_barlow, audit_kernel, audit_peira, audit_surrogate, concept_scores
from safetensors import safe_open
from safetensors.torch import save_file
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import peira_krepes.krepes.audit as audit_module
from peira_krepes.krepes import KREPES, Concept
from peira_krepes.krepes.samples import features_of, fingerprint, row_count, tiles, view_rows
from peira_krepes.objectives import PEIRA, BarlowTwins, Curvature, Objective

N, M, DIM = 40, 7, 3
CASES = {"PEIRA": (PEIRA(0.1), audit_peira(0.1)), "BarlowTwins": (BarlowTwins(0.02), audit_barlow(0.02))}


def mlp(seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    net = nn.Sequential(nn.Flatten(), nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 5)).to(dtype).eval()
    for p in net.parameters(): p.data = (0.6 * torch.randn(p.shape, generator=g, dtype=torch.float64)).to(dtype)
    return net


def views(n=N, dtype=torch.float64, seed=1):
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(n, 2, 3, generator=g, dtype=torch.float64)
    return a.to(dtype), (a + 0.4 * torch.randn(n, 2, 3, generator=g, dtype=torch.float64)).to(dtype)


def fitted(objective=PEIRA(), dtype=torch.float64, **options):
    return KREPES(objective, **{"n_landmarks": M, "dim": DIM, "damping": 0.1} | options).fit(mlp(dtype=dtype), *views(dtype=dtype))


X = views(11, seed=2)[0]


# ---- the whole pipeline -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["trace", "sum"])
@pytest.mark.parametrize("name", CASES)
def test_equals_the_dense_pipeline(name, kind):
    objective, dense = CASES[name]
    landmarks, net, (a, b) = [3, 30, 12, 7, 0, 21, 39], mlp(), views()
    model = KREPES(objective, dim=DIM, landmarks=landmarks, kernel=kind, damping=0.1).fit(net, a, b)
    raw = lambda x: audit_kernel(net, x, a[landmarks], kind)
    scale, A0, dA = audit_surrogate(raw(a), raw(b), landmarks, DIM, dense, 0.1)
    assert model.history[0]["attempts"] == 1 and model.kernel_scale_ == pytest.approx(scale.item(), rel=1e-12)
    K = raw(X) / scale
    signs = torch.sign((model.prior(X) * (K @ A0)).sum(0))  # an eigenvector's sign is free
    assert torch.allclose(model.prior(X), K @ A0 * signs, atol=1e-8)
    assert torch.allclose(model.transform(X), K @ (A0 + dA) * signs, atol=1e-8)
    shift = K @ dA
    assert torch.allclose(model.influence(X), K.abs() * dA.norm(dim=1), atol=1e-8)
    assert torch.allclose(model.influence(X, signed=True), K * (shift @ dA.T) / shift.norm(dim=1, keepdim=True), atol=1e-8)
    v = torch.tensor([1.0, -2.0, 0.5])
    assert torch.allclose(model.concept_influence(X, v * signs), concept_scores(K, dA, v), atol=1e-8)


@pytest.mark.parametrize("name", CASES)
def test_the_accounts_balance(name):
    model = fitted(CASES[name][0])
    assert torch.equal(model.transform(X), model.prior(X) + model.shift(X))
    assert torch.allclose(model.influence(X, signed=True).sum(1), model.shift(X).norm(dim=1), atol=1e-10)
    v = torch.tensor([0.3, 1.0, -1.0], dtype=torch.float64)
    assert torch.allclose(model.concept_influence(X, v).sum(1), model.shift(X) @ v / v.norm(), atol=1e-10)
    a, b = views()
    assert CASES[name][0].loss(model.transform(a), model.transform(b)).item() == pytest.approx(model.history[0]["loss"], rel=1e-10)
    assert CASES[name][0].loss(model.prior(a), model.prior(b)).item() == pytest.approx(model.history[0]["loss_before"], rel=1e-10)
    assert model.history[0]["loss"] < model.history[0]["loss_before"]


def test_the_loss_never_ends_higher_even_with_hardly_any_damping():
    model = fitted(PEIRA(0.01), damping=1e-9, n_landmarks=20, dim=10)
    assert model.history[0]["loss"] <= model.history[0]["loss_before"] and model.history[0]["damping"] >= 1e-9


def test_prior_is_the_whitened_kernel_of_the_landmarks():
    model = fitted(n_landmarks=M, dim=M)
    z = model.prior(views()[0][model.landmark_indices_])
    K_mm = model.kernel_rows(views()[0][model.landmark_indices_])
    assert torch.allclose(z @ z.T, K_mm, atol=1e-8) and K_mm.diagonal().mean().item() == pytest.approx(1, abs=1e-12)


def test_top_landmarks_are_positions_in_the_training_set():
    model = fitted(landmarks=[5, 33, 2, 17])
    scores = model.influence(X, signed=True)
    for k, largest in ((4, True), (2, False)):
        positions, top = model.top_landmarks(X, k=k, signed=True, largest=largest)
        assert positions.shape == top.shape == (11, k)
        for t in range(11):
            order = sorted(range(4), key=lambda l: -scores[t, l].item() if largest else scores[t, l].item())[:k]
            assert positions[t].tolist() == [[5, 33, 2, 17][l] for l in order] and torch.equal(top[t], scores[t, order])
    with pytest.raises(ValueError, match="k must be"): model.top_landmarks(X, k=5)


# ---- invariances --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dim", [M, DIM])
def test_rotated_outputs_change_nothing_for_the_trace_kernel_and_peira(dim):
    net = mlp()
    R = torch.linalg.qr(torch.randn(5, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)).Q
    net[3].weight.data, net[3].bias.data = R @ net[3].weight.data, R @ net[3].bias.data
    options = dict(landmarks=list(range(M)), dim=dim, damping=0.1)
    one, two = (KREPES(PEIRA(), **options).fit(e, *views()) for e in (mlp(), net))
    assert torch.allclose(one.influence(X), two.influence(X), atol=1e-8)
    assert torch.allclose(one.transform(X), two.transform(X), atol=1e-8)


def gaussian(x, y): return torch.exp(-torch.cdist(x.flatten(1), y.flatten(1)) ** 2 / 4)


def test_a_landmark_twice_keeps_the_embedding_and_halves_its_influence():
    a, b = (torch.cat([v, v[:1]]) for v in views())
    one, two = (KREPES(PEIRA(), dim=5, kernel=gaussian, landmarks=rows, damping=0.1).fit(None, a, b) for rows in ([0, 4, 9, 20, 30], [0, 4, 9, 20, 30, N]))
    assert one.rank_ == two.rank_ == 5
    R = torch.linalg.lstsq(one.prior(X), two.prior(X)).solution  # an embedding is defined up to a rotation
    assert torch.allclose(R @ R.T, torch.eye(5, dtype=torch.float64), atol=1e-8)
    assert torch.allclose(one.transform(X) @ R, two.transform(X), atol=1e-8)
    assert torch.allclose(two.influence(X)[:, [0, 5]], one.influence(X)[:, [0, 0]] / 2, atol=1e-8)


def test_the_scale_of_the_kernel_does_not_matter():
    one, two = (KREPES(PEIRA(), n_landmarks=M, dim=DIM, kernel=k).fit(None, *views()) for k in (gaussian, lambda x, y: 1e6 * gaussian(x, y)))
    assert two.kernel_scale_ == pytest.approx(1e6 * one.kernel_scale_)
    assert torch.allclose(one.transform(X), two.transform(X), atol=1e-8)


def test_tiles_do_not_matter(monkeypatch):
    one = fitted()
    monkeypatch.setattr(audit_module, "tiles", lambda n, item, title: torch.arange(n).split(7))
    two = fitted()
    assert torch.allclose(one.transform(X), two.transform(X), atol=1e-10)


# ---- ways in ------------------------------------------------------------------------------------------------------------
class Pairs(Dataset):
    "A Dataset that reads one item at a time, with a label."
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, i):
        if not isinstance(i, int): raise TypeError("one at a time")
        return self.rows[i], i % 3


def test_dataset_tensor_array_and_strided_tensor_agree():
    want = fitted().transform(X)
    a, b = views()
    for one, two in ((Pairs(a), Pairs(b)), (TensorDataset(a), TensorDataset(b)), (a.numpy(), b.numpy()), (list(a), list(b)), (a.mT.contiguous().mT, torch.stack([b, b], 3)[..., 0])):
        model = KREPES(PEIRA(), n_landmarks=M, dim=DIM, damping=0.1).fit(mlp(), one, two)
        assert torch.equal(model.transform(X), want) and torch.equal(model.transform(Pairs(X)), want)


def test_precomputed_equals_computed():
    model = fitted(BarlowTwins())
    rows = [audit_kernel(mlp(), x, model.landmark_inputs_) for x in (*views(), X)]
    outside = KREPES(BarlowTwins(), dim=DIM, kernel="precomputed", landmarks=model.landmark_indices_, damping=0.1).fit(None, rows[0], rows[1])
    assert torch.allclose(outside.transform(rows[2]), model.transform(X), atol=1e-8)
    assert torch.equal(outside.top_landmarks(rows[2], k=3)[0], model.top_landmarks(X, k=3)[0])
    with pytest.raises(ValueError, match="shape"): outside.transform(rows[2][:, :-1])
    crooked = rows[0].clone(); crooked[model.landmark_indices_[0], 1] += 1
    with pytest.raises(ValueError, match="symmetric"): KREPES(PEIRA(), kernel="precomputed", landmarks=model.landmark_indices_).fit(None, crooked, rows[1])


def test_kernel_function_with_and_without_an_encoder():
    one = KREPES(PEIRA(), n_landmarks=M, dim=DIM, kernel=gaussian, landmarks="uniform").fit(None, *views())
    two = KREPES(PEIRA(), n_landmarks=M, dim=DIM, kernel=gaussian, landmarks="uniform").fit(mlp(), *views())
    assert torch.equal(one.transform(X), two.transform(X))
    for wrong, message in ((lambda x, y: gaussian(y, x), "kernel of x and the landmarks"), (lambda x, y: gaussian(x, y).log() / 0, "finite")):
        with pytest.raises(ValueError, match=message): KREPES(PEIRA(), n_landmarks=M, dim=DIM, kernel=wrong).fit(None, *views())


@pytest.mark.parametrize("how", ["kmeans++", "leverage", "uniform"])
def test_landmarks_come_from_view_a_and_depend_on_the_seed(how):
    one, same, other = (fitted(landmarks=how, seed=s) for s in (0, 0, 5))
    assert torch.equal(one.landmark_indices_, same.landmark_indices_) and torch.equal(one.transform(X), same.transform(X))
    assert not torch.equal(one.landmark_indices_.sort().values, other.landmark_indices_.sort().values)
    assert torch.equal(one.landmark_inputs_, views()[0][one.landmark_indices_]) and len(one.landmark_indices_.unique()) == M


def test_number_of_landmarks_and_dimensions():
    model = fitted(n_landmarks=None)
    assert len(model.landmark_indices_) == 7  # ceil(sqrt(40))
    assert len(KREPES(PEIRA(), dim=2).fit(mlp(), *views(49)).landmark_indices_) == 7
    assert fitted(landmarks=np.array([1, 2, 3]), n_landmarks=30).dA_.shape == (3, 3)
    with pytest.warns(UserWarning, match="dim=64 is above 7"): cut = fitted(dim=64)
    assert cut.dim_ == cut.rank_ == 7 and cut.transform(X).shape == (11, 7) and cut.get_params()["dim"] == 64
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fitted(dim=7)


def test_training_rows_that_repeat_are_no_trouble():
    a, b = (torch.cat([v, v, v]) for v in views(12))
    with pytest.warns(UserWarning): model = KREPES(PEIRA(), n_landmarks=20, dim=8, damping=0.1).fit(mlp(), a, b)
    assert model.rank_ <= 12 and torch.isfinite(model.influence(X)).all()
    assert torch.allclose(model.influence(X, signed=True).sum(1), model.shift(X).norm(dim=1), atol=1e-10)


def test_float32_stays_close_to_float64():
    one, two = fitted(landmarks=list(range(M))), fitted(dtype=torch.float32, landmarks=list(range(M)))
    assert two.landmark_inputs_.dtype == torch.float32 and two.transform(X).dtype == torch.float64
    scale = one.influence(X).max()
    assert (one.influence(X) - two.influence(X)).abs().max() < 1e-4 * scale
    three = KREPES(PEIRA(), dim=DIM, landmarks=list(range(M)), damping=0.1).fit(mlp(dtype=torch.float32), *views())  # float64 inputs follow the encoder
    assert torch.equal(three.transform(X), two.transform(X))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 4), nn.Linear(4, 3)
    def forward(self, x): return self.out(self.embed(x).mean(1).tanh())


def test_integer_inputs():
    g = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    a, b = torch.randint(9, (30, 5), generator=g), torch.randint(9, (30, 5), generator=g)
    model = KREPES(PEIRA(), n_landmarks=5, dim=2).fit(Tokens(), a, b)
    assert model.influence(a[:4]).shape == (4, 5)
    with pytest.raises(ValueError, match="float32"): model.influence(a[:4].float())


@dataclass(frozen=True)
class RowDistance(Objective):
    "An objective of samples: its curvature reads the rows."
    rotation_invariant: ClassVar[bool] = True
    def _loss(self, z_a, z_b): return ((z_a - z_b) ** 2).sum(1).mean()
    def curvature(self, A, K_a, K_b):
        D = K_a - K_b
        return Curvature(((D @ A) ** 2).sum(1).mean(), 2 / len(D) * D.T @ (D @ A), lambda E: 2 / len(D) * D.T @ (D @ E))


def test_an_objective_of_samples_reads_whole_rows(monkeypatch):
    monkeypatch.setattr(audit_module, "tiles", lambda n, item, title: torch.arange(n).split(7))
    model = fitted(RowDistance())
    assert RowDistance().loss(*(model.transform(v) for v in (A, B))).item() == pytest.approx(model.history[0]["loss"], rel=1e-10)
    assert model.history[0]["loss"] < model.history[0]["loss_before"]
    K_a, K_b = (model.kernel_rows(v) for v in (A, B))
    S, K_mm = 2 / N * (K_a - K_b).T @ (K_a - K_b), model.kernel_rows(model.landmark_inputs_)
    assert torch.allclose(model.dA_, torch.linalg.solve(S + 0.1 * K_mm, -S @ model.A0_), atol=1e-8)  # damping in the norm of the kernel's space


# ---- scikit-learn's conventions -----------------------------------------------------------------------------------------
def test_repr_params_clone_and_not_fitted():
    model = KREPES(BarlowTwins(0.01), n_landmarks=5, kernel="sum")
    assert repr(model) == "KREPES(kernel='sum', n_landmarks=5, objective=BarlowTwins(redundancy=0.01))"
    assert list(KREPES(PEIRA()).get_params()) == ["damping", "dim", "kernel", "landmarks", "n_landmarks", "objective", "seed"]
    copied = clone(fitted()).set_params(seed=4)
    assert copied.seed == 4 and copied.objective == PEIRA() and not hasattr(copied, "dA_")
    for call in (lambda m: m.transform(X), lambda m: m.prior(X), lambda m: m.shift(X), lambda m: m.influence(X), lambda m: m.top_landmarks(X), lambda m: m.history,
                 lambda m: m.concept_influence(X, torch.ones(3)), lambda m: m.alignment_gap(pd.DataFrame(), X), lambda m: m.fidelity(X, [0]), lambda m: m.save("x")):
        with pytest.raises(NotFittedError): call(model)


def test_fitting_again_replaces_and_a_failed_fit_keeps():
    model = fitted()
    before = model.transform(X)
    with pytest.raises(ValueError): model.set_params(n_landmarks=1000).fit(mlp(5), *views())
    assert torch.equal(model.set_params(n_landmarks=M).transform(X), before)
    assert not torch.allclose(model.fit(mlp(5), *views()).transform(X), before)


# ---- the encoder is left alone ------------------------------------------------------------------------------------------
class Fragile(nn.Module):
    "Raises at its nth forward pass."
    def __init__(self, calls):
        super().__init__()
        self.body, self.left = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)), calls
    def forward(self, x):
        self.left -= 1
        if self.left == 0: raise RuntimeError("the encoder broke")
        return self.body(x)


def state(net): return ([m.training for m in net.modules()], [p.requires_grad for p in net.parameters()], [p.grad for p in net.parameters()],
                        [(m._forward_hooks, m._forward_pre_hooks, m._backward_hooks) for m in net.modules()], fingerprint(net))


def test_encoder_is_as_before_after_a_fit():
    torch.manual_seed(0)
    net = Fragile(0).double().eval()
    net.training, net.body[1].weight.requires_grad = True, False
    random, before = torch.get_rng_state(), copy.deepcopy(state(net))
    KREPES(PEIRA(), n_landmarks=M, dim=2).fit(net, *views())
    assert state(net) == before and torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("calls", [1, 3, 5, 8])
@pytest.mark.parametrize("kernel", ["trace", gaussian])
def test_encoder_is_as_before_after_an_exception(calls, kernel):
    net = Fragile(calls if kernel == "trace" else 1).double().eval()
    net.body[2].train(kernel != "trace")
    before = copy.deepcopy(state(net))
    with pytest.raises(RuntimeError, match="the encoder broke"): KREPES(PEIRA(), n_landmarks=M, dim=2, kernel=kernel).fit(net, *views())
    assert state(net) == before and torch.is_grad_enabled()


def test_training_mode_is_refused_before_anything_moves():
    net = Fragile(0).double()
    before = copy.deepcopy(state(net))
    with pytest.raises(ValueError, match=r"encoder.eval\(\)"): KREPES(PEIRA(), n_landmarks=M, dim=2).fit(net, *views())
    assert state(net) == before


# ---- refusals -----------------------------------------------------------------------------------------------------------
A, B = views()
nan_b = B.clone(); nan_b[23, 1, 2] = float("nan")


@pytest.mark.parametrize("options, data, error, message", [
    (dict(dim=0), (A, B), ValueError, "dim must be at least 1"), (dict(dim=2.0), (A, B), TypeError, "dim"),
    (dict(damping=0.0), (A, B), ValueError, "damping"), (dict(damping=-1.0), (A, B), ValueError, "damping"), (dict(seed=-1), (A, B), ValueError, "seed"),
    (dict(landmarks="kmeans"), (A, B), ValueError, r"landmarks must be one of 'kmeans\+\+', 'leverage', 'uniform'"),
    (dict(kernel="rbf"), (A, B), ValueError, "kernel must be one of 'trace', 'sum', 'precomputed'"),
    (dict(objective=PEIRA), (A, B), TypeError, "objective"), (dict(objective="PEIRA"), (A, B), TypeError, "objective"),
    (dict(n_landmarks=41), (A, B), ValueError, "n_landmarks"), (dict(n_landmarks=0), (A, B), ValueError, "n_landmarks"),
    (dict(landmarks=[1, 1]), (A, B), ValueError, "landmarks must be distinct"), (dict(landmarks=[40]), (A, B), ValueError, "landmarks"),
    ({}, (A, B[:-1]), ValueError, "got 40 and 39"), ({}, (A[:1], B[:1]), ValueError, "view_a must be at least 2"), ({}, (A[:0], B[:0]), ValueError, "at least 2"),
    ({}, (A, B[:, :1]), ValueError, r"view_b must have items of shape \(2, 3\)"), ({}, (A, nan_b), ValueError, "view_b must be finite; row 23"),
    ({}, (Pairs(nan_b), Pairs(B)), ValueError, "view_a must be finite; row 23"), ({}, (iter(A), iter(B)), TypeError, "view_a"), ({}, (A, (B > 0).long()), ValueError, "int64"),
    ({}, ([A[0], A[1, :1]] * 20, B), TypeError, "view_a must have items that stack")])
def test_refused_options_and_views(options, data, error, message):
    with pytest.raises(error, match=message): KREPES(**{"objective": PEIRA(), "n_landmarks": M, "dim": DIM} | options).fit(mlp(), *data)


def test_refused_encoders_and_kernels():
    with pytest.raises(TypeError, match="encoder must be a torch.nn.Module"): KREPES(PEIRA()).fit(None, A, B)
    with pytest.raises(TypeError, match="encoder"): KREPES(PEIRA(), kernel=gaussian).fit(lambda x: x, A, B)
    with pytest.raises(ValueError, match="pass encoder=None"): KREPES(PEIRA(), kernel="precomputed", landmarks=[0]).fit(mlp(), A, B)
    with pytest.raises(ValueError, match="landmarks as positions"): KREPES(PEIRA(), kernel="precomputed").fit(None, A, B)
    with pytest.raises(ValueError, match="positive on the landmarks' diagonal"): KREPES(PEIRA(), kernel=lambda x, y: 0 * gaussian(x, y), landmarks="uniform").fit(None, A, B)
    with pytest.raises(ValueError, match="positive semidefinite"): KREPES(PEIRA(), kernel=lambda x, y: 2 * gaussian(x, y) - gaussian(x / 9, y / 9), dim=2).fit(None, A, B)


def test_refused_samples():
    model = fitted()
    nan = X.clone(); nan[4] = float("nan")
    for x, message in ((X[0], r"shape \(2, 3\)"), (X[:, :, :2], r"\(2, 2\)"), (nan, "x must be finite; row 4"), (X[:0], "at least 1"), (X.long(), "int64")):
        for method in (model.transform, model.influence, model.prior, model.shift):
            with pytest.raises(ValueError, match=message): method(x)
    with pytest.raises(ValueError, match=r"shape \(3,\)"): model.concept_influence(X, torch.ones(5))


# ---- concepts, alignment, fidelity --------------------------------------------------------------------------------------
def test_a_concept_fitted_on_the_embedding_is_accepted():
    model = fitted()
    z = model.transform(A)
    concept = Concept(n_permutations=0).fit(z[z[:, 1] > 0], z[z[:, 1] <= 0])
    assert torch.equal(model.concept_influence(X, concept), model.concept_influence(X, concept.direction))


def table(n, seed):
    "One categorical and one numerical feature."
    rng = np.random.default_rng(seed)
    return pd.DataFrame({"site": rng.choice(["a", "b", "c"], n), "age": rng.uniform(20, 80, n)})


def test_alignment_gap_by_loops():
    model, features, other = fitted(), table(N, 0), table(11, 1)
    got = model.alignment_gap(features, X, other, top_k=3, n_boot=20)
    scores, gaps, span = model.influence(X), {"site": [], "age": []}, {}
    marks = features.iloc[model.landmark_indices_.tolist()].reset_index(drop=True)
    both = np.concatenate([marks["age"], other["age"]])
    for t in range(11):
        v = {"site": [float(marks["site"][l] == other["site"][t]) for l in range(M)],
             "age": [1 - abs(marks["age"][l] - other["age"][t]) / (both.max() - both.min()) for l in range(M)]}
        best = sorted(range(M), key=lambda l: -scores[t, l].item())[:3]
        for name in v: gaps[name].append(sum(v[name][l] for l in best) / 3 - sum(v[name]) / M)
    for name in gaps: assert got.loc[name, "gap"] == pytest.approx(np.mean(gaps[name]), abs=1e-10)
    assert list(got.columns) == ["gap", "low", "high", "gap_normalised", "p_value", "n_used"] and (got["low"] <= got["gap"]).all() and (got["gap"] <= got["high"]).all()


def test_alignment_gap_of_the_training_rows_and_its_refusals():
    model, features = fitted(), table(N, 0).set_index(pd.Index(range(1000, 1000 + N)))
    got = model.alignment_gap(features, A, top_k=3, n_boot=20)
    pd.testing.assert_frame_equal(got, model.alignment_gap(features, A, features, top_k=3, n_boot=20))
    pd.testing.assert_frame_equal(got, model.alignment_gap(dict(features.reset_index(drop=True)), A, top_k=3, n_boot=20))
    assert model.alignment_gap({"one": [1] * N}, A, top_k=3, n_boot=20).loc["one", "gap"] == 0
    with pytest.raises(ValueError, match="each of the 40 training samples; got 7"): model.alignment_gap(features[:7], A)
    with pytest.raises(ValueError, match="x_features must be given: x has 11 rows"): model.alignment_gap(features, X)
    with pytest.raises(ValueError, match="each of the 11 samples in x; got 40"): model.alignment_gap(features, X, features)


def test_halves_are_drawn_class_by_class():
    for labels in (["a"] * 7 + ["b"] * 4 + ["c"], torch.arange(31) % 5, np.array([3, 3])):
        array, known, judged = audit_module.halves(labels, len(labels), 0)
        assert sorted([*known, *judged]) == list(range(len(labels)))
        for c in set(array.tolist()): assert 0 <= sum(array[known] == c) - sum(array[judged] == c) <= 1
    with pytest.raises(ValueError, match=r"each of the 4 samples in x; got shape \(3,\)"): audit_module.halves([1, 2, 3], 4, 0)


def test_fidelity_is_the_room_s_measures_on_two_halves():
    from peira_krepes.krepes import fidelity
    x, labels = views(60, seed=4)[0], np.arange(60) % 3
    model, marks = fitted(), torch.arange(M) % 3
    got = model.fidelity(x, torch.tensor(labels), marks)
    _, known, judged = audit_module.halves(labels, 60, 0)
    f, z, scores, A = model.transform(x), mlp()(x).detach(), model.influence(x), model.A0_ + model.dA_
    want = fidelity.probe_fidelity(z[known], f[known], labels[known], z[judged], f[judged], labels[judged])
    assert {k: got[k] for k in want} == pytest.approx(want)
    assert got["confidence_drop"] == pytest.approx(fidelity.confidence_drop(model.kernel_rows(x)[judged], A, scores[judged], f[known], labels[known], n_deleted=M, k=30))
    assert got["coverage"] == fidelity.class_coverage(model.dA_.norm(dim=1), marks)
    cosine = nn.functional.cosine_similarity(z[:, None], mlp()(model.landmark_inputs_).detach()[None], dim=2)
    assert got["precision_at_1"] == {"influence": fidelity.precision_at_1(scores, marks, labels), "cosine": fidelity.precision_at_1(cosine, marks, labels)}
    assert got["spectral_entropy"] == pytest.approx(fidelity.spectral_entropy(f.T @ f / 60))
    json.dumps(got)


def test_fidelity_leaves_out_what_it_cannot_know():
    model = KREPES(PEIRA(), n_landmarks=M, dim=DIM, kernel=gaussian).fit(None, A, B)
    labels = ["left", "right"] * 20
    assert model.fidelity(A, labels).keys() == {"confidence_drop", "spectral_entropy"}
    got = model.fidelity(A, labels, ["left"] * 3 + ["right"] * 4)
    assert got.keys() == {"confidence_drop", "spectral_entropy", "coverage", "precision_at_1"} and got["precision_at_1"].keys() == {"influence"}
    with pytest.raises(ValueError, match="labels must hold"): model.fidelity(A, labels[:-1])
    with pytest.raises(ValueError, match="landmark_labels"): model.fidelity(A, labels, labels)
    for missing in (1, 2):
        with pytest.raises(ValueError, match="missing"): model.fidelity(A, labels[:-missing] + [None] * missing)


# ---- files --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_loaded_audit_repeats_every_score_bit_for_bit(tmp_path, dtype):
    model, x = fitted(BarlowTwins(0.01), dtype=dtype, seed=2, dim=M), X.to(dtype)
    again = KREPES.load(model.save(tmp_path/"deep"/"audit"), mlp(dtype=dtype))
    assert repr(again) == repr(model) and again.history == model.history
    for call in (lambda m: m.transform(x), lambda m: m.prior(x), lambda m: m.influence(x), lambda m: m.influence(x, signed=True), lambda m: m.kernel_rows(x),
                 lambda m: m.top_landmarks(x, k=3)[0], lambda m: m.concept_influence(x, torch.ones(m.dim_)), lambda m: m.A0_, lambda m: m.landmark_indices_):
        assert torch.equal(call(again), call(model))
    assert {k for k in vars(model) if k.endswith("_")} == {k for k in vars(again) if k.endswith("_")}
    second = KREPES.load(again.save(tmp_path/"second"), mlp(dtype=dtype))
    assert torch.equal(second.transform(x), model.transform(x))


def test_without_its_encoder_a_loaded_audit_says_so(tmp_path):
    path = fitted().save(tmp_path/"audit")
    alone = KREPES.load(path)
    assert alone.history[0]["loss"] < 0 and alone.encoder_ is None
    with pytest.raises(ValueError, match=r"KREPES.load\(path, encoder=...\)"): alone.transform(X)
    assert torch.equal(KREPES.load(alone.save(tmp_path/"again"), mlp()).transform(X), fitted().transform(X))


def test_another_encoder_is_refused(tmp_path):
    model, path = fitted(), tmp_path/"audit"
    model.save(path)
    close = mlp(); close[1].bias.data[0] += 1e-12
    relu = mlp(); relu[2] = nn.ReLU()
    for other in (close, relu, mlp(3), mlp(dtype=torch.float32)):
        with pytest.raises(ValueError, match="encoder is not the one"): KREPES.load(path, other)
    with pytest.raises(TypeError, match="encoder must be a torch.nn.Module, or None; got str"): KREPES.load(path, "enc")
    assert fingerprint(copy.deepcopy(mlp()).train()) == fingerprint(mlp())


def test_an_encoder_changed_after_the_fit_is_refused_until_it_is_restored(tmp_path):
    model = fitted()
    weights, z = copy.deepcopy(model.encoder_.state_dict()), model.transform(X)
    model.encoder_[1].weight.data[0, 0] += 1e-9
    calls = [lambda m=m: m(X) for m in (model.transform, model.prior, model.shift, model.influence, model.kernel_rows)]
    for call in (*calls, lambda: model.save(tmp_path/"audit"), lambda: model.fidelity(A, np.arange(N) % 2)):
        with pytest.raises(ValueError, match="encoder has changed since fit.*Fit again, or load the weights"): call()
    assert not (tmp_path/"audit").exists()
    model.encoder_.load_state_dict(weights)
    assert torch.equal(model.transform(X), z)


def test_the_fingerprint_is_taken_once_a_call(monkeypatch):
    import peira_krepes.krepes.samples as samples
    model, taken = fitted(), []
    monkeypatch.setattr(samples, "fingerprint", lambda encoder: taken.append(1) or fingerprint(encoder))
    assert len(model.transform(A.repeat(150, 1, 1))) > 4096 and taken == [1]  # two tiles


def test_a_flipped_byte_anywhere_is_refused(tmp_path):
    path, other = fitted().save(tmp_path/"audit"), tmp_path/"other"
    whole = path.read_bytes()
    start = 8 + int.from_bytes(whole[:8], "little")
    for place in range(0, len(whole), 7):
        flipped = bytearray(whole); flipped[place] ^= 1
        other.write_bytes(flipped)
        with pytest.raises(ValueError, match="altered or damaged" if place >= start else str(other)): KREPES.load(other, mlp())


def test_files_that_are_not_ours_are_refused_with_the_reason(tmp_path):
    path = fitted().save(tmp_path/"audit")
    with safe_open(path, "pt") as f: about, tensors = json.loads(f.metadata()["krepes"]), {k: f.get_tensor(k) for k in f.keys()}
    assert about["version"] == 1 and about["objective"] == {"name": "PEIRA", "ridge": 0.1, "center": False}
    other = tmp_path/"other"
    save_file(tensors, other, {"krepes": json.dumps(about | {"version": 2})})
    with pytest.raises(ValueError, match="format version 2, this package reads 1"): KREPES.load(other)
    save_file(tensors, other)
    with pytest.raises(ValueError, match="not one of KREPES.save"): KREPES.load(other)
    for text in ("[1", "[1]", "{}", "null", '"version"'):
        save_file(tensors, other, {"krepes": text})
        with pytest.raises(ValueError, match=f"{other} is a safetensors file, but not one of KREPES.save"): KREPES.load(other)
    for wrong in ({k: t for k, t in tensors.items() if k != "dA_"}, tensors | {"more": torch.ones(1)}):
        save_file(wrong, other, {"krepes": json.dumps(about)})
        with pytest.raises(ValueError, match=f"{other} must hold the tensors"): KREPES.load(other)
    save_file(tensors, other, {"krepes": json.dumps(about)})
    with pytest.raises(ValueError, match="altered or damaged"): KREPES.load(other)
    with pytest.raises(ValueError, match=f"{tmp_path} is a folder"): KREPES.load(tmp_path)
    for content in (b"", b"PK\x03\x04 something else", path.read_bytes()[:-8]):
        other.write_bytes(content)
        with pytest.raises(ValueError, match="not a whole safetensors file"): KREPES.load(other)
    with pytest.raises(FileNotFoundError): KREPES.load(tmp_path/"nowhere")
    with pytest.raises(IsADirectoryError): fitted().save(tmp_path)


def test_an_interrupted_save_leaves_the_old_file(tmp_path, monkeypatch):
    import peira_krepes.krepes.saving as saving
    path = fitted().save(tmp_path/"audit")
    old = path.read_bytes()

    def broken(tensors, file, metadata):
        file.write_bytes(b"half")
        raise OSError("no space left")
    monkeypatch.setattr(saving, "save_file", broken)
    with pytest.raises(OSError): fitted(seed=1).save(path)
    assert path.read_bytes() == old and list(tmp_path.iterdir()) == [path]


def test_kernel_functions_and_precomputed_kernels_come_back(tmp_path):
    model = KREPES(PEIRA(), n_landmarks=np.int64(M), dim=np.int64(DIM), kernel=gaussian).fit(None, A, B)
    path = model.save(tmp_path/"function")
    with pytest.raises(ValueError, match="Pass kernel="): KREPES.load(path)
    assert torch.equal(KREPES.load(path, kernel=gaussian).transform(X), model.transform(X))
    outside = KREPES(PEIRA(), kernel="precomputed", landmarks=model.landmark_indices_, dim=DIM).fit(None, *(gaussian(v, model.landmark_inputs_) for v in (A, B)))
    path = outside.save(tmp_path/"rows")
    assert torch.equal(KREPES.load(path).transform(gaussian(X, model.landmark_inputs_)), outside.transform(gaussian(X, model.landmark_inputs_)))
    assert KREPES.load(path).landmarks == model.landmark_indices_.tolist()
    with pytest.raises(ValueError, match="Leave kernel= out"): KREPES.load(path, kernel=gaussian)


# ---- samples ------------------------------------------------------------------------------------------------------------
def test_tiles_cover_every_row_once_and_bound_memory():
    for n, item in ((1, torch.empty(1, 3)), (10_000, torch.empty(1, 8)), (9_000, torch.empty(1, 3, 224, 224)), (200, torch.empty(1, 2**24))):
        parts = list(tiles(n, item, "rows"))
        assert torch.equal(torch.cat(parts), torch.arange(n)) and len(parts[0]) <= 4096 and len(parts[0]) * item.numel() <= max(2**26, 64 * item.numel())


def test_view_rows_names_the_row_of_the_data_set():
    bad = A.clone(); bad[17] = float("inf"); bad[19] = float("nan")
    with pytest.raises(ValueError, match=r"z must be finite; row 17 .* 1 more of the 10 rows"): view_rows(bad, torch.arange(10, 20), "z")
    with pytest.raises(TypeError, match="a tensor and a label"): view_rows([{"image": A[0]}], torch.tensor([0]), "z")
    with pytest.raises(ValueError, match=r"shape \(n, ...\)"): view_rows(torch.ones(5), torch.arange(2), "z")
    with pytest.raises(TypeError, match="in a list first"): row_count((x for x in A), "z")


def test_features_restore_the_mode_of_each_module():
    net = Fragile(0).double()
    net.body[1].eval()
    before = copy.deepcopy(state(net))
    z = features_of(net, A, A[:1])
    assert state(net) == before and torch.equal(z, net.eval()(A).detach())
