"""Evaluation of embedding models: data, metrics, and whole runs on a tiny model."""

import json
import random
from pathlib import Path

import evaluate_embeddings as recipe
import pytest
import torch
import transformers
from datasets import Dataset
from evaluate_embeddings import Retrieval, from_squad, ranking_metrics, read_beir
from sentence_transformers import SentenceTransformer
from support import sample
from support.recipes import forget_processes, run_apart, sample_tokenizer
from training.messages import script
from training.session import in_session

from hf_rfattn.results.schema import parse_result

WORDS = ("bread", "water", "stone", "paper", "glass", "silver", "iron", "wood", "salt", "sugar", "milk", "gold")


@pytest.fixture(scope="module")
def beir(tmp_path_factory):
    """A folder of 12 documents, each about one word, and as many queries of that word."""
    folder = tmp_path_factory.mktemp("beir")
    dice = random.Random(0)
    corpus = [
        {"_id": f"d{i}", "title": word, "text": " ".join([word, dice.choice(WORDS), word])}
        for i, word in enumerate(WORDS)
    ]
    queries = [{"_id": f"q{i}", "text": word} for i, word in enumerate(WORDS)]
    for name, rows in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "qrels").mkdir()
    lines = ["query-id\tcorpus-id\tscore", *(f"q{i}\td{i}\t1" for i in range(12)), "q0\td1\t0"]
    (folder / "qrels" / "test.tsv").write_text("\n".join(lines) + "\n")
    return str(folder)


def evaluate(model, output, **fields):
    forget_processes()
    options = recipe.EmbeddingOptions(model=model, output=str(output), **{"batch_size": 4, **fields})
    try:
        with script():
            return json.loads(in_session(options, "task", recipe.evaluate).read_text())
    finally:
        forget_processes()


def values(result):
    return {name: metric["value"] for name, metric in result["metrics"].items()}


def test_metrics_by_hand():
    rankings = {"a": ["1", "2", "3"], "b": ["3", "1", "2"], "c": ["2"]}
    relevant = {"a": {"1": 1.0}, "b": {"1": 1.0, "2": 1.0}, "c": {"9": 1.0}}
    found = ranking_metrics(rankings, relevant)
    both = (1 / 1.584962500721156 + 1 / 2) / (1 + 1 / 1.584962500721156)
    assert found == pytest.approx(
        {
            "ndcg_at_10": (1 + both + 0) / 3,
            "mrr_at_10": (1 + 1 / 2 + 0) / 3,
            "recall_at_1": (1 + 0 + 0) / 3,
            "recall_at_10": (1 + 1 + 0) / 3,
        }
    )


def test_metrics_are_those_of_trec_eval():
    pytrec_eval = pytest.importorskip("pytrec_eval")
    dice = random.Random(0)
    documents = [f"d{i}" for i in range(40)]
    relevant = {f"q{i}": {d: float(dice.randint(1, 3)) for d in dice.sample(documents, 1 + i % 14)} for i in range(50)}
    rankings = {query: dice.sample(documents, 10) for query in relevant}
    judged = {query: {d: int(gain) for d, gain in gains.items()} for query, gains in relevant.items()}
    run = {query: {d: float(-place) for place, d in enumerate(ranking)} for query, ranking in rankings.items()}
    measures = {"ndcg_cut.10", "recip_rank", "recall.1,10"}
    by_query = pytrec_eval.RelevanceEvaluator(judged, measures).evaluate(run).values()
    names = {"ndcg_at_10": "ndcg_cut_10", "mrr_at_10": "recip_rank", "recall_at_1": "recall_1"}
    names["recall_at_10"] = "recall_10"
    expected = {ours: sum(each[theirs] for each in by_query) / len(by_query) for ours, theirs in names.items()}
    assert ranking_metrics(rankings, relevant) == pytest.approx(expected)


def test_documents_from_squad_are_consecutive_paragraphs_of_one_article():
    def row(number, title, words):
        return {"id": str(number), "title": title, "context": " ".join(words), "question": words[0]}

    w = WORDS
    rows = [row(0, "x", w[:4]), row(1, "x", w[:4]), row(2, "x", w[4:8]), row(3, "x", w[8:12]), row(4, "y", w[:2])]
    rows.append(row(5, "y", w * 2))  # longer than a document may be
    tokenizer = sample_tokenizer()
    data = from_squad(Dataset.from_list(rows), tokenizer, 10)
    assert data.documents == {
        "0": f"{' '.join(w[:4])}\n{' '.join(w[4:8])}", "1": " ".join(w[8:]), "2": " ".join(w[:2]), "3": " ".join(w * 2)
    }  # fmt: skip
    assert [list(data.relevant[str(i)]) for i in range(6)] == [["0"], ["0"], ["0"], ["1"], ["2"], ["3"]]
    assert len(tokenizer(data.documents["0"])["input_ids"]) == 10


def test_beir_layout(beir):
    data = read_beir(Path(beir), "test")
    assert data.documents["d0"].startswith("bread bread") and data.queries["q3"] == "paper"
    assert data.relevant["q0"] == {"d0": 1.0}
    some = data.subset(5, 3)
    assert len(some.documents) == 5 and len(some.queries) == 3
    assert all(set(gains) <= set(some.documents) for gains in some.relevant.values())
    assert some == data.subset(5, 3)
    with pytest.raises(ValueError, match="None of the queries has a relevant document among these 1"):
        Retrieval({"a": "x", "b": "y"}, {"q": "x"}, {"q": {"c": 1.0}}).subset(1, None)


def test_retrieval_and_what_is_saved(bert, beir, tmp_path, capsys):
    softmax = evaluate(bert, tmp_path / "softmax", data=beir, attention="softmax", pooling="mean")
    parse_result(softmax)
    assert softmax["main_metric"] == "ndcg_at_10"
    assert values(softmax)["recall_at_1"] > 0.4  # a random order has 1/12
    assert softmax["samples_per_second"] > 0 and softmax["tokens_per_text"] == pytest.approx(6, abs=1)
    patched = evaluate(
        bert, tmp_path / "patched", data=beir, attention="hedgehog", transfer_steps=10, exact_heads=0.25,
        query_prefix="first ",
    )  # fmt: skip
    exact = [layer for layer in patched["attention"]["layers"].values() if layer["mechanism"] == "exact_heads"]
    assert exact[0]["rest"]["mechanism"] == "hedgehog" and patched["budget"] == softmax["budget"]
    error = patched["transfer"]["error"]
    assert sum(error["after"]) < sum(error["before"])
    # the saved model is a SentenceTransformer: it says how it pools, and gives the same embeddings
    folder = str(tmp_path / "patched" / "model")
    assert "hedgehog" in (tmp_path / "patched" / "model" / "README.md").read_text()
    again = evaluate(folder, tmp_path / "again", data=beir, query_prefix="first ")
    assert values(again) == values(patched) and again["attention"] == patched["attention"]
    encoder = SentenceTransformer(folder, device="cpu")
    prompted = SentenceTransformer(modules=list(encoder), device="cpu", prompts={"query": "first "})
    prompted.save_pretrained(str(tmp_path / "prompted"))
    assert values(evaluate(str(tmp_path / "prompted"), tmp_path / "third", data=beir)) == values(patched)
    with pytest.raises(SystemExit):
        evaluate(folder, tmp_path / "fourth", data=beir, pooling="cls")
    assert "which sets its pooling" in capsys.readouterr().err


def test_longer_documents_need_more_positions(bert, tmp_path, capsys):
    fields = {"data": sample.folder("squad"), "document_tokens": 100, "max_documents": 8, "max_queries": 20}
    with pytest.raises(SystemExit):
        evaluate(bert, tmp_path / "short", attention="softmax", **fields)
    assert "--max-length 100 exceeds the 64 positions" in capsys.readouterr().err
    result = evaluate(bert, tmp_path / "long", attention="fmm", extend_positions="tile", **fields)
    assert result["task"] == "squad retrieval" and 64 < result["tokens_per_text"] <= 100


def test_stsb_by_several_processes(bert, tmp_path):
    fields = {"task": "stsb", "data": sample.folder("stsb"), "max_samples": 31, "attention": "favor+"}
    alone = evaluate(bert, tmp_path / "one", **fields)
    assert set(values(alone)) == {"pearson", "spearmanr"} and alone["main_metric"] == "spearmanr"
    words = [word for name, value in fields.items() for word in (f"--{name}", value)]
    for parts in (1, 2):  # of each sequence
        run_apart(
            "evaluate_embeddings.py", "--model", bert, "--batch-size", 4, *words, "--sequence-parallel", parts,
            "--output", tmp_path / str(parts), processes=2,
        )  # fmt: skip
        together = json.loads((tmp_path / str(parts) / "result.json").read_text())
        assert together["processes"] == 2 and together["options"]["sequence_parallel"] == parts
        assert values(together) == pytest.approx(values(alone), abs=1e-4)
        assert together["tokens_per_text"] == alone["tokens_per_text"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"attention": "softmax", "transfer_steps": 3}, "--transfer-steps needs a mechanism"),
        ({"task": "stsb", "max_documents": 3}, "need --task retrieval"),
        ({"max_queries": 0}, "--max-queries must be above 0"),
        ({"layers": "0"}, "needs a mechanism"),
    ],
)
def test_options_that_make_no_sense(fields, message):
    with pytest.raises(ValueError, match=message):
        recipe.EmbeddingOptions(model="m", **fields)


def test_embeddings_of_a_model_are_those_of_its_pooling(bert):
    options = recipe.EmbeddingOptions(model=bert, pooling="cls", normalize=False)
    encoder = recipe.load_encoder(options, torch.device("cpu"))
    tokens = sample_tokenizer()("bread water", return_tensors="pt")
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(bert).eval()(**tokens).last_hidden_state[0, 0]
    torch.testing.assert_close(encoder.encode("bread water", convert_to_tensor=True), expected)
    assert encoder.similarity_fn_name == "dot"
