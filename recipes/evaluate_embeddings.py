"""Evaluate an embedding model with any attention: retrieval or STS-B, with throughput and memory of the same run.

python recipes/evaluate_embeddings.py --model BAAI/bge-small-en-v1.5 --attention multipole --document-tokens 512
python recipes/evaluate_embeddings.py --model BAAI/bge-small-en-v1.5 --task stsb --attention fmm --transfer-steps 200
"""

import training.messages  # noqa: F401  # isort: skip

import dataclasses
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from datasets import Dataset
from training.data import Source, check_labels, check_texts, find_source, load_split, take
from training.loop import as_document
from training.metrics import GLUE, measure
from training.models import Collator, attention_of, choose_length, set_attention, with_padding
from training.options import SEQUENCE_PARALLEL, CommonOptions, described
from training.retrieval import CUT, Retrieval, embed, from_squad, load_encoder, model_inside, ranking_metrics, read_beir
from training.session import MODEL, Session, in_session, run_recipe, whole_folder
from training.task import TrainingOrder, check_share
from training.teaching import MODEL_INPUTS, Inputs, model_inputs, recorded_transfer, transfer, transfer_document

import hf_rfattn
from hf_rfattn.results import Metric

USUAL_LENGTH = 512  # of models that name no limit
PAIR = ["sentence1", "sentence2"]
SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
QUERIES_AT_ONCE = 256  # whose scores with all documents are held in memory


@dataclass(kw_only=True)
class EmbeddingOptions(CommonOptions):
    task: Literal["retrieval", "stsb"] = described(
        "Retrieval: --data is SQuAD or a folder in BEIR layout. Or STS-B, the Spearman correlation of cosines.",
        "retrieval",
    )
    split: str | None = described("Which split to evaluate on. Default: test in BEIR layout, else validation.")
    document_tokens: int | None = described(
        "SQuAD: join consecutive paragraphs of an article to documents of so many tokens. Default: --max-length."
    )
    max_documents: int | None = described("Number of documents, the same for every seed.")
    max_queries: int | None = described("Number of queries, the same for every seed.")
    max_samples: int | None = described("STS-B: number of pairs, the same for every seed.")
    pooling: Literal["mean", "cls", "max", "lasttoken"] | None = described(
        "For models without the files of sentence-transformers: how to pool tokens. Default: mean."
    )
    normalize: bool = described(
        "For models without the files of sentence-transformers: compare by cosine, not by dot product.", True
    )
    query_prefix: str | None = described("Text in front of queries. Default: what the model's own files say.")
    document_prefix: str | None = described("Text in front of documents. Default: likewise.")
    sequence_parallel: int = described(SEQUENCE_PARALLEL, 1)
    batch_size: int = described("Texts per step of attention transfer, over all processes.", 4)
    eval_batch_size: int = described("Texts that a process encodes at once.", 32)
    transfer_steps: int = described("Steps of attention transfer on the texts before evaluation, without labels.", 0)
    transfer_learning_rate: float | None = described("Peak learning rate of attention transfer.")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.max_length = self.max_length or self.document_tokens
        if self.task == "stsb" and (self.document_tokens or self.max_documents or self.max_queries):
            raise ValueError("--document-tokens, --max-documents and --max-queries are for retrieval.")


def evaluate_embeddings(options: EmbeddingOptions) -> Path:
    """From the options to the result file; returns its path."""
    return in_session(options, "task", partial(evaluate, options=options))


def evaluate(session: Session, options: EmbeddingOptions) -> None:
    started, accelerator = time.perf_counter(), session.accelerator
    check_share(options.batch_size, accelerator.num_processes, 1)
    encoder = load_encoder(options, options.pooling, options.normalize, accelerator.device)
    own = encoder.max_seq_length  # huge in tokenizers without a limit
    length = choose_length(encoder, options, own if own and own < 10**6 else USUAL_LENGTH)
    encoder.max_seq_length = length
    model = model_inside(encoder)
    set_attention(model, options)
    with accelerator.main_process_first():
        source, split, data, examples = load(options, encoder, length)
    session.open_output()
    found: dict[str, Any] = {"attention": attention_of(model), "transfer": recorded_transfer(options.model)}
    if options.transfer_steps:
        found["transfer"] = teach(session, encoder, data, length)
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
    task = "stsb" if options.task == "stsb" else f"{source.name} retrieval"
    found |= {
        "task": f"made-up {task}" if source.is_sample else task,
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
) -> tuple[Source, str, Retrieval | Dataset, Mapping[str, Dataset]]:
    """Where the data is, its split, the data, and the same as tables for its fingerprint."""
    if options.task == "stsb":
        source = find_source(options.data, "nyu-mll/glue", "stsb", "stsb", options.data_name)
        split = options.split or "validation"
        pairs = take(load_split(source, split, [*PAIR, "label"]), options.max_samples)
        check_texts(pairs, PAIR, f"{source.name}, split {split!r}")
        check_labels(pairs, 0, f"{source.name}, split {split!r}")
        return source, split, pairs, {"pairs": pairs}
    source = find_source(options.data, "rajpurkar/squad", None, "squad", options.data_name)
    if source.folder is not None and (source.folder / "corpus.jsonl").is_file():
        if options.document_tokens:
            raise ValueError("--document-tokens joins paragraphs of SQuAD; a folder in BEIR layout has documents.")
        split = options.split or "test"
        data = read_beir(source.folder, split)
    else:
        split, columns = options.split or "validation", ["title", "context", "question", "id"]
        rows = load_split(source, split, columns)
        check_texts(rows, columns, f"{source.name}, split {split!r}")
        data = from_squad(rows, encoder.tokenizer, options.document_tokens or length)
    data = data.subset(options.max_documents, options.max_queries)
    return source, split, data, data.as_datasets()


def teach(session: Session, encoder: Any, data: Retrieval | Dataset, length: int) -> dict[str, Any]:
    """Attention transfer on the texts; errors are measured on the first of them.

    Beside documents, every third step sees sentences of them, four times as many: queries are as short.
    """
    options, tokenizer = session.options, with_padding(encoder.tokenizer)
    collate, size = Collator(tokenizer), options.batch_size

    def rows_and_inputs(texts: Sequence[str], size: int) -> tuple[Dataset, Inputs]:
        encoded = tokenizer(list(texts), truncation=True, max_length=length)
        rows = Dataset.from_dict({name: encoded[name] for name in MODEL_INPUTS if name in encoded})
        return rows, Inputs(rows, collate, TrainingOrder(len(rows), size, options.seed), session.accelerator)

    batches: Iterable[Any]
    if isinstance(data, Retrieval):
        for_query, for_document = (prefix or "" for prefix in prefixes(options, encoder))
        texts = list(data.documents.values())
        sentences = [for_query + part for text in texts for part in SENTENCE_END.split(text)]
        rows, long = rows_and_inputs([for_document + text for text in texts], size)
        _, short = rows_and_inputs(sentences, 4 * size)
        documents = iter(long)
        batches = (batch for some in short for batch in (next(documents), next(documents), some))
    else:
        rows, batches = rows_and_inputs(data[PAIR[0]][:] + data[PAIR[1]][:], size)
    done = transfer(
        session,
        model_inside(encoder),
        batches,
        steps=options.transfer_steps,
        learning_rate=options.transfer_learning_rate,
        measure=model_inputs(rows, collate, list(range(min(size, len(rows))))),
    )
    return {**transfer_document(done, size), "max_length": length}


def prefixes(options: Any, encoder: Any) -> list[str | None]:
    """Of queries and documents: as the options say, or else the model's own files."""
    given = {"query": options.query_prefix, "document": options.document_prefix}
    return [encoder.prompts.get(name) or None if prefix is None else prefix for name, prefix in given.items()]


def retrieve(session: Session, encoder: Any, data: Retrieval) -> tuple[dict[str, Metric], dict[str, Any]]:
    """Rank all documents for each query."""
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
    """Correlate cosines with the scores that people gave."""
    texts = [*pairs[PAIR[0]][:], *pairs[PAIR[1]][:]]
    embeddings, speed = embed(encoder, texts, session, batch_size=session.options.eval_batch_size)
    cosines = F.cosine_similarity(*embeddings.chunk(2))
    values = measure(GLUE["stsb"], cosines.numpy(), torch.tensor(pairs["label"][:]).numpy())
    return {name: Metric(value, len(pairs), 1, chance=0.0) for name, value in values.items()}, speed


if __name__ == "__main__":
    run_recipe(EmbeddingOptions, evaluate_embeddings, __doc__)
