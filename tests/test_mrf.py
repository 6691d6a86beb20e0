"""Linear chains against enumeration of all sequences, and their features against the same with φ(x)ᵀφ(y)."""

import itertools
import math

import pytest
import torch

from hf_rfattn.features import (
    EluFeatures,
    FourierFeatures,
    HedgehogFeatures,
    PositiveFeatures,
    ReluFeatures,
    TanhFeatures,
)
from hf_rfattn.mrf import LinearChainMRF

METHODS = ("serial", "tree")
X, N = 4, 3  # states, dimensions of an embedding


def make_chain(T, per_node=False, unary=True, dtype=torch.float64, scale=0.7, **options):
    generator = torch.Generator().manual_seed(T)
    shape = (T, X, N) if per_node else (X, N)
    embeddings = scale * torch.randn(shape, generator=generator, dtype=dtype)
    scores = torch.randn(T, X, generator=generator, dtype=dtype) if unary else None
    return LinearChainMRF(embeddings, length=T, unary=scores, **options)


def weights(chain, T, kernel=None):
    """The weight of each of the X^T sequences, `[X, …, X]`; `kernel` `[T-1, X, X]` in place of exp(xᵀy)."""
    e = chain.embeddings.expand(T, -1, -1)
    kernel = torch.exp(e[:-1] @ e[1:].mT) if kernel is None else kernel.expand(T - 1, -1, -1)
    found = torch.empty((X,) * T, dtype=e.dtype)
    for states in itertools.product(range(X), repeat=T):
        value = math.prod(float(kernel[t, states[t], states[t + 1]]) for t in range(T - 1))
        found[states] = value * math.exp(sum(float(chain.unary[t, x]) for t, x in enumerate(states)))
    return found


def marginals(table):
    return torch.stack([table.movedim(t, 0).reshape(X, -1).sum(-1) for t in range(table.dim())]) / table.sum()


@pytest.mark.parametrize("per_node", [False, True])
@pytest.mark.parametrize("T", [1, 2, 3, 6])
def test_exact_against_enumeration(T, per_node):
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        chain = make_chain(T, per_node, dtype=dtype)
        table = weights(chain, T).double()
        assert float(chain.log_partition()) == pytest.approx(float(table.sum().log()), abs=tolerance)
        assert (chain.marginals().double() - marginals(table)).abs().max() < tolerance


FEATURES = {
    "iid": lambda T: PositiveFeatures(1, 8, N, (0,), projection="iid"),
    "hadamard": lambda T: PositiveFeatures(1, 8, N, (0,), projection="hadamard"),
    "antithetic": lambda T: PositiveFeatures(1, 8, N, (0,), antithetic=True),
    "optimal": lambda T: PositiveFeatures(1, 8, N, (0,), optimal=True),
    "a draw a transition": lambda T: PositiveFeatures(T - 1, 8, N, (0,)),
    "relu": lambda T: ReluFeatures(1, 8, N, (0,)),
    "elu": lambda T: EluFeatures(N),
    "hedgehog": lambda T: HedgehogFeatures(1, 1, 2 * N, N, (0,)),
    "fourier": lambda T: FourierFeatures(1, 8, N, (0,), normalize_qk=False),
    "tanh": lambda T: TanhFeatures(N),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", FEATURES)
def test_features_against_enumeration(name, method):
    """Any feature map: Z is that of the chain whose transitions are φ(x)ᵀφ(y), with its sign."""
    for T, per_node in ((2, False), (4, True), (5, False)):
        chain, features = make_chain(T, per_node), FEATURES[name](T)
        e = chain.embeddings.expand(T, -1, -1)
        kernel = features("query").exactly(e[None, :-1]).dense()[0] @ features("key").exactly(e[None, 1:]).dense()[0].mT
        table = weights(chain, T, kernel.detach())
        sign, log = chain.log_partition(features, method=method, return_sign=True)
        assert float(sign) == float(table.sum().sign())
        assert log.item() == pytest.approx(float(table.sum().abs().log()), abs=1e-8)
        if features.positive:
            assert chain.log_partition(features, method=method).item() == log.item()
            assert (chain.marginals(features, method=method) - marginals(table)).abs().max() < 1e-8


def mean_of_z(T, independent, draws=2000, M=16):
    """Mean of Ẑ/Z over draws, and its standard error."""
    chain = make_chain(T, unary=False, scale=0.35)
    z = float(chain.log_partition())
    ratios = torch.stack(
        [
            chain.log_partition(chain.random_features(M, independent=independent, seed=seed, projection="iid")) - z
            for seed in range(draws)
        ]
    ).exp()
    return float(ratios.mean()), float(ratios.std() / draws**0.5)


def test_z_is_unbiased_with_a_draw_a_transition():
    mean, error = mean_of_z(5, independent=True)
    assert error < 0.02 and abs(mean - 1) < 4 * error


def test_z_is_unbiased_with_one_draw_up_to_one_transition_and_biased_beyond():
    mean, error = mean_of_z(2, independent=False)
    assert error < 0.01 and abs(mean - 1) < 4 * error
    mean, error = mean_of_z(5, independent=False)
    assert mean - 1 > 6 * error  # one ω errs the same way at every transition


@pytest.mark.parametrize("features", ["exact", "one draw", "a draw a transition"])
def test_gradients_against_finite_differences(features):
    T = 4
    generator = torch.Generator().manual_seed(0)
    embeddings = (0.5 * torch.randn(T, X, N, generator=generator, dtype=torch.float64)).requires_grad_()
    unary = torch.randn(T, X, generator=generator, dtype=torch.float64, requires_grad=True)
    draws = {"exact": None, "one draw": 1, "a draw a transition": T - 1}[features]
    phi = None if draws is None else PositiveFeatures(draws, 8, N, (1,)).double()
    for method in ("serial",) if phi is None else METHODS:
        for given in (embeddings, embeddings[0].detach().requires_grad_()):  # for each node, and shared

            def log_z(e, u, method=method):
                return LinearChainMRF(e, length=T, unary=u).log_partition(phi, method=method)

            assert torch.autograd.gradcheck(log_z, (given, unary), eps=1e-6, atol=1e-7)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("norm", [1.0, 8.0])
def test_long_chains_in_single_precision(method, norm):
    """4,096 nodes: log Z is in the thousands, Z itself far beyond any float; rounding does not add up."""
    embeddings = torch.nn.functional.normalize(torch.randn(8, 16), dim=-1) * norm
    chain, double = (LinearChainMRF(e, length=4096) for e in (embeddings, embeddings.double()))
    features = chain.random_features(8)
    found = chain.log_partition(features, method=method)
    assert found.dtype == torch.float32 and abs(float(found)) > 1000
    assert float(found) == pytest.approx(float(double.log_partition(features, method="tree")), rel=1e-6)
    if method == "tree":
        nodes = chain.marginals(features, method=method)
        assert torch.isfinite(nodes).all() and (nodes.sum(-1) - 1).abs().max() < 1e-3
    if method == "serial":
        assert float(chain.log_partition()) == pytest.approx(float(double.log_partition()), rel=1e-6)


def test_forbidden_states():
    unary = torch.zeros(4, X, dtype=torch.float64)
    unary[1, 2] = -torch.inf
    chain = LinearChainMRF(make_chain(4).embeddings, length=4, unary=unary)
    features = chain.random_features(8)
    for nodes in (chain.marginals(), *(chain.marginals(features, method=method) for method in METHODS)):
        assert torch.isfinite(nodes).all() and float(nodes[1, 2]) == 0
    unary[1] = -torch.inf
    nothing = LinearChainMRF(chain.embeddings, length=4, unary=unary)
    with pytest.raises(ValueError, match="Z is zero"):
        nothing.log_partition()


def signed_chain():
    """A chain with embeddings for each node, and a draw of two frequencies that makes its Z negative."""
    chain = LinearChainMRF(torch.randn(6, X, N, generator=torch.Generator().manual_seed(0)))
    for seed in range(100):
        features = FourierFeatures(1, 4, N, (seed,), normalize_qk=False)
        if chain.log_partition(features, return_sign=True)[0] == -1:
            return chain, features
    raise AssertionError("no draw gave a negative Z")


def test_one_draw_and_one_set_of_embeddings_cannot_make_z_negative():
    """φ(x)ᵀφ(y) is then positive semidefinite. With embeddings for each node half of such draws are negative."""
    shared, own = (
        LinearChainMRF(torch.randn(*nodes, X, N, generator=torch.Generator().manual_seed(0)), length=4)
        for nodes in ((), (4,))
    )
    draws = [FourierFeatures(1, 4, N, (seed,), normalize_qk=False) for seed in range(100)]
    assert all(shared.log_partition(phi, return_sign=True)[0] == 1 for phi in draws)
    assert 30 < sum(int(own.log_partition(phi, return_sign=True)[0] == -1) for phi in draws) < 70


@pytest.mark.parametrize("method", METHODS)
def test_a_negative_z_is_reported(method):
    chain, features = signed_chain()
    with pytest.raises(ValueError, match=r"Z came out negative.*positive features.*return_sign=True"):
        chain.log_partition(features, method=method)
    sign, log = chain.log_partition(features, method=method, return_sign=True)
    assert sign == -1 and torch.isfinite(log)
    with pytest.raises(ValueError, match="Z came out negative"):
        chain.marginals(features, method=method)


def test_the_global_generator_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    chain = make_chain(4)
    chain.log_partition(chain.random_features(8, independent=True))
    assert torch.equal(torch.rand(1), expected)


def test_optimal_features_are_calibrated():
    chain = make_chain(4, scale=1.0)
    features = chain.random_features(8, optimal=True, independent=True)
    e = chain.embeddings
    expected = ((e[:, None] + e[None]).square().sum(-1) / N).mean()
    assert torch.allclose(features.rho.double(), expected.expand(3))


E = torch.randn(X, N)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: LinearChainMRF(E), "give their number, length=T"),
        (lambda: LinearChainMRF(E.int(), length=3), "embeddings must be floating-point"),
        (lambda: LinearChainMRF(E[0], length=3), r"\[states, n\] or \[T, states, n\]"),
        (lambda: LinearChainMRF(E, length=0), "a positive integer"),
        (lambda: LinearChainMRF(E[None], length=2), "T if embeddings"),
        (lambda: LinearChainMRF(E, length=3, unary=E), r"unary must be \[X\] or \[T, X\] with T, X = \(3, 4\)"),
        (lambda: LinearChainMRF(E, length=3).log_partition(torch.eye(3)), "must be a feature map such as"),
        (lambda: LinearChainMRF(E, length=3).log_partition(PositiveFeatures(5, 4, N, (0,))), "5 draws"),
        (lambda: LinearChainMRF(E, length=3).log_partition(PositiveFeatures(1, 4, 2, (0,))), "have 2 dimensions"),
        (lambda: LinearChainMRF(E, length=3).log_partition(method="tree"), "method='tree' needs features"),
        (lambda: LinearChainMRF(E, length=3).log_partition(method="log"), "choose one of serial, tree"),
    ],
)
def test_mistakes(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()
