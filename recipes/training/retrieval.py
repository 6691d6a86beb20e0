"""Retrieval data, in BEIR layout or from SQuAD, and how good a ranking is."""

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from .data import SUBSET_SEED

CUT = 10  # places of a ranking that count


@dataclass(frozen=True)
class Retrieval:
    """Texts by id. `relevant`: for each query, the documents that answer it with their gains, all above 0."""

    documents: Mapping[str, str]
    queries: Mapping[str, str]
    relevant: Mapping[str, Mapping[str, float]]

    def subset(self, documents: int | None, queries: int | None) -> "Retrieval":
        """At most so many documents, and at most so many of the queries that are about them; the same every time."""
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
        """For the fingerprint."""
        pairs = [(query, name, gain) for query, gains in self.relevant.items() for name, gain in gains.items()]
        return {
            "documents": Dataset.from_dict({"id": list(self.documents), "text": list(self.documents.values())}),
            "queries": Dataset.from_dict({"id": list(self.queries), "text": list(self.queries.values())}),
            "relevant": Dataset.from_list([{"query": q, "document": d, "gain": float(g)} for q, d, g in pairs]),
        }


def _some(names: list[str], most: int | None) -> list[str]:
    """At most so many, drawn once and for all, in their old order."""
    if most is None or most >= len(names):
        return names
    chosen = set(random.Random(SUBSET_SEED).sample(range(len(names)), most))
    return [name for i, name in enumerate(names) if i in chosen]


def read_beir(folder: Path, split: str) -> Retrieval:
    """corpus.jsonl (_id, text, title), queries.jsonl (_id, text) and qrels/SPLIT.tsv (query, document, gain)."""
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
    """Documents of at most `tokens` tokens, consecutive paragraphs of one article, and the questions about them.

    A paragraph that is longer is a document by itself.
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
    """Means over queries, as trec_eval defines them, of rankings that begin with the best document.

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
