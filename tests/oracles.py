# ---- core: plain loops in float64 -------------------------------------------------------------------------------------------------
import math

import numpy as np
import torch


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


# ---------------------------------------------------------------------------------------------------------------------
# krepes.audit: the whole pipeline with dense matrices: Jacobians output by output, the curvature as a matrix, one solve
# ---------------------------------------------------------------------------------------------------------------------
def audit_kernel(encoder, x, y, kind="trace"):
    "Tangent kernel (n,m) from the gradient of every output of every sample."
    import torch
    parameters = [p for p in encoder.parameters() if p.requires_grad]

    def gradients(samples):
        return torch.stack([torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(out, parameters, retain_graph=True)]) for out in encoder(s[None])[0]])
                            for s in samples])
    G, H = gradients(x), gradients(y)
    h = G.shape[1]
    if kind == "sum": return G.sum(1) @ H.sum(1).T / h
    return sum(G[:, j] @ H[:, j].T for j in range(h)) / h


def audit_peira(ridge):
    "PEIRA's loss of two views, and its Gauss-Newton matrix at coefficients A as (mh, mh)."
    import torch

    def loss(z_a, z_b):
        n, h = z_a.shape
        Sigma, N = (z_a.T @ z_b + z_b.T @ z_a) / n, (z_a.T @ z_a + z_b.T @ z_b) / n
        return -torch.trace(Sigma @ torch.linalg.inv(N + ridge * torch.eye(h, dtype=z_a.dtype))) / 2 + ridge / 2 * torch.trace(N)

    def ggn(A, K_a, K_b):
        n, (m, h) = len(K_a), A.shape
        K = torch.cat([K_a, K_b]) / n ** 0.5
        W, I = K @ A, torch.eye(2 * n, dtype=A.dtype)
        inverse = torch.linalg.inv(W @ W.T + ridge * I)
        changes = []
        for i in range(m * h):
            D = torch.zeros(m * h, dtype=A.dtype)
            D[i] = 1
            H = K @ D.reshape(m, h)
            changes.append(H @ W.T + W @ H.T)
        return torch.stack([torch.stack([ridge * torch.trace(C @ inverse @ E) for E in changes]) for C in changes])
    return loss, ggn


def audit_barlow(redundancy):
    "Barlow Twins' loss of two views, and its Gauss-Newton matrix, the loss cut at the weighted residuals."
    import torch

    def residuals(z_a, z_b):
        standard = lambda z: (z - z.mean(0)) / z.std(0, correction=0)
        C = standard(z_a).T @ standard(z_b) / len(z_a)
        eye = torch.eye(len(C), dtype=C.dtype)
        return (redundancy ** 0.5 * (1 - eye) + eye) * (C - eye)

    def ggn(A, K_a, K_b):
        J = torch.autograd.functional.jacobian(lambda A: residuals(K_a @ A, K_b @ A).flatten(), A).reshape(A.shape[1] ** 2, -1)
        return 2 * J.T @ J
    return lambda z_a, z_b: (residuals(z_a, z_b) ** 2).sum(), ggn


def audit_surrogate(K_a, K_b, landmarks, dim, objective, damping):
    "The divisor of the kernel, A_0 and the change dA, both (m,dim), from raw kernel rows of both views and one dense solve."
    import torch
    loss, ggn = objective
    K_mm = K_a[landmarks]
    scale = torch.diagonal(K_mm).mean()
    values, vectors = torch.linalg.eigh(K_mm / scale)
    kept = [i for i in reversed(range(len(values))) if values[i] > 1e-6 * values[-1]]
    T = torch.stack([vectors[:, i] / values[i] ** 0.5 for i in kept], dim=1)
    phi_a, phi_b = K_a / scale @ T, K_b / scale @ T
    Theta = torch.zeros(len(kept), dim, dtype=T.dtype)
    for j in range(dim): Theta[j, j] = 1
    Theta.requires_grad_()
    gradient, = torch.autograd.grad(loss(phi_a @ Theta, phi_b @ Theta), Theta)
    Theta = Theta.detach()
    matrix = ggn(Theta, phi_a, phi_b) + damping * torch.eye(Theta.numel(), dtype=T.dtype)
    step = torch.linalg.solve(matrix, -gradient.flatten()).reshape(Theta.shape)
    assert loss(phi_a @ (Theta + step), phi_b @ (Theta + step)) < loss(phi_a @ Theta, phi_b @ Theta), "choose a larger damping for this oracle"
    return scale, T @ Theta, T @ step


# ---- krepes.landmarks, krepes.influence: one number at a time ---------------------------------------------------------------------
def greedy_seeds_by_loops(x, weights, m, generator):
    "Greedy weighted k-means++ in plain Python, fed with the uniform numbers of a torch generator: one for the start, then 2 + floor(log m) a step."
    import math
    import torch
    x, weights = [list(map(float, row)) for row in x], [float(w) for w in weights]
    uniforms = lambda count: torch.rand(count, generator=generator, dtype=torch.float64).tolist()
    distance = lambda i, j: sum((u - v) ** 2 for u, v in zip(x[i], x[j]))
    def draw(mass, u):
        target, total = u * sum(mass), 0.0
        for i, w in enumerate(mass):
            total += w
            if total > target: return i
    seeds = [draw(weights, uniforms(1)[0])]
    while len(seeds) < m:
        closest = [min(distance(i, s) for s in seeds) for i in range(len(x))]
        if not any(closest): break
        tried = [draw([c * w for c, w in zip(closest, weights)], u) for u in uniforms(2 + int(math.log(m)))]
        after = [sum(w * min(c, distance(i, t)) for i, (c, w) in enumerate(zip(closest, weights))) for t in tried]
        seeds.append(tried[after.index(min(after))])
    return seeds


def leverage_by_columns(K, ridge):
    "Diagonal of K (K + ridge n I)^-1, one linear system for each column."
    n = len(K)
    shifted = [[float(K[i][j]) + (ridge * n if i == j else 0.0) for j in range(n)] for i in range(n)]
    return [float(cholesky_solve_by_loops(shifted, [float(K[i][j]) for i in range(n)])[j]) for j in range(n)]


def influence_by_loops(K_x, dA):
    "Unsigned and signed scores of every sample and landmark, and the length of the shift, from the vectors k dA_l themselves."
    import math
    t, m, h = len(K_x), len(dA), len(dA[0])
    unsigned, signed, lengths = [], [], []
    for x in range(t):
        vectors = [[float(K_x[x][l]) * float(dA[l][j]) for j in range(h)] for l in range(m)]
        shift = [math.fsum(v[j] for v in vectors) for j in range(h)]
        length = math.sqrt(sum(s * s for s in shift))
        unsigned.append([math.sqrt(sum(c * c for c in v)) for v in vectors])
        signed.append([sum(c * s for c, s in zip(v, shift)) / length if length else 0.0 for v in vectors])
        lengths.append(length)
    return unsigned, signed, lengths


# ---- krepes.alignment, krepes.fidelity: one pair, one order, one neighbour at a time ----------------------------------------------
def agreement_by_loops(samples, landmarks, span=None):
    "1 - |difference| / span for numbers, equality otherwise, None for a missing pair."
    missing = lambda v: v is None or v != v
    number = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in [*samples, *landmarks] if not missing(v))
    known = [v for v in [*samples, *landmarks] if not missing(v)]
    if number and span is None: span = max(known) - min(known)
    def one(u, v):
        if missing(u) or missing(v): return None
        if not number or span == 0: return float(u == v)
        return 1 - min(abs(u - v) / span, 1)
    return [[one(u, v) for v in landmarks] for u in samples]


def alignment_by_subsets(influences, v, top_k):
    "Mean over samples of the agreement with the top landmarks less that with every subset of top_k landmarks in turn; pairs that are None are left out."
    import itertools
    pool = [l for l in range(len(v[0])) if any(row[l] is not None for row in v)]
    gaps, chances = [], []
    for scores, row in zip(influences, v):
        if all(row[l] is None for l in pool): continue
        top = sorted(pool, key=lambda l: (-scores[l], l))[:top_k]
        subsets = [sum(row[l] for l in s) / top_k for s in itertools.combinations(pool, top_k)]
        chances.append(sum(subsets) / len(subsets))
        gaps.append(sum(row[l] for l in top) / top_k - chances[-1])
    return sum(gaps) / len(gaps), sum(chances) / len(chances), len(gaps)


def coverage_expectation_by_inclusion_exclusion(counts):
    "Expected draws without replacement until every class occurred: sum over sets of classes of the wait for the first of the set, in exact fractions."
    import itertools
    from fractions import Fraction
    N, total = sum(counts), Fraction(0)
    for size in range(1, len(counts) + 1):
        for chosen in itertools.combinations(counts, size):
            total += (-1) ** (size + 1) * Fraction(N + 1, sum(chosen) + 1)
    return total


def confidence_by_loops(z, reference, labels, k):
    "Share of each class among the k nearest references, a dict for each row."
    out = []
    for row in z:
        distances = [sum((a - b) ** 2 for a, b in zip(row, r)) for r in reference]
        nearest = sorted(range(len(reference)), key=lambda i: distances[i])[:k]
        out.append({c: sum(labels[i] == c for i in nearest) / k for c in sorted(set(labels))})
    return out


def kendall_by_pairs(x, y):
    "tau_b from all pairs: concordant less discordant, over the root of the numbers of pairs untied in each."
    sign, x, y = (lambda a: (a > 0) - (a < 0)), list(map(float, x)), list(map(float, y))
    pairs = [(sign(x[i] - x[j]), sign(y[i] - y[j])) for i in range(len(x)) for j in range(i)]
    return sum(a * b for a, b in pairs) / (sum(a != 0 for a, _ in pairs) * sum(b != 0 for _, b in pairs)) ** 0.5


# krepes.entk and krepes.layerwise: gradients of one output of one sample at a time, in float64 ------------------------------
def tangent_kernel_by_loops(encoder, x, y=None, kind="trace"):
    "The kernel of a float64 `encoder` from its definition: each sample alone, one backward pass an output, one inner product an entry."
    import torch
    parameters = [p for p in encoder.parameters() if p.requires_grad]

    def gradients(row):
        out = encoder(row[None])[0]
        targets = list(out) if kind == "trace" else [sum(out)]
        found = [torch.autograd.grad(t, parameters, retain_graph=True, allow_unused=True) for t in targets]
        flat = [torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for p, g in zip(parameters, gs)]) for gs in found]
        return flat, len(out)

    left = [gradients(row) for row in x]
    right = left if y is None else [gradients(row) for row in y]
    K = torch.zeros(len(left), len(right), dtype=torch.float64)
    for i, (gs, h) in enumerate(left):
        for j, (hs, _) in enumerate(right): K[i, j] = sum(torch.dot(g, f) for g, f in zip(gs, hs)) / h
    return K


# ---- lab.data, lab.views, lab.encoders: one seat, one pixel, one output unit at a time, in float64 ----------------------------------
def webster_seats(sizes, places):
    "Seats of each class: first one each, then one by one to the class with the largest size/(2*seats + 1)."
    seats = [0] * len(sizes)
    for _ in range(places):
        claims = [float('inf') if s == 0 else m/(2*s + 1) if s < m else -1 for m, s in zip(sizes, seats)]
        seats[claims.index(max(claims))] += 1
    return seats


def warped_pixel(channel, box, matrix, row, column):
    "The value of a warped image at (row, column): map the position, clamp it to the box's pixel centres, mix its four neighbours."
    (h, w), (top, left, height, width) = channel.shape, box
    u, v = (2*column + 1)/w - 1, (2*row + 1)/h - 1
    (a, b, c), (d, e, f) = matrix
    x = left + (a*u + b*v + c + 1)/2*width - 0.5
    y = top + (d*u + e*v + f + 1)/2*height - 0.5
    x, y = max(min(x, left + width - 1), left), max(min(y, top + height - 1), top)
    total = 0.0
    for i in (math.floor(y), math.floor(y) + 1):
        for j in (math.floor(x), math.floor(x) + 1):
            total += max(0, 1 - abs(y - i))*max(0, 1 - abs(x - j))*float(channel[min(max(i, 0), h - 1), min(max(j, 0), w - 1)])
    return total


def recoloured(image, brightness, contrast, saturation, turn, grey):
    "An image (3,h,w) after the five steps one at a time; the hue step is a rotation by quaternion about the grey axis."
    luma = lambda p: 0.299*p[0] + 0.587*p[1] + 0.114*p[2]
    pixels = [[brightness*float(v) for v in p] for p in image.flatten(1).T]
    mean = sum(map(luma, pixels))/len(pixels)
    pixels = [[contrast*v + (1 - contrast)*mean for v in p] for p in pixels]
    pixels = [[saturation*v + (1 - saturation)*luma(p) for v in p] for p in pixels]
    half, axis = math.pi*turn, 1/math.sqrt(3)
    q, s = math.cos(half), math.sin(half)*axis
    def rotated(p):
        cross = lambda r: (s*(r[2] - r[1]), s*(r[0] - r[2]), s*(r[1] - r[0]))
        t = [2*v for v in cross(p)]
        return [v + q*a + b for v, a, b in zip(p, t, cross(t))]
    pixels = [rotated(p) for p in pixels]
    if grey: pixels = [[luma(p)]*3 for p in pixels]
    return torch.tensor(pixels, dtype=torch.float64).T.reshape(image.shape)


def blurred_pixel(channel, sigma, row, column):
    "One pixel of a Gaussian blur as a double sum over all pixels, the weights divided by their sum."
    total = weights = 0.0
    for i in range(channel.shape[0]):
        for j in range(channel.shape[1]):
            weight = math.exp(-((i - row)**2 + (j - column)**2)/(2*sigma**2))
            total, weights = total + weight*float(channel[i, j]), weights + weight
    return total/weights


def convolved(image, weight, stride):
    "A 3x3 convolution with a border of zeros: image (c,h,w), weight (o,c,3,3)."
    (c, h, w), outputs = image.shape, len(weight)
    padded = torch.zeros(c, h + 2, w + 2, dtype=image.dtype)
    padded[:, 1:-1, 1:-1] = image
    rows, columns = (h - 1)//stride + 1, (w - 1)//stride + 1
    out = torch.zeros(outputs, rows, columns, dtype=image.dtype)
    for o in range(outputs):
        for i in range(rows):
            for j in range(columns): out[o, i, j] = (weight[o]*padded[:, i*stride:i*stride + 3, j*stride:j*stride + 3]).sum()
    return out


# ---- peira.dynamics, peira.slow_predictor: derivatives by differences, steps one at a time ---------------------------------------
def lagging_jacobian(b, ridge, modes, k, speed, step=1e-5):
    "Jacobian of the flow with lagging moments at the critical point of `modes` for B = diag(b), by central differences; symmetric moments by their upper triangles."
    n, upper = len(b), [(i, j) for i in range(k) for j in range(i, k)]
    B = np.diag(np.asarray(b, dtype=np.float64))
    def unpack(z):
        S, M = np.zeros((k, k)), np.zeros((k, k))
        for place, (i, j) in enumerate(upper):
            S[i, j] = S[j, i] = z[n*k + place]
            M[i, j] = M[j, i] = z[n*k + len(upper) + place]
        return z[:n*k].reshape(n, k), S, M
    def field(z):
        W, S, M = unpack(z)
        Q = np.linalg.inv(M + ridge*np.eye(k))
        dS, dM = speed*(W.T@B@W - S), speed*(W.T@W - M)
        return np.array([*(B@W@Q - W@Q@S@Q - ridge*W).ravel(), *(dS[i, j] for i, j in upper), *(dM[i, j] for i, j in upper)])
    W = np.zeros((n, k))
    for column, mode in enumerate(modes): W[mode, column] = (b[mode]**0.5 - ridge)**0.5
    S, M = W.T@B@W, W.T@W
    z = np.array([*W.ravel(), *(S[i, j] for i, j in upper), *(M[i, j] for i, j in upper)])
    return np.array([(field(z + step*e) - field(z - step*e))/(2*step) for e in np.eye(len(z))]).T


def lagging_steps(b, ridge, step, rate, share, n):
    "Shares of one mode along n gradient steps with running averages of its two moments, in plain numbers."
    w, shares = share**0.5, []
    S, M = b*share, share
    for _ in range(n):
        S, M = S + rate*(b*w*w - S), M + rate*(w*w - M)
        q = 1/(M + ridge)
        w += step*(b*w*q - w*q*S*q - ridge*w)
        shares.append(w*w)
    return shares


def distillation_jacobian(W, B, ridge, decay, step=1e-5):
    "Jacobian of the self-distillation field at W (K,k), by central differences."
    def field(W):
        P = W.T@B@W@np.linalg.inv(W.T@W + ridge*np.eye(W.shape[1]))
        return (B@W@P - W@P.T@P - decay*W).ravel()
    W, B = np.asarray(W, dtype=np.float64), np.asarray(B, dtype=np.float64)
    columns = []
    for place in np.ndindex(W.shape):
        H = np.zeros_like(W)
        H[place] = step
        columns.append((field(W + H) - field(W - H))/(2*step))
    return np.array(columns).T


def principal_angles_by_projection(X, Y):
    "Principal angles between the column spaces of X and Y (n,r), largest first, from the singular values of the product of orthonormal bases by Gram-Schmidt."
    def basis(M):
        kept = []
        for column in np.asarray(M, dtype=np.float64).T:
            for q in kept + kept: column = column - q*(q@column)
            kept.append(column/np.sqrt(column@column))
        return np.array(kept)
    cosines = np.linalg.svd(basis(X)@basis(Y).T, compute_uv=False)
    return np.sort(np.arccos(np.clip(cosines, -1, 1)))[::-1]


# ---- objectives of samples: SimCLR, BYOL, SimSiam, one cosine at a time in float64 --------------------------------------------------

def direction_by_loops(row):
    "A list of floats divided by its length; zeros stay zeros."
    length = math.sqrt(math.fsum(x * x for x in row))
    return [x / length if length else 0.0 for x in row]


def simclr_by_loops(z_a, z_b, temperature):
    "Equation 1 of 2002.05709, one row's question after the other, averaged over the 2n rows."
    rows = [direction_by_loops(r) for r in z_a.double().tolist() + z_b.double().tolist()]
    n, total = len(rows) // 2, 0.0
    for i in range(2 * n):
        scores = {j: math.fsum(x * y for x, y in zip(rows[i], rows[j])) / temperature for j in range(2 * n) if j != i}
        top = max(scores.values())
        total += top + math.log(math.fsum(math.exp(s - top) for s in scores.values())) - scores[(i + n) % (2 * n)]
    return total / (2 * n)


def byol_by_loops(p_a, p_b, t_a, t_b, normalize=True):
    "Equation 2 of 2006.07733, both directions added, mean over samples."
    total, turn = 0.0, direction_by_loops if normalize else list
    for predictions, targets in ((p_a, t_b), (p_b, t_a)):
        for p, t in zip(predictions.tolist(), targets.tolist()): total += math.fsum((x - y) ** 2 for x, y in zip(turn(p), turn(t))) / len(p_a)
    return total


def simsiam_by_loops(p_a, p_b, t_a, t_b):
    "Equations 1 and 2 of 2011.10566."
    total = 0.0
    for predictions, targets in ((p_a, t_b), (p_b, t_a)):
        for p, t in zip(predictions.tolist(), targets.tolist()): total -= math.fsum(x * y for x, y in zip(direction_by_loops(p), direction_by_loops(t))) / len(p_a) / 2
    return total


# ---- lab.columns, lab.views (solarise), lab.corruption: one cell, one pixel at a time ----------------------------------------------
def encoded_table(training, rows, words, most):
    "Rows (lists of values, None for a gap) as lists of floats with the statistics of the training rows; `words`: categorical positions; `most`: columns per category."
    encoded = [[] for _ in rows]
    for j in range(len(training[0])):
        seen, new = [r[j] for r in training], [r[j] for r in rows]
        if j in words:
            counts = {}
            for v in seen: counts[v] = counts.get(v, 0) + 1
            order = sorted(counts, key=lambda v: str('(missing)' if v is None else v))
            rank = {v: i for i, v in enumerate(order)}                                 # of equally frequent ones the later name is kept
            kept = order if len(order) <= most else sorted(sorted(order, key=lambda v: (-counts[v], -rank[v]))[:most - 1], key=rank.get)
            for e, v in zip(encoded, new):
                e += [float(v == k) for k in kept] + ([float(v in counts and v not in kept)] if len(kept) < len(order) else [])
        else:
            present = sorted(v for v in seen if v is not None)
            middle = (present[(len(present) - 1)//2] + present[len(present)//2])/2
            filled = [middle if v is None else v for v in seen]
            mean = sum(filled)/len(filled)
            deviation = math.sqrt(sum((v - mean)**2 for v in filled)/len(filled)) or 1.0
            for e, v in zip(encoded, new):
                e.append(((middle if v is None else v) - mean)/deviation)
                if None in seen: e.append(float(v is None))
    return encoded


# ---- laws, counted tables and the auxiliary loss ----

def law_by_recipe(correlations, p):
    "Joint table of: draw x from p and a level j; if x is among the first j states draw it again among them. `correlations` ascending, one fewer than states."
    K = len(p)
    levels = [correlations[0]] + [correlations[j] - correlations[j - 1] for j in range(1, K - 1)] + [1 - correlations[-1]]
    pi = np.zeros((K, K))
    for x in range(K):
        for j, chance in enumerate(levels, start=1):
            if x >= j: pi[x, x] += p[x] * chance
            else:
                for y in range(j): pi[x, y] += p[x] * chance * p[y] / sum(p[:j])
    return pi


def counts_by_loops(x, y):
    "Shares of each pair of values, over the values that occur, in sorted order."
    rows, columns = sorted(set(x)), sorted(set(y))
    pi = np.zeros((len(rows), len(columns)))
    for a, b in zip(x, y): pi[rows.index(a), columns.index(b)] += 1 / len(x)
    return pi


def auxiliary_by_loops(pi, U, V, U_frozen, V_frozen, ridge):
    "PEIRA's auxiliary loss pair by pair: -Tr Q Sigma / 2 + Tr Q S Q N / 2 + ridge Tr N / 2 with Q and S of the frozen embeddings."
    pi, U, V, U_frozen, V_frozen = (np.asarray(a, dtype=np.float64) for a in (pi, U, V, U_frozen, V_frozen))
    def moments(U, V):
        cross, own = 0, 0
        for x in range(len(U)):
            for y in range(len(V)):
                cross = cross + pi[x, y] * (np.outer(U[x], V[y]) + np.outer(V[y], U[x]))
                own = own + pi[x, y] * (np.outer(U[x], U[x]) + np.outer(V[y], V[y]))
        return cross, own
    (Sigma, N), (S, M) = moments(U, V), moments(U_frozen, V_frozen)
    Q = np.linalg.inv(M + ridge * np.eye(len(M)))
    return (-np.trace(Q @ Sigma) + np.trace(Q @ S @ Q @ N) + ridge * np.trace(N)) / 2


def products_by_enumeration(rhos, n_modes, most=40):
    "The largest products of powers of `rhos`, constant left out, by listing all degrees up to `most`."
    import itertools
    values = sorted((np.prod([abs(r) ** k for r, k in zip(rhos, n)]) for n in itertools.product(range(most), repeat=len(rhos))), reverse=True)
    return values[1:n_modes + 1]


# ---- objectives: VICReg, the spectral contrastive loss and LeJEPA, one number at a time in float64 ---------------------------------
def vicreg_by_loops(z_a, z_b, invariance, variance, covariance):
    "Equations 1 to 6 of the paper, with the unbiased variance."
    import math
    views, (n, h) = (z_a.tolist(), z_b.tolist()), z_a.shape
    mean = lambda z, i: sum(row[i] for row in z) / n
    cov = lambda z, i, j: sum((row[i] - mean(z, i)) * (row[j] - mean(z, j)) for row in z) / (n - 1)
    s = sum((x - y) ** 2 for row_a, row_b in zip(*views) for x, y in zip(row_a, row_b)) / n
    v = sum(max(0.0, 1.0 - math.sqrt(cov(z, i, i) + 1e-4)) for z in views for i in range(h)) / h
    c = sum(cov(z, i, j) ** 2 for z in views for i in range(h) for j in range(h) if i != j) / h
    return invariance * s + variance * v + covariance * c


def spectral_by_loops(z_a, z_b, same=True):
    "Attraction and repulsion over all pairs of rows; `same=False` leaves i = j out of the repulsion and divides by n (n - 1)."
    a, b, n = z_a.tolist(), z_b.tolist(), len(z_a)
    score = lambda i, j: sum(x * y for x, y in zip(a[i], b[j]))
    push = [score(i, j) ** 2 for i in range(n) for j in range(n) if same or i != j]
    return -2 * sum(score(i, i) for i in range(n)) / n + sum(push) / len(push)


def epps_pulley_by_loops(x, extent, n_points):
    "n times the trapezoidal rule over the whole grid, zero and negative points included."
    import cmath
    import math
    step, total = 2 * extent / (n_points - 1), 0.0
    for k in range(n_points):
        t = -extent + k * step
        empirical = sum(cmath.exp(1j * t * value) for value in x) / len(x)
        inside = abs(empirical - math.exp(-t * t / 2)) ** 2 * math.exp(-t * t / 2)
        total += inside * step / (2 if k in (0, n_points - 1) else 1)
    return len(x) * total


def lejepa_by_loops(z_a, z_b, U, weight, extent=5.0, n_points=17):
    "Algorithms 1 and 2 of LeJEPA for two global views and the directions in the columns of `U`."
    views, (n, d), columns = (z_a.tolist(), z_b.tolist()), z_a.shape, U.T.tolist()
    agreement = 0.0
    for i in range(n):
        for k in range(d):
            centre = (views[0][i][k] + views[1][i][k]) / 2
            agreement += sum((z[i][k] - centre) ** 2 for z in views) / (2 * n * d)
    tests = [epps_pulley_by_loops([sum(z[i][k] * u[k] for k in range(d)) for i in range(n)], extent, n_points) for z in views for u in columns]
    return (1 - weight) * agreement + weight * sum(tests) / len(tests)


# ---- lab.rank_scores, lab.selection, lab.sgd_probe: one view, one pair, one row at a time, in float64 -------------------------------
def lidar_spectrum_by_loops(views, delta):
    "Eigenvalues, descending, of Sigma_w^-1/2 Sigma_b Sigma_w^-1/2 with both scatters summed term by term."
    z = np.asarray([[np.asarray(v[i], dtype=np.float64) for v in views] for i in range(len(views[0]))])
    n, q, d = z.shape
    grand = sum(z[i, j] for i in range(n) for j in range(q)) / (n * q)
    between, within = np.zeros((d, d)), delta * np.eye(d)
    for i in range(n):
        mean = sum(z[i, j] for j in range(q)) / q
        between += np.outer(mean - grand, mean - grand) / n
        for j in range(q): within += np.outer(z[i, j] - mean, z[i, j] - mean) / (n * q)
    values, vectors = np.linalg.eigh(within)
    root = sum(np.outer(vectors[:, i], vectors[:, i]) / np.sqrt(values[i]) for i in range(d))
    return np.sort(np.linalg.eigvalsh(root @ between @ root))[::-1]


def spearman_by_pairs(x, y):
    "Spearman's correlation from ranks counted pair by pair, equal values sharing the mean of their ranks."
    rank = lambda v: [1 + sum(w < a for w in v) + (sum(w == a for w in v) - 1) / 2 for a in v]
    r, s = rank(list(x)), rank(list(y))
    mean = (len(r) + 1) / 2
    product = lambda a, b: math.fsum((u - mean) * (v - mean) for u, v in zip(a, b))
    return product(r, s) / math.sqrt(product(r, r) * product(s, s))


def momentum_softmax_by_loops(x, y, batches, steps, rate, classes, momentum=0.9):
    "Weights and biases of softmax regression from zero by heavy-ball steps with a cosine schedule, one row and one class at a time."
    x = np.asarray(x, dtype=np.float64)
    W, b = np.zeros((x.shape[1], classes)), np.zeros(classes)
    mW, mb = np.zeros_like(W), np.zeros_like(b)
    for step, rows in enumerate(batches):
        gW, gb = np.zeros_like(W), np.zeros_like(b)
        for i in rows:
            score = x[i] @ W + b
            p = np.exp(score - score.max()); p /= p.sum()
            for c in range(classes):
                error = (p[c] - (y[i] == c)) / len(rows)
                gW[:, c] += error * x[i]; gb[c] += error
        mW, mb = momentum * mW + gW, momentum * mb + gb
        eta = rate / 2 * (1 + math.cos(math.pi * step / steps))
        W, b = W - eta * mW, b - eta * mb
    return W, b
