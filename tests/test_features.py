"""Projections and feature maps: orthogonality, unbiasedness, rates, kernels, formulas."""

import math

import pytest
import torch

from hf_rfattn import build_mechanism, redraw
from hf_rfattn.features import (
    KERNELS,
    EluFeatures,
    FourierFeatures,
    HedgehogFeatures,
    PositiveFeatures,
    TanhFeatures,
    draw_projection,
    hadamard_rotation,
    kernel_matrix,
)
from hf_rfattn.features.maps import per_head_product
from hf_rfattn.features.projections import seeded_generator
from hf_rfattn.ops import hadamard_matrix, walsh_hadamard_transform

D = 16
SIX_SIGMA = 6.0  # a correct estimator fails a six-sigma check once in 5·10⁸ runs; the seeds are fixed besides


def points(count=6, norm=1.0, dim=D):
    x = torch.randn(2, 1, count, dim, dtype=torch.float64)
    return norm * x[0] / x[0].norm(dim=-1, keepdim=True), norm * x[1] / x[1].norm(dim=-1, keepdim=True)


@torch.no_grad()
def estimates(make, x, y, draws=400):
    """Kernel estimates φ(x)ᵀφ(y) `[draws, Lx, Ly]` over independent draws of the map."""
    out = []
    for draw in range(draws):
        feature_map = make((7, draw)).double()
        phi_x, phi_y = (feature_map(role).exactly(z[None]).dense()[0, 0] for z, role in ((x, "query"), (y, "key")))
        out.append(phi_x @ phi_y.T)
    return torch.stack(out)


def assert_unbiased(sample, exact):
    error = (sample.mean(0) - exact).abs()
    assert (error <= SIX_SIGMA * sample.std(0) / len(sample) ** 0.5 + 1e-12).all()


@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
@pytest.mark.parametrize("options", [{}, {"antithetic": True}, {"optimal": True}], ids=str)
def test_favor_is_unbiased(projection, options):
    x, y = points()
    sample = estimates(lambda seed: PositiveFeatures(1, 32, D, seed, projection=projection, **options), x, y)
    exact = torch.exp(x[0] @ y[0].T)
    assert_unbiased(sample, exact)
    assert sample.min() > 0


def test_optimal_variance_is_lower_where_it_should_be():
    """Aligned queries and keys, where plain FAVOR+ varies most; ρ set to |x + y|²/d as `calibrate` would."""
    x = points(norm=1.0)[0]  # larger norms have tails too heavy for a sample variance to mean anything

    def make(optimal):
        def build(seed):
            feature_map = PositiveFeatures(1, 32, D, seed, projection="iid", optimal=optimal)
            if optimal:
                feature_map.rho.fill_(float((2 * x).square().sum(-1).mean() / D))
            return feature_map

        return build

    plain, optimal = (estimates(make(o), x, x, draws=1500).diagonal(dim1=1, dim2=2) for o in (False, True))
    exact = torch.exp(x[0].square().sum(-1))
    assert ((optimal - exact) ** 2).mean() < 0.8 * ((plain - exact) ** 2).mean()


@pytest.mark.parametrize("form", ["sincos", "cos"])
@pytest.mark.parametrize("kernel", list(KERNELS))
def test_rff_is_unbiased_for_its_kernel(kernel, form):
    x, y = points()
    projection = "orthogonal" if kernel == "gaussian" else "iid"

    def make(seed):
        return FourierFeatures(
            1, 32, D, seed, kernel=kernel, projection=projection, form=form, normalize_qk=kernel != "gaussian"
        )

    sample = estimates(make, x, y)
    exact = torch.exp(x[0] @ y[0].T) if kernel == "gaussian" else kernel_matrix(kernel, x[0], y[0])
    assert_unbiased(sample, exact)


def test_closed_forms_of_the_kernels():
    """Independent of the code under test: each kernel on the line, by numerical integration of its spectral density."""
    omega = torch.linspace(-400, 400, 2_000_001, dtype=torch.float64)
    densities = {
        "gaussian": torch.exp(-(omega**2) / 2) / math.sqrt(2 * math.pi),
        "laplace": 1 / (math.pi * (1 + omega**2)),
        "cauchy": torch.exp(-omega.abs()) / 2,
    }
    for delta in (0.0, 0.3, 1.7):
        for name, density in densities.items():
            integral = torch.trapezoid(density * torch.cos(omega * delta), omega)
            value = KERNELS[name].value(torch.tensor([delta], dtype=torch.float64))
            assert abs(float(integral - value)) < 2e-3, (name, delta)


def test_least_kernel_value_is_a_lower_bound():
    x, y = points(count=200, norm=1.5)
    for name, kernel in KERNELS.items():
        assert kernel_matrix(name, x[0], y[0]).min() >= kernel.least(torch.tensor(4 * 1.5**2), D)
        assert kernel.least(torch.tensor(4 * 1.5**2), D) > 0


@pytest.mark.parametrize("kind", ["favor+", "rff"])
def test_error_falls_as_one_over_root_m(kind):
    x, y = points()
    exact = torch.exp(x[0] @ y[0].T) if kind == "favor+" else kernel_matrix("gaussian", x[0], y[0])

    def error(count):
        def make(seed):
            if kind == "favor+":
                return PositiveFeatures(1, count, D, seed, projection="iid")
            return FourierFeatures(1, count, D, seed, projection="iid")

        return float((estimates(make, x, y, draws=200) - exact).square().mean().sqrt())

    slope = math.log(error(512) / error(32)) / math.log(512 / 32)
    assert -0.6 < slope < -0.4


@pytest.mark.parametrize("kind", ["favor+", "rff"])
def test_orthogonal_rows_beat_independent_ones(kind):
    x, y = points(norm=0.7)

    def error(projection):
        def make(seed):
            if kind == "favor+":
                return PositiveFeatures(1, D, D, seed, projection=projection)
            return FourierFeatures(1, 2 * D, D, seed, projection=projection, normalize_qk=False)

        return float((estimates(make, x, y) - torch.exp(x[0] @ y[0].T)).square().mean())

    iid = error("iid")
    assert error("orthogonal") < 0.9 * iid
    assert error("hadamard") < 0.9 * iid


@pytest.mark.parametrize("blocks", [1, 2, 3])
@pytest.mark.parametrize("dim", [2, 8, 64])
def test_hadamard_product_is_orthogonal(blocks, dim):
    rotation = hadamard_rotation(dim, blocks, seeded_generator(0))
    assert (rotation @ rotation.T - torch.eye(dim, dtype=rotation.dtype)).abs().max() < 1e-6
    if dim > 2:  # two dimensions have too few sign patterns to differ
        assert not torch.allclose(rotation, hadamard_rotation(dim, blocks, seeded_generator(1)))


def test_hadamard_rotation_is_the_product_of_its_blocks():
    """(H D_2)(H D_1), with the signs drawn again from the same generator."""
    generator = seeded_generator(3)
    h = hadamard_matrix(8, dtype=torch.float64)
    product = torch.eye(8, dtype=torch.float64)
    for _ in range(2):
        signs = torch.randint(0, 2, (8,), generator=generator).double() * 2 - 1
        product = h @ torch.diag(signs) @ product
    torch.testing.assert_close(hadamard_rotation(8, 2, seeded_generator(3)), product)


@pytest.mark.parametrize("dim", [1, 2, 32, 64, 128, 512, 4096])
def test_fast_walsh_hadamard_equals_the_matrix(dim):
    x = torch.randn(3, 5, dim, dtype=torch.float64, requires_grad=True)
    fast, dense = walsh_hadamard_transform(x), x @ hadamard_matrix(dim, dtype=torch.float64)
    torch.testing.assert_close(fast, dense)
    cotangent = torch.randn_like(fast)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, cotangent)[0] for y in (fast, dense)))


def test_hadamard_refuses_other_sizes():
    with pytest.raises(ValueError, match="power of two"):
        walsh_hadamard_transform(torch.zeros(3, 12))


@pytest.mark.parametrize("kind", ["iid", "orthogonal", "hadamard"])
@pytest.mark.parametrize(("rows", "dim"), [(5, 8), (8, 8), (40, 8), (7, 12)])
def test_projection_rows_have_gaussian_norms(kind, rows, dim):
    w = draw_projection(kind, 300, rows, dim, seeded_generator(0))
    assert w.shape == (300, rows, dim)
    squares = w.square().sum(-1).flatten()
    # |ω|² of a Gaussian has mean d and variance 2d; rows of one head are independent in norm.
    assert abs(float(squares.mean()) - dim) < SIX_SIGMA * (2 * dim / len(squares)) ** 0.5 + (
        0.1 if kind == "hadamard" else 0
    )
    if kind != "iid" and rows <= dim and not (kind == "hadamard" and dim & (dim - 1)):
        gram = w @ w.transpose(-1, -2)
        assert (gram - torch.diag_embed(gram.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-6


def test_orthogonal_directions_are_uniform():
    """The mean of uniform directions is zero and their covariance I/d; QR without sign correction fails this."""
    w = draw_projection("orthogonal", 4000, 1, 8, seeded_generator(0))[:, 0]
    directions = w / w.norm(dim=-1, keepdim=True)
    assert (directions.mean(0).abs() < SIX_SIGMA * (1 / 8 / 4000) ** 0.5).all()
    covariance = directions.T @ directions / 4000
    assert (covariance - torch.eye(8) / 8).abs().max() < 0.02


def test_maps_match_their_formulas():
    x = 2 * torch.randn(1, 2, 7, D, dtype=torch.float64)
    torch.testing.assert_close(EluFeatures(D)("query").exactly(x).dense(), torch.nn.functional.elu(x) + 1)
    torch.testing.assert_close(EluFeatures(D, sign=-1)("query").exactly(x).dense(), torch.nn.functional.elu(-x) + 1)
    torch.testing.assert_close(TanhFeatures(D)("query").exactly(x).dense(), torch.tanh(x))

    hedgehog = HedgehogFeatures(2, 2, 2 * D, D, (0,)).double()
    identity = torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)
    torch.testing.assert_close(hedgehog("query").exactly(x).dense(), identity)
    with torch.no_grad():
        hedgehog.key_weight.normal_()
        hedgehog.key_bias.normal_()
    product = torch.einsum("bhld,hmd->bhlm", x, hedgehog.key_weight) + hedgehog.key_bias[:, None]
    expected = torch.cat([product.softmax(-1), (-product).softmax(-1)], dim=-1)
    torch.testing.assert_close(hedgehog("key").exactly(x).dense(), expected)
    torch.testing.assert_close(hedgehog("query").exactly(x).dense(), identity)

    favor = PositiveFeatures(2, 24, D, (0,)).double()
    product = torch.einsum("bhld,hmd->bhlm", x, favor.projection)
    expected = torch.exp(product - x.square().sum(-1, keepdim=True) / 2) / 24**0.5
    torch.testing.assert_close(favor("query").exactly(x).dense(), expected)

    optimal = PositiveFeatures(2, 24, D, (0,), optimal=True).double()
    optimal.rho.fill_(0.7)
    a = (1 - 1.4 - math.sqrt(2.4**2 + 5.6)) / 16
    norms = optimal.projection.square().sum(-1)[None, :, None]
    expected = (1 - 4 * a) ** (D / 4) * torch.exp(
        a * norms + math.sqrt(1 - 4 * a) * product - x.square().sum(-1, keepdim=True) / 2
    ) / 24**0.5  # fmt: skip
    torch.testing.assert_close(optimal("query").exactly(x).dense(), expected)
    optimal.rho.zero_()
    torch.testing.assert_close(optimal("query").exactly(x).dense(), favor("query").exactly(x).dense())

    relu = build_mechanism("favor+", kernel="relu", num_heads=2, head_dim=D, num_features=24).double().feature_map
    product = torch.einsum("bhld,hmd->bhlm", x, relu.projection)
    torch.testing.assert_close(relu("query").exactly(x).dense(), torch.relu(product) / 24**0.5)

    fourier = FourierFeatures(2, 24, D, (0,), normalize_qk=False).double()
    angle = torch.einsum("bhld,hmd->bhlm", x, fourier.projection)
    expected = torch.exp(x.square().sum(-1, keepdim=True) / 2) * torch.cat([angle.sin(), angle.cos()], -1) / 12**0.5
    torch.testing.assert_close(fourier("query").exactly(x).dense(), expected)


def test_calibration_measures_rho():
    feature_map = PositiveFeatures(2, 8, D, (0,), optimal=True).double()
    x, y = torch.randn(3, 4, 5, D, dtype=torch.float64), torch.randn(3, 2, 5, D, dtype=torch.float64) + 0.5
    key_mask = torch.rand(3, 5) > 0.3
    feature_map.calibrate(x, y, key_mask)
    for head in range(2):
        q = torch.cat([x[:, 2 * head + g][key_mask] for g in range(2)])
        k = y[:, head][key_mask]
        expected = (q[:, None] + k[None]).square().sum(-1).mean() / D
        assert float(feature_map.rho[head]) == pytest.approx(float(expected))


def test_learned_positive_features_start_as_favor():
    """With the draw of FAVOR+ for the same seed, of a flatter kernel; then queries, keys and it go their own ways."""
    options = {"num_features": 12, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "seed": 3}
    plain, learned = (build_mechanism("favor+", **options, trainable=trainable) for trainable in (False, True))
    q, k, v = torch.randn(1, 4, 20, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    torch.testing.assert_close(learned(q, k, v), plain(q, k, v, scale=0.25 * 8**-0.5))
    assert not list(plain.parameters())
    learned(q, k, v).square().sum().backward()
    assert all(p.grad.abs().max() > 0 for p in learned.parameters())
    x = torch.randn(1, 2, 5, 8)
    torch.testing.assert_close(learned.feature_map("key").exactly(x).log, plain.feature_map("key").exactly(x / 2).log)
    with pytest.raises(ValueError, match="would undo"):
        redraw(learned)


def test_hedgehog_starts_at_the_identity_whatever_its_width():
    narrow, usual, wide = (
        build_mechanism("hedgehog", num_heads=2, head_dim=8, num_features=m).feature_map for m in (6, None, 40)
    )
    assert [m.num_features for m in (narrow, usual, wide)] == [6, 16, 40]
    assert torch.equal(usual.query_weight[0], torch.eye(8)) and torch.equal(wide.query_weight[1, :8], torch.eye(8))
    for feature_map in (narrow, usual, wide):
        torch.testing.assert_close(feature_map.key_weight.norm(dim=-1), torch.ones_like(feature_map.key_weight[..., 0]))
        parts = feature_map("key").exactly(torch.randn(1, 2, 3, 8)).dense().unflatten(-1, (2, -1))
        torch.testing.assert_close(parts.sum(-1), torch.ones(1, 2, 3, 2))


@pytest.mark.parametrize("gradients", [False, True])
def test_no_tokens_at_all(gradients):
    favor = build_mechanism("favor+", num_heads=4, num_kv_heads=2, head_dim=8, num_features=6).feature_map
    x = torch.zeros(3, 4, 0, 8, requires_grad=gradients)
    with torch.set_grad_enabled(gradients):
        log = favor("query", 0.5)(x).log
    assert log.shape == (3, 4, 0, 6)
    if gradients:
        assert torch.autograd.grad(log.sum(), x)[0].shape == x.shape


def test_query_heads_share_the_projection_of_their_key_head():
    """Mechanisms are compared with definitions that use the same projections: these have no other judge."""
    x, weight = (torch.randn(shape, dtype=torch.float64) for shape in ((2, 4, 3, 5), (2, 6, 5)))
    expected = 0.7 * torch.einsum("bhld,hmd->bhlm", x, weight.repeat_interleave(2, 0))
    torch.testing.assert_close(per_head_product(x, weight, 0.7), expected)


@pytest.mark.parametrize("trainable", [False, True])
def test_antithetic_features_come_in_pairs_of_opposite_sign(trainable):
    options = {"num_features": 6, "antithetic": True, "trainable": trainable}
    favor = build_mechanism("favor+", num_heads=2, head_dim=4, **options).feature_map
    x = torch.randn(1, 2, 3, 4)
    for features in (favor("key")(x), favor("query")(x)):
        one, other = features.log.unflatten(-1, (2, 3)).unbind(-2)
        middle = (one + other) / 2  # the same for every pair of a token
        torch.testing.assert_close(middle, middle[..., :1].expand_as(middle))
        assert ((one - other).abs() > 1e-3).any()
