# ---- core: plain loops in float64 -------------------------------------------------------------------------------------------------
import numpy as np


def moments_by_loops(z_a, z_b):
    "Means and uncentred second moments, one product at a time: a dict of float64 arrays."
    z_a, z_b = np.asarray(z_a, dtype=np.float64), np.asarray(z_b, dtype=np.float64)
    n, d = z_a.shape
    mean = lambda z: np.array([sum(z[r, i] for r in range(n)) / n for i in range(d)])
    second = lambda x, y: np.array([[sum(x[r, i] * y[r, j] for r in range(n)) / n for j in range(d)] for i in range(d)])
    return {"mean_a": mean(z_a), "mean_b": mean(z_b), "S_aa": second(z_a, z_a), "S_bb": second(z_b, z_b), "S_ab": second(z_a, z_b)}


def cholesky_solve_by_loops(A, b):
    "Solve A x = b for a symmetric positive definite A by the textbook Cholesky factorisation and two substitutions."
    A, b = np.asarray(A, dtype=np.float64), np.asarray(b, dtype=np.float64)
    n = len(b)
    L = np.zeros((n, n))
    for i in range(n):
        for j in range(i + 1):
            rest = A[i, j] - sum(L[i, k] * L[j, k] for k in range(j))
            L[i, j] = np.sqrt(rest) if i == j else rest / L[j, j]
    y, x = np.zeros(n), np.zeros(n)
    for i in range(n): y[i] = (b[i] - sum(L[i, k] * y[k] for k in range(i))) / L[i, i]
    for i in reversed(range(n)): x[i] = (y[i] - sum(L[k, i] * x[k] for k in range(i + 1, n))) / L[i, i]
    return x


# lab.probes: the diagnostics as plain loops in float64 -------------------------------------------------------------------

def entropy_rank_loop(weights):
    "exp of the entropy of the positive weights, normalised to sum one."
    import math
    total, entropy = math.fsum(weights), 0.0
    for w in weights:
        if w > 0: entropy -= w / total * math.log(w / total)
    return math.exp(entropy)

def knn_loop(train_z, train_y, test_z, test_y, k):
    "Accuracy of the majority among the k largest cosines, one test row at a time; the smaller class wins a tie."
    import numpy as np
    train_z, test_z = np.asarray(train_z, float), np.asarray(test_z, float)
    hits = 0
    for z, y in zip(test_z, np.asarray(test_y)):
        cosines = [z @ t / np.sqrt((z @ z) * (t @ t)) for t in train_z]
        votes = np.bincount(np.asarray(train_y)[np.argsort(cosines)[::-1][:k]])
        hits += int(votes.argmax() == y)
    return hits / len(test_z)

def stationarity_loop(Sigma, N, ridge):
    "Relative Frobenius residual of Sigma = N (N + ridge)^2, entry by entry."
    import math
    d = len(N)
    product = lambda A, B: [[math.fsum(A[i][k] * B[k][j] for k in range(d)) for j in range(d)] for i in range(d)]
    shifted = [[N[i][j] + (ridge if i == j else 0) for j in range(d)] for i in range(d)]
    M = product(product(N, shifted), shifted)
    norm = lambda f: math.sqrt(math.fsum(f(i, j)**2 for i in range(d) for j in range(d)))
    return norm(lambda i, j: Sigma[i][j] - M[i][j]) / norm(lambda i, j: Sigma[i][j])

def alignment_loop(Sigma, N):
    "Cosine of v and N v for each eigenvector v of Sigma, largest eigenvalue first."
    import numpy as np
    values, vectors = np.linalg.eigh(Sigma)
    return [float(v @ N @ v / np.linalg.norm(N @ v)) for v in vectors.T[np.argsort(values)[::-1]]]


# ---------------------------------------------------------------------------------------------------------------------
# krepes.concepts: a direction of logistic regression by dense Newton steps, and scores by loops
# ---------------------------------------------------------------------------------------------------------------------
def concept_logistic_direction(positive, negative):
    "Unit normal (h,) of balanced logistic regression with penalty |v|^2 / 2 on rows centred and scaled to unit mean square; Newton."
    import torch
    x = torch.cat([positive, negative]).double()
    x = x - x.mean(0)
    x = x / (x ** 2).mean().sqrt()
    p, q, h = len(positive), len(negative), x.shape[1]
    y = torch.tensor([1.0] * p + [0.0] * q, dtype=torch.float64)
    weight = torch.tensor([(p + q) / (2 * p)] * p + [(p + q) / (2 * q)] * q, dtype=torch.float64)
    ones = torch.cat([x, torch.ones(p + q, 1, dtype=torch.float64)], dim=1)
    penalty = torch.diag(torch.tensor([1.0] * h + [0.0], dtype=torch.float64))  # the intercept is free
    v = torch.zeros(h + 1, dtype=torch.float64)
    for _ in range(50):
        s = torch.sigmoid(ones @ v)
        gradient = ones.T @ (weight * (s - y)) + penalty @ v
        hessian = ones.T @ ((weight * s * (1 - s))[:, None] * ones) + penalty
        v = v - torch.linalg.solve(hessian, gradient)
    assert gradient.norm() < 1e-10
    return v[:h] / v[:h].norm()


def concept_scores(K_x, dA, direction):
    "Landmark scores (t,m) along a direction, entry by entry."
    import torch
    length = sum(float(d) ** 2 for d in direction) ** 0.5
    out = torch.zeros(K_x.shape, dtype=torch.float64)
    for t in range(K_x.shape[0]):
        for l in range(K_x.shape[1]):
            out[t, l] = sum(float(K_x[t, l]) * float(dA[l, j]) * float(direction[j]) / length for j in range(dA.shape[1]))
    return out
