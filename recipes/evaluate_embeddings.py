"""Evaluate an embedding model with any attention: retrieval or STS-B, with throughput and memory of the same run.

python recipes/evaluate_embeddings.py --model BAAI/bge-small-en-v1.5 --attention multipole --document-tokens 512
python recipes/evaluate_embeddings.py --model BAAI/bge-small-en-v1.5 --task stsb --attention fmm --transfer-steps 200
"""

import training.messages  # noqa: F401  # isort: skip

import dataclasses
import json
import math
import random
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from accelerate.utils import gather_object
from datasets import Dataset
from torch import Tensor
from training.classification import CORRELATIONS, measure
from training.data import SUBSET_SEED, Source, check_texts, find_source, take
from training.models import (
    Collator,
    attention_of,
    check_vocabulary,
    choose_length,
    load_tokenizer,
    read_config,
    set_attention,
)
from training.options import SEQUENCE_PARALLEL, TransferOptions, described
from training.session import MODEL, Session, peak_memory, run_recipe, whole_folder
from training.task import MODEL_INPUTS, TrainingOrder, as_document, check_share, model_inputs, shared_batches
from training.teaching import recorded_transfer, transfer
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import hf_rfattn
from hf_rfattn.results.schema import Metric

CUT = 10  # k of nDCG@k, MRR@k and Recall@k
USUAL_LENGTH = 512  # for models without a limit
PAIR = ["sentence1", "sentence2"]
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
QUERIES_AT_ONCE = 256  # number of queries that are scored against all documents at a time


@dataclass(kw_only=True)
class EmbeddingOptions(TransferOptions):
    task: Literal["retrieval", "stsb"] = described(
        "retrieval (--data: SQuAD, or a folder in BEIR format) or stsb (Spearman correlation of cosine similarities).",
        "retrieval",
    )
    split: str | None = described("Split to evaluate on. Default: test for BEIR, otherwise validation.")
    document_tokens: int | None = described(
        "SQuAD: join paragraphs of an article into documents of this many tokens. Default: --max-length."
    )
    max_documents: int | None = described("Maximum number of documents; the same ones for every seed.")
    max_queries: int | None = described("Maximum number of queries; the same ones for every seed.")
    max_samples: int | None = described("STS-B: maximum number of pairs; the same ones for every seed.")
    pooling: Literal["mean", "cls", "max", "lasttoken"] | None = described(
        "Pooling, for models without a sentence-transformers config. Default: mean."
    )
    normalize: bool = described("Normalize embeddings, for models without a sentence-transformers config.", True)
    query_prefix: str | None = described("Prefix of queries. Default: from the config of the model.")
    document_prefix: str | None = described("Prefix of documents. Default: from the config of the model.")
    sequence_parallel: int = described(SEQUENCE_PARALLEL, 1)
    batch_size: int = described("Batch size of attention transfer, over all processes.", 4)
    eval_batch_size: int = described("Batch size per process for encoding.", 32)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_length = self.max_length or self.document_tokens
        if self.task == "stsb" and (self.document_tokens or self.max_documents or self.max_queries):
            raise ValueError("--document-tokens, --max-documents and --max-queries need --task retrieval.")


def evaluate(session: Session) -> None:
    options = session.options
    started, accelerator = time.perf_counter(), session.accelerator
    check_share(options.batch_size, accelerator.num_processes, 1)
    encoder = load_encoder(options, accelerator.device)
    own = encoder.max_seq_length  # very large if the tokenizer has no limit
    length = choose_length(encoder, options, own if own and own < 10**6 else USUAL_LENGTH)
    encoder.max_seq_length = length
    model = model_inside(encoder)
    set_attention(model, options)
    with accelerator.main_process_first():
        source, split, data, examples = load(options, encoder, length)
    session.open_output()
    found: dict[str, Any] = {"transfer": recorded_transfer(options.model)}
    if options.transfer_steps:
        found["transfer"] = teach(session, encoder, data, length)
    found["attention"] = attention_of(model)  # --exact-heads may have changed it
    if session.sequence_group is not None:
        hf_rfattn.shard_sequence(model, session.sequence_group)
    if isinstance(data, Retrieval):
        metrics, speed = retrieve(session, encoder, data)
    else:
        metrics, speed = compare_pairs(session, encoder, data)
    if not accelerator.is_main_process:
        return
    scores = "  ".join(f"{name} {metric.value:.4f}" for name, metric in metrics.items())
    session.say(f"{scores}  {speed['samples_per_second']:.1f} texts/s  {speed['tokens_per_second']:.0f} tokens/s")
    with whole_folder(session.output / MODEL) as folder:
        encoder.save_pretrained(str(folder), create_model_card=False)
    found |= {
        "task": "stsb" if options.task == "stsb" else f"{source.name} retrieval",
        "task_type": "sentence-similarity" if options.task == "stsb" else "text-retrieval",
        "dataset": source.document(split, examples),
        "metrics": as_document(metrics),
        "main_metric": "spearmanr" if options.task == "stsb" else f"ndcg_at_{CUT}",
        "budget": {"max_length": length, **{name: len(part) for name, part in examples.items()}},
        **speed,
        "wall_time_seconds": round(time.perf_counter() - started, 3),
        "options": dataclasses.asdict(options),
    }
    session.finish(found, options.task)


def load(
    options: EmbeddingOptions, encoder: Any, length: int
) -> "tuple[Source, str, Retrieval | Dataset, Mapping[str, Dataset]]":
    """Load the data. Returns its source, split, the data, and the data as datasets for the fingerprint."""
    if options.task == "stsb":
        source = find_source(options.data, "nyu-mll/glue", "stsb", options.data_name)
        split = options.split or "validation"
        pairs = take(source.load(split, [*PAIR, "label"]), options.max_samples)
        check_texts(pairs, PAIR)
        return source, split, pairs, {"pairs": pairs}
    source = find_source(options.data, "rajpurkar/squad", None, options.data_name)
    if source.folder is not None and (source.folder / "corpus.jsonl").is_file():
        split = options.split or "test"
        data = read_beir(source.folder, split)
    else:
        split, columns = options.split or "validation", ["title", "context", "question", "id"]
        rows = source.load(split, columns)
        check_texts(rows, columns)
        data = from_squad(rows, encoder.tokenizer, options.document_tokens or length)
    data = data.subset(options.max_documents, options.max_queries)
    return source, split, data, data.as_datasets()


def teach(session: Session, encoder: Any, data: "Retrieval | Dataset", length: int) -> dict[str, Any]:
    """Run attention transfer on the texts; errors are measured on the first ones.

    For retrieval, every third step uses single sentences of the documents, which are as short as queries, with four
    times the batch size.
    """
    options, tokenizer = session.options, encoder.tokenizer
    collate, size = Collator(tokenizer), options.batch_size

    def encode(texts: Sequence[str], size: int) -> tuple[Dataset, Iterable[Any]]:
        encoded = tokenizer(list(texts), truncation=True, max_length=length)
        rows = Dataset.from_dict({name: encoded[name] for name in MODEL_INPUTS if name in encoded})
        return rows, shared_batches(session, rows, collate, TrainingOrder(len(rows), size, options.seed))

    if isinstance(data, Retrieval):
        for_query, for_document = (prefix or "" for prefix in prefixes(options, encoder))
        texts = list(data.documents.values())
        rows, long = encode([for_document + text for text in texts], size)
        _, short = encode([for_query + part for text in texts for part in SENTENCE_END.split(text)], 4 * size)
        documents = iter(long)
        batches: Iterable[Any] = (batch for some in short for batch in (next(documents), next(documents), some))
    else:
        rows, batches = encode(data[PAIR[0]][:] + data[PAIR[1]][:], size)
    few = model_inputs(rows, collate, list(range(min(size, len(rows)))))
    return {**transfer(session, model_inside(encoder), batches, few), "max_length": length}


def prefixes(options: Any, encoder: Any) -> list[str | None]:
    """Prefixes of queries and of documents: from the options, by default from the config of the model."""
    given = {"query": options.query_prefix, "document": options.document_prefix}
    return [encoder.prompts.get(name) or None if prefix is None else prefix for name, prefix in given.items()]


def load_encoder(options: EmbeddingOptions, device: torch.device) -> Any:
    """Load a SentenceTransformer in float32. Models without a sentence-transformers config use --pooling."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
    from sentence_transformers.util import is_sentence_transformer_model

    name, weights = str(options.model), {"dtype": torch.float32}
    read_config("--model", options.model)
    if is_sentence_transformer_model(name):
        if options.pooling is not None:
            raise ValueError(
                f"--pooling: {name} has a sentence-transformers config, which sets its pooling. Leave the option out."
            )
        encoder = SentenceTransformer(name, device=str(device), model_kwargs=weights)
    else:
        body = Transformer(name, model_kwargs=weights)
        parts = [body, Pooling(model_inside(body).config.hidden_size, options.pooling or "mean")]
        encoder = SentenceTransformer(
            modules=parts + ([Normalize()] if options.normalize else []),
            device=str(device),
            similarity_fn_name="cosine" if options.normalize else "dot",
        )
    if options.tokenizer is not None:
        encoder.tokenizer = load_tokenizer(options)
    check_vocabulary(encoder.tokenizer, f"--model {name}")
    return encoder.eval()


def model_inside(encoder: Any) -> PreTrainedModel:
    """Return the transformers model inside a SentenceTransformer."""
    models = [module for module in encoder.modules() if isinstance(module, PreTrainedModel)]
    if not models:
        raise ValueError(
            "This SentenceTransformer contains no transformers model, so there is no attention to replace."
        )
    return models[0]


def embed(
    encoder: Any, texts: Sequence[str], session: Session, *, batch_size: int, prefix: str | None = None
) -> tuple[Tensor, dict[str, Any]]:
    """Embed texts, divided among the processes. Returns all embeddings and the total speed, including tokenization."""
    accelerator, (rank, processes) = session.accelerator, session.share()
    numbers = list(range(rank, len(texts), processes))
    share = [texts[i] for i in numbers]
    settings = {"prompt": prefix, "batch_size": batch_size, "convert_to_tensor": True, "show_progress_bar": False}
    if share:
        encoder.encode(share[:batch_size], **settings)  # warm-up
    accelerator.wait_for_everyone()
    start = time.perf_counter()
    own = encoder.encode(share, **settings).cpu() if share else None
    seconds = time.perf_counter() - start
    whole = [f"{prefix or ''}{text}" for text in share]
    encoded = encoder.tokenizer(whole, truncation=True, max_length=encoder.max_seq_length)["input_ids"] if share else []
    found = {"numbers": numbers, "rows": own, "seconds": seconds, "tokens": sum(map(len, encoded))}
    parts = gather_object([{**found, "peak": peak_memory(accelerator.device)}])
    filled = [part for part in parts if part["numbers"]]
    rows = torch.empty(len(texts), filled[0]["rows"].shape[1])
    for part in filled:
        rows[part["numbers"]] = part["rows"].float()
    seconds, tokens = max(part["seconds"] for part in parts), sum(part["tokens"] for part in parts)
    tokens = tokens * processes // accelerator.num_processes  # processes that split a sequence all count its tokens
    return rows, {
        "samples_per_second": len(texts) / seconds,
        "tokens_per_second": tokens / seconds,
        "peak_memory_bytes": max(part["peak"] for part in parts) or None,
        "encode_seconds": round(seconds, 3),
        "tokens_per_text": round(tokens / len(texts), 1),
    }


def retrieve(session: Session, encoder: Any, data: "Retrieval") -> tuple[dict[str, Metric], dict[str, Any]]:
    """Rank all documents for each query. Returns metrics and the speed of embedding the documents."""
    for_query, for_document = prefixes(session.options, encoder)
    run = partial(embed, encoder, session=session, batch_size=session.options.eval_batch_size)
    documents, speed = run(list(data.documents.values()), prefix=for_document)
    queries, _ = run(list(data.queries.values()), prefix=for_query)
    names, best = list(data.documents), min(CUT, len(data.documents))
    order = [
        row
        for some in queries.split(QUERIES_AT_ONCE)
        for row in encoder.similarity(some, documents).topk(best, dim=1).indices.tolist()
    ]
    rankings = {query: [names[i] for i in row] for query, row in zip(data.queries, order, strict=True)}
    metrics = ranking_metrics(rankings, data.relevant)
    return {name: Metric(value, len(rankings), 1) for name, value in metrics.items()}, speed


def compare_pairs(session: Session, encoder: Any, pairs: Dataset) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Correlate cosine similarities with the labels. Returns metrics and the speed of embedding."""
    texts = [*pairs[PAIR[0]][:], *pairs[PAIR[1]][:]]
    embeddings, speed = embed(encoder, texts, session, batch_size=session.options.eval_batch_size)
    cosines = F.cosine_similarity(*embeddings.chunk(2))
    values = measure(CORRELATIONS, cosines.numpy(), torch.tensor(pairs["label"][:]).numpy())
    return {name: Metric(value, len(pairs), 1, chance=0.0) for name, value in values.items()}, speed


@dataclass(frozen=True)
class Retrieval:
    """Texts by id. `relevant`: for each query, its relevant documents with their gains, which are positive."""

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    relevant: Mapping[str, Mapping[str, float]]

    def subset(self, documents: int | None, queries: int | None) -> "Retrieval":
        """Return random subsets of the documents and of the queries about them, the same ones for every seed."""
        kept = _some(list(self.documents), documents)
        inside = set(kept)
        relevant = {
            query: {document: gain for document, gain in gains.items() if document in inside}
            for query, gains in self.relevant.items()
        }
        asked = _some([query for query in self.queries if relevant.get(query)], queries)
        if not asked:
            raise ValueError(
                f"None of the queries has a relevant document among these {len(kept)}. Increase --max-documents."
            )
        return Retrieval(
            {name: self.documents[name] for name in kept},
            {name: self.queries[name] for name in asked},
            {name: relevant[name] for name in asked},
        )

    def as_datasets(self) -> dict[str, Dataset]:
        """Convert to datasets, for the fingerprint."""
        pairs = [(query, name, gain) for query, gains in self.relevant.items() for name, gain in gains.items()]
        return {
            "documents": Dataset.from_dict({"id": list(self.documents), "text": list(self.documents.values())}),
            "queries": Dataset.from_dict({"id": list(self.queries), "text": list(self.queries.values())}),
            "relevant": Dataset.from_list([{"query": q, "document": d, "gain": float(g)} for q, d, g in pairs]),
        }


def _some(names: list[str], most: int | None) -> list[str]:
    """Return a random subset of at most `most` names in their original order, the same one for every seed."""
    if most is None or most >= len(names):
        return names
    chosen = set(random.Random(SUBSET_SEED).sample(range(len(names)), most))
    return [name for i, name in enumerate(names) if i in chosen]


def read_beir(folder: Path, split: str) -> Retrieval:
    """Read corpus.jsonl (_id, text, title), queries.jsonl (_id, text) and qrels/SPLIT.tsv (query, document, gain)."""
    documents, queries = (
        {
            str(row["_id"]): f"{row.get('title') or ''} {row['text']}".strip()
            for row in map(json.loads, (folder / name).read_text(encoding="utf-8").splitlines())
        }
        for name in ("corpus.jsonl", "queries.jsonl")
    )
    relevant: dict[str, dict[str, float]] = {}
    lines = (folder / "qrels" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
    for line in lines[1:] if lines[0].startswith("query") else lines:
        query, document, gain = line.split("\t")[:3]
        if query not in queries or document not in documents:
            raise ValueError(
                f"qrels/{split}.tsv: {query!r} is not in queries.jsonl, or {document!r} is not in corpus.jsonl."
            )
        if float(gain) > 0:
            relevant.setdefault(query, {})[document] = float(gain)
    return Retrieval(documents, queries, relevant)


def from_squad(rows: Dataset, tokenizer: PreTrainedTokenizerBase, tokens: int) -> Retrieval:
    """Join consecutive paragraphs of an article to documents of at most `tokens` tokens; the queries are the questions.

    A longer paragraph is a document by itself.
    """
    room = tokens - tokenizer.num_special_tokens_to_add()
    documents: dict[str, str] = {}
    place: dict[tuple[str, str], str] = {}  # the document of each paragraph
    free, article = 0, None
    paragraphs = list(dict.fromkeys(zip(rows["title"][:], rows["context"][:], strict=True)))
    lengths = [len(ids) for ids in tokenizer([text for _, text in paragraphs], add_special_tokens=False)["input_ids"]]
    for (title, text), length in zip(paragraphs, lengths, strict=True):
        if title != article or length > free:
            name, free, article = str(len(documents)), room, title
            documents[name] = text
        else:
            documents[name] += f"\n{text}"
        free -= length
        place[title, text] = name
    relevant = {
        query: {place[title, context]: 1.0}
        for query, title, context in zip(rows["id"][:], rows["title"][:], rows["context"][:], strict=True)
    }
    return Retrieval(documents, dict(zip(rows["id"][:], rows["question"][:], strict=True)), relevant)


def ranking_metrics(
    rankings: Mapping[str, Sequence[str]], relevant: Mapping[str, Mapping[str, float]]
) -> dict[str, float]:
    """Compute metrics as trec_eval defines them, averaged over queries. Rankings start with the best document.

    >>> ranking_metrics({"q": ["b", "a"]}, {"q": {"a": 1.0}})
    {'ndcg_at_10': 0.6309297535714575, 'mrr_at_10': 0.5, 'recall_at_1': 0.0, 'recall_at_10': 1.0}
    """
    sums = dict.fromkeys((f"ndcg_at_{CUT}", f"mrr_at_{CUT}", "recall_at_1", f"recall_at_{CUT}"), 0.0)
    for query, gains in relevant.items():
        found = [gains.get(document, 0.0) for document in rankings[query][:CUT]]
        places = [place for place, gain in enumerate(found, start=1) if gain > 0]
        sums[f"ndcg_at_{CUT}"] += _discounted(found) / _discounted(sorted(gains.values(), reverse=True)[:CUT])
        sums[f"mrr_at_{CUT}"] += 1 / places[0] if places else 0.0
        sums["recall_at_1"] += (1 in places) / len(gains)
        sums[f"recall_at_{CUT}"] += len(places) / len(gains)
    return {name: total / len(relevant) for name, total in sums.items()}


def _discounted(gains: Sequence[float]) -> float:
    return sum(gain / math.log2(place + 1) for place, gain in enumerate(gains, start=1))


if __name__ == "__main__":
    run_recipe(EmbeddingOptions, "task", evaluate, __doc__)
