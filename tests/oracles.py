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


# lab.pretrain: PEIRA's value from its definition ----------------------------------------------------------------------------

def energy_by_inverse(Sigma, N, ridge):
    "-Tr[Sigma (N + ridge I)^-1] / 2 + ridge Tr[N] / 2 with an explicit inverse."
    import numpy as np
    return float(-np.trace(Sigma @ np.linalg.inv(N + ridge * np.eye(len(N)))) / 2 + ridge * np.trace(N) / 2)


# ---- peira: the definitions over a joint table, one pair of states at a time ------------------------------------------------------
def population_energy_by_loops(pi, U, V, ridge, center=False):
    "PEIRA's population energy of two tables of embeddings from its definition; centred means both views' means are removed first."
    pi, U, V = (np.asarray(x, dtype=np.float64) for x in (pi, U, V))
    if center: U, V = U - pi.sum(1) @ U, V - pi.sum(0) @ V
    k = U.shape[1]
    Sigma, N, size = np.zeros((k, k)), np.zeros((k, k)), 0.0
    for x in range(pi.shape[0]):
        for y in range(pi.shape[1]):
            u, v = U[x], V[y]
            Sigma += pi[x, y] * (np.outer(v, u) + np.outer(u, v))
            N += pi[x, y] * (np.outer(u, u) + np.outer(v, v))
            size += pi[x, y] * (u @ u + v @ v)
    P = Sigma @ np.linalg.inv(N + ridge * np.eye(k))
    return -np.trace(P) / 2 + ridge / 2 * size


def maximal_correlation_by_alternation(pi, steps=500):
    "The largest correlation between zero-mean functions of the two views, by alternating conditional expectations (Breiman and Friedman)."
    pi = np.asarray(pi, dtype=np.float64)
    p, q = pi.sum(1), pi.sum(0)
    u = np.arange(len(p), dtype=np.float64) ** 2 + 1
    for _ in range(steps):
        v = np.array([sum(pi[x, y] * u[x] for x in range(len(p))) / q[y] for y in range(len(q))])
        v -= q @ v
        u = np.array([sum(pi[x, y] * v[y] for y in range(len(q))) / p[x] for x in range(len(p))])
        u -= p @ u
        u /= np.sqrt(p @ u**2)
    v = np.array([sum(pi[x, y] * u[x] for x in range(len(p))) / q[y] for y in range(len(q))])
    return np.sqrt(q @ v**2)


# ---- objectives: the papers' sums written out, plain loops in float64 ------------------------------------------------------------

def solve_by_elimination(A, B):
    "A^-1 B by Gauss-Jordan elimination with pivoting on lists of floats."
    n, M = len(A), [[*map(float, a), *map(float, b)] for a, b in zip(A, B)]
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(M[r][i]))
        M[i], M[pivot] = M[pivot], M[i]
        M[i] = [x / M[i][i] for x in M[i]]
        for r in range(n):
            if r != i: M[r] = [x - M[r][i] * y for x, y in zip(M[r], M[i])]
    return [row[n:] for row in M]


def peira_statistics_by_loops(z_a, z_b):
    "Sums (not averages) over the rows of v u' + u v' and u u' + v v', and of the rows: lists of floats."
    u, v = z_a.tolist(), z_b.tolist()
    k = range(len(u[0]))
    Sigma = [[sum(v[r][i] * u[r][j] + u[r][i] * v[r][j] for r in range(len(u))) for j in k] for i in k]
    N = [[sum(u[r][i] * u[r][j] + v[r][i] * v[r][j] for r in range(len(u))) for j in k] for i in k]
    return Sigma, N, [sum(row[i] for row in u) for i in k], [sum(row[i] for row in v) for i in k]


def peira_energy_by_loops(batches, weights, ridge, center=False):
    "E of PEIRA at the weighted average of the batches' moments; one batch of weight 1 gives the plain objective. (z_a, z_b) in each."
    k, total = range(batches[0][0].shape[1]), sum(weights)
    Sigma, N = ([[0.0 for _ in k] for _ in k] for _ in range(2))
    mean_a, mean_b = [0.0 for _ in k], [0.0 for _ in k]
    for (z_a, z_b), weight in zip(batches, weights):
        w = weight / total / len(z_a)
        S, M, a, b = peira_statistics_by_loops(z_a, z_b)
        for i in k:
            mean_a[i] += w * a[i]
            mean_b[i] += w * b[i]
            for j in k:
                Sigma[i][j] += w * S[i][j]
                N[i][j] += w * M[i][j]
    if center:
        Sigma = [[Sigma[i][j] - mean_a[i] * mean_b[j] - mean_b[i] * mean_a[j] for j in k] for i in k]
        N = [[N[i][j] - mean_a[i] * mean_a[j] - mean_b[i] * mean_b[j] for j in k] for i in k]
    ridged = [[N[i][j] + (ridge if i == j else 0.0) for j in k] for i in k]
    transposed = solve_by_elimination(ridged, Sigma)                    # (N + ridge)^-1 Sigma, the transpose of P
    return sum(-transposed[i][i] / 2 + ridge / 2 * N[i][i] for i in k)


def barlow_twins_by_loops(z_a, z_b, redundancy):
    "Equations 1 and 2 of the paper, one correlation at a time."
    import math
    a, b = z_a.tolist(), z_b.tolist()
    rows, columns = range(len(a)), range(len(a[0]))
    mean = lambda z, i: sum(z[r][i] for r in rows) / len(z)
    centred = lambda z: [[z[r][i] - m for i, m in ((i, mean(z, i)) for i in columns)] for r in rows]
    a, b = centred(a), centred(b)
    norm = lambda z, i: math.sqrt(sum(z[r][i] ** 2 for r in rows))
    C = [[sum(a[r][i] * b[r][j] for r in rows) / (norm(a, i) * norm(b, j)) for j in columns] for i in columns]
    return sum((1 - C[i][i]) ** 2 for i in columns) + redundancy * sum(C[i][j] ** 2 for i in columns for j in columns if i != j)
