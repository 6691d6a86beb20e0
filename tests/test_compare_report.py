"""Scores of comparable results: every number of a report follows from crafted result files; its page is one file."""

import html.parser
import re

import pytest
from comparison.report import comparison_tables, options_of, read_comparison, write_report
from support.documents import task

from hf_rfattn.hub.scores import details, overview, score_and_speed
from hf_rfattn.results.documents import write_result
from hf_rfattn.results.report import as_markdown
from hf_rfattn.results.schema import parse_result

ROWS = {
    "softmax": "softmax",
    "favor+": {"mechanism": "favor+", "num_features": 16},
    "favor+, slow": {"mechanism": "favor+", "num_features": 16},
    "fmm": {"mechanism": "fmm", "bandwidth": 4, "far": [{"mechanism": "favor+", "num_features": 16}]},
    "average": {"mechanism": "average"},
    "band": {"mechanism": "band", "bandwidth": 4},
}


def document(part, row, value, *, seed=0, speed=100.0, metric="accuracy", **changes):
    """Of one run."""
    kind = {"lower_is_better": True} if metric == "perplexity" else {"scale": 1}
    place = {"title": "Crafted", "part": part, "row": row, "order": [part != "snli", list(ROWS).index(row)]}
    made = task(ROWS[row], seed=seed, processes=1, samples_per_second=speed)
    made |= {"metrics": {"other": {"value": 0.125, "n": 7}, metric: {"value": value, "n": 400, **kind}}}
    made |= {"main_metric": metric, "comparison": place, "attention_error": None}
    return made | {"budget": {"steps": 3, "max_length": 64}, "task": part} | changes


@pytest.fixture
def documents():
    scores = {"softmax": (0.8, 0.84), "favor+": (0.61, 0.62), "fmm": (0.75, 0.71), "band": (0.5, 0.54)}
    made = [
        document("snli", row, value, seed=seed, speed=100 + 10 * seed + (50 if row == "favor+" else 0))
        for row, values in {**scores, "average": (0.4, 0.42)}.items()
        for seed, value in enumerate(values)
    ]
    error = {"before": {"overall": [1.0, 0.5]}, "after": {"overall": [0.25, 0.25]}}
    made.append(document("snli", "favor+, slow", 0.7, attention_error=error))
    for row, value in (("softmax", 20.0), ("favor+", 25.0)):
        made.append(document("lm", row, value, metric="perplexity"))
    return made


def tables_of(documents):
    return comparison_tables([parse_result(each, f"{i}.json") for i, each in enumerate(documents)])


def markdown(table):
    return as_markdown([details(table)])


def test_scores_speed_and_memory_beside_softmax(documents):
    snli, lm = tables_of(documents)
    assert (snli.title, snli.metric_name, snli.metric.n) == ("snli", "accuracy (%)", 400)
    rows = {row.label: row for row in snli.rows}
    assert list(rows) == list(ROWS)  # softmax first, controls last
    assert rows["fmm"].score == (pytest.approx(0.73), pytest.approx(0.04 / 2**0.5))
    assert rows["fmm"].over_softmax == pytest.approx(0.73 / 0.82)
    assert rows["favor+"].speed_over_softmax == pytest.approx(155 / 105)
    assert rows["favor+, slow"].score == (0.7, None)
    assert "far field" in rows["favor+"].control and "window" in rows["band"].control
    assert "no attention" in rows["average"].control and rows["fmm"].control is None
    text = markdown(snli)
    assert "| attention | accuracy (%) | of softmax | samples/s | over softmax | peak memory | error |" in text
    assert "| fmm | 73.0 ± 2.8 | 89.0 % | 105 ± 7.1 | 1.00 × | 777 MiB | – |" in text
    assert "| favor+, slow | 70.0 | 85.4 % | 100 | 0.95 × | 777 MiB | 0.75 → 0.25 |" in text
    assert "| favor+ | 25 | 1.250 × |" in markdown(lm)
    assert "seeds 0, 1; Test CPU, 2 threads" in snli.budget and "steps 3, max length 64" in snli.budget


def test_overview(documents):
    table = overview(tables_of(documents))
    shown = {row[0]: row for row in table.rows}
    assert table.headings == ["attention", "snli: accuracy (%)", "lm: perplexity", "mean share of softmax's score", ""]
    assert shown["fmm"] == ["fmm", "73.0 ± 2.8", "–", "89.0 %", ""]  # perplexity is no score
    assert shown["favor+"][1:3] == ["61.5 ± 0.7", "25"] and list(shown)[-2:] == ["average", "band"]


def test_rows_with_another_budget_are_not_compared(documents):
    changed = next(each for each in documents if each["comparison"]["row"] == "band")
    changed["budget"] = {"steps": 3, "max_length": 32}
    alone = next(table for table in tables_of(documents) if table.title == "snli, 32 tokens")
    assert [row.over_softmax for row in alone.rows] == [None]


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.cells = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]

    def handle_data(self, text):
        self.cells.append(text)


def test_files_and_a_page_that_needs_nothing_else(documents, tmp_path):
    for i, each in enumerate(documents):
        write_result(each, tmp_path / "results" / f"{i}.json")
    write_result(task(), tmp_path / "results" / "of_no_comparison.json")
    title, tables = read_comparison(tmp_path / "results")
    assert [path.name for path in write_report("A <b> & c", tables, tmp_path)] == ["report.html", "report.md"]
    assert title == "Crafted" and sum(len(row.runs) for table in tables for row in table.rows) == len(documents)
    text = (tmp_path / "report.md").read_text()
    assert "| fmm | 73.0 ± 2.8 | – | 89.0 % |  |" in text and options_of(tables) in text
    assert "fmm is `fmm, bandwidth=4, far=(favor+, num_features=16)`" in text
    assert re.findall(r"\]\((\w+\.png)\)", text) == ["pareto.png"]
    assert (tmp_path / "pareto.png").read_bytes().startswith(b"\x89PNG")

    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    assert page.addresses and all(address.startswith("data:") for address in page.addresses)
    assert page.tags.count("img") == 1 and not {"script", "iframe", "base", "object", "b"} & set(page.tags)
    assert "url(" not in text and "@import" not in text and "http" not in re.sub(r"base64,[^\"]*", "", text)
    assert "A &lt;b&gt; &amp; c" in text and {"73.0 ± 2.8", "89.0 %", "far field of fmm alone"} <= set(page.cells)


def crafted(chance, softmax, **others):
    """A table with these accuracies, of 400 examples."""
    made = [document("snli", row, value) for row, value in {"softmax": softmax, **others}.items()]
    made += [document("lm", row, 0.9, metric="f1") for row in ("softmax", *others)]
    for each in made:
        each["metrics"].get("accuracy", {})["chance"] = chance
    return tables_of(made)


def test_a_task_that_was_not_learnt():
    """No share of softmax is told of scores that a constant answer has, too."""
    first, second = crafted(0.53, 0.53, fmm=0.54, average=0.62)
    assert [row.learnt for row in first.rows] == [False, False, True]
    assert {row.over_softmax for row in first.rows} == {None} and second.rows[1].over_softmax == 1
    assert {row[-2] for row in overview([first, second]).rows} == {"100.0 %"}  # of the other task
    text = markdown(first)
    assert "of softmax" not in text and "| fmm | 54.0 (chance) |" in text and "| average | 62.0 |" in text


def test_a_row_at_chance():
    table, _ = crafted(0.5, 0.8, fmm=0.52)
    assert [row.learnt for row in table.rows] == [True, False]
    assert "| fmm | 52.0 (chance) | 65.0 % |" in markdown(table)


def test_unreadable_results(tmp_path):
    with pytest.raises(ValueError, match="contains no results of a comparison"):
        read_comparison(tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not a JSON document"):
        read_comparison(tmp_path)


def test_plot(documents):
    first, second = score_and_speed(tables_of(documents)).axes
    assert first.get_title() == "snli" and second.yaxis_inverted() and not first.yaxis_inverted()
    assert score_and_speed([]) is None


def test_scores_before_training():
    """Untrained and after attention transfer, beside the final score; errors likewise."""

    def run(row, before, taught, value):
        seen = [("before training", before), *([("after transfer", taught)] if taught else [])]
        history = [{"step": 0, "stage": stage, "metrics": {"accuracy": {"value": v, "n": 4}}} for stage, v in seen]
        errors = {"before": {"overall": [0.5, 0.7]}, "after": {"overall": [0.1, 0.5]}} if taught else None
        transfer = {"error": {"after": [0.1, 0.2]}} if taught else None
        return document("snli", row, value, history=history, attention_error=errors, transfer=transfer)

    text = markdown(*tables_of([run("softmax", 0.8, None, 0.84), run("favor+", 0.2, 0.6, 0.63)]))
    assert "| favor+ | 20.0 | 60.0 | 63.0 | 75.0 % |" in text and "| softmax | 80.0 | – | 84.0 | 100.0 % |" in text
    assert "| 0.60 → 0.15 → 0.30 |" in text
