"""The report of a comparison: every number in it follows from crafted result files, and the page needs nothing else."""

import html.parser
import json
import re
from itertools import product

import pytest
from comparison.figures import best_of, crossover, pareto
from comparison.report import overview_table, report, write_report
from comparison.summary import crossovers, read_summary, summarise
from support.documents import task

from hf_rfattn.results import Heading, as_html, as_markdown, parse_result, write_result

ROWS = {
    "softmax": "softmax",
    "favor+": {"mechanism": "favor+", "num_features": 16},
    "favor+, slow": {"mechanism": "favor+", "num_features": 16},
    "fmm": {"mechanism": "fmm", "bandwidth": 4, "far": [{"mechanism": "favor+", "num_features": 16}]},
    "band": {"mechanism": "band", "bandwidth": 4},
    "average": {"mechanism": "average"},
}


def document(part, row, value, *, seed=0, length=64, processes=1, tokens=1000.0, metric="accuracy", **changes):
    """Of one run."""
    lower = {"lower_is_better": True} if metric == "perplexity" else {}
    place = {"title": "Crafted", "part": part, "row": row, "order": [part != "snli", list(ROWS).index(row)]}
    made = task(ROWS[row], seed=seed, processes=processes, tokens_per_second=tokens, samples_per_second=tokens / 10)
    made |= {"metrics": {"other": {"value": 0.125, "n": 7}, metric: {"value": value, "n": 400, **lower}}}
    made |= {"main_metric": metric, "comparison": {**place, "accuracy": True}, "attention_error": None}
    return made | {"budget": {"steps": 3, "max_length": length}, "task": part} | changes


@pytest.fixture
def documents():
    scores = {"softmax": (0.8, 0.84), "favor+": (0.61, 0.62), "fmm": (0.75, 0.71), "band": (0.5, 0.54)}
    made = [
        document("snli", row, value, seed=seed, tokens=1000 + 100 * seed + (500 if row == "favor+" else 0))
        for row, values in {**scores, "average": (0.4, 0.42)}.items()
        for seed, value in enumerate(values)
    ]
    error = {"before": {"overall": [1.0, 0.5]}, "after": {"overall": [0.25, 0.25]}}
    made.append(document("snli", "favor+, slow", 0.7, attention_error=error))
    for (length, softmax, favor), processes in product([(64, 900.0, 300.0), (256, 400.0, 800.0)], (1, 2)):
        scale = {1: 1.0, 2: 1.6}[processes]
        for row, tokens in (("softmax", softmax), ("favor+", favor)):
            made.append(
                document("lm", row, 20.0 if row == "softmax" else 25.0, length=length, processes=processes,
                         tokens=scale * tokens, metric="perplexity")
            )  # fmt: skip
    return made


@pytest.fixture
def summary(documents):
    return summarise([parse_result(each, f"{i}.json") for i, each in enumerate(documents)])


def test_accuracy_beside_softmax(summary):
    snli, *languages = summary["accuracy"]
    assert (snli["part"], snli["metric"], snli["examples"], len(languages)) == ("snli", "accuracy", 400, 2)
    rows = {row["row"]: row for row in snli["rows"]}
    assert list(rows) == list(ROWS)
    assert rows["fmm"]["metric"]["mean"] == pytest.approx(0.73)
    assert rows["fmm"]["metric"]["spread"] == pytest.approx(0.04 / 2**0.5)
    assert rows["fmm"]["over_softmax"] == pytest.approx(0.73 / 0.82)
    assert rows["favor+, slow"]["metric"] == {"mean": 0.7, "spread": None, "values": [0.7]}
    assert rows["favor+, slow"]["attention_error"] == {"before": 0.75, "after": 0.25, "transferred": None}
    assert "far field" in rows["favor+"]["control"] and "window" in rows["band"]["control"]
    assert "no attention" in rows["average"]["control"] and rows["fmm"]["control"] is None
    for table in languages:  # once for each length, on the fewest processes
        favor = next(row for row in table["rows"] if row["row"] == "favor+")
        assert favor["over_softmax"] == pytest.approx(1.25) and table["processes"] == 1
    shown = {row[0]: row for row in overview_table(summary).rows}
    assert next(iter(shown)) == "softmax" and list(shown)[-2:] == ["band", "average"]
    assert shown["fmm"][-2] == "89.0 %"  # perplexity is no score


def test_rows_with_another_budget_are_not_compared(documents):
    changed = next(each for each in documents if each["comparison"]["row"] == "band")
    changed["budget"] = {"steps": 99, "max_length": 64}
    tables = summarise([parse_result(each) for each in documents])["accuracy"]
    alone = next(table for table in tables if table["budget"]["steps"] == 99)
    assert [row["over_softmax"] for row in alone["rows"]] == [None]


def test_speed_scaling_and_crossover(summary):
    entries = {(e["part"], e["row"], e["length"], e["processes"]): e for e in summary["speed"]}
    two = entries["lm", "favor+", 256, 2]
    assert two["efficiency"] == pytest.approx(0.8) and two["over_softmax"] == pytest.approx(2.0)
    assert entries["snli", "favor+", 64, 1]["tokens_per_second"]["mean"] == pytest.approx(1550)
    assert entries["snli", "favor+", 64, 1]["peak_memory_bytes"] == 777 * 2**20
    found = crossovers(summary)
    assert {(c["row"], c["processes"], c["length"]) for c in found} == {("favor+", 1, 256), ("favor+", 2, 256)}
    assert 64 < found[0]["interpolated"] < 256


def test_scaling_needs_as_many_threads(documents):
    """One process with two threads is no measure for two with one each."""
    for each in documents:
        if each["processes"] == 2:
            each["hardware"] = {**each["hardware"], "threads": 1}
    speeds = summarise([parse_result(each) for each in documents])["speed"]
    assert {entry["efficiency"] for entry in speeds if entry["processes"] == 2} == {None}


def test_too_short_to_judge(documents):
    for each in documents:
        each["comparison"]["accuracy"] = each["task"] != "lm"
    summary = summarise([parse_result(each) for each in documents])
    assert [table["part"] for table in summary["accuracy"]] == ["snli"]
    assert {entry["part"] for entry in summary["speed"]} == {"snli", "lm"}


class Page(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.addresses, self.cells = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.addresses += [value for name, value in attributes if name in ("src", "href", "srcset", "action", "data")]

    def handle_data(self, text):
        self.cells.append(text.replace("\xa0", " "))


def test_the_page_needs_nothing_else(summary):
    text = as_html("A <b> & c", report(summary))
    page = Page(text)
    assert page.addresses and all(address.startswith("data:") for address in page.addresses)
    assert page.tags.count("img") == 2 and not {"script", "iframe", "base", "object"} & set(page.tags)
    assert "url(" not in text and "@import" not in text and "http" not in re.sub(r"base64,[^\"]*", "", text)
    assert "A &lt;b&gt; &amp; c" in text
    for shown in ("73.0 ± 2.8", "89.0 %", "1.250 ×", "80.0 %", "far field of fmm alone"):
        assert any(shown == cell for cell in page.cells), shown


def test_markdown_and_files(documents, tmp_path):
    for i, each in enumerate(documents):
        write_result(each, tmp_path / "results" / f"{i}.json")
    write_result(task(), tmp_path / "results" / "of_no_comparison.json")
    summary = read_summary(tmp_path / "results")
    assert len(summary["files"]) == len(documents)
    written = write_report(summary, tmp_path)
    assert [path.name for path in written] == ["report.html", "report.md", "report.json"]
    assert json.loads((tmp_path / "report.json").read_text()) == summary
    text = (tmp_path / "report.md").read_text()
    assert text == as_markdown([Heading("Crafted", 1), *report(summary)])
    assert "| fmm | 73.0 ± 2.8 | – | – | 89.0 % |  |" in text
    assert re.search(r"favor\+ \(lm\) 256 \(1\d\d\)", text)
    assert "Test CPU, 2 threads" in text
    for name in re.findall(r"\]\((\w+\.png)\)", text):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def crafted(chance, softmax, **others):
    """A table with these accuracies, of 400 examples."""
    made = [document("snli", row, value) for row, value in {"softmax": softmax, **others}.items()]
    made += [document("lm", row, 0.9, metric="f1") for row in ("softmax", *others)]
    for each in made:
        each["metrics"].get("accuracy", {})["chance"] = chance
        each["metrics"][each["main_metric"]]["scale"] = 1
    return summarise([parse_result(each) for each in made])


def test_a_task_that_was_not_learnt(tmp_path):
    """No share of softmax is told of scores that a constant answer has, too."""
    summary = crafted(0.53, 0.53, fmm=0.54, average=0.62)
    first, second = summary["accuracy"]
    assert not first["learnt"] and second["learnt"]
    assert [row["learnt"] for row in first["rows"]] == [False, False, True]
    assert {row["over_softmax"] for row in first["rows"]} == {None}
    assert {row[-2] for row in overview_table(summary).rows} == {"100.0 %"}  # of the other task
    text = as_markdown(report(summary))
    assert "101.9 %" not in text and "| fmm | 54.0 (chance) |" in text and "| average | 62.0 |" in text


def test_a_row_at_chance(tmp_path):
    summary = crafted(0.5, 0.8, fmm=0.52)
    assert [row["learnt"] for row in summary["accuracy"][0]["rows"]] == [True, False]
    text = as_markdown(report(summary))
    assert "| fmm | 52.0 (chance) |" in text and "| fmm | 52.0 |" not in text


def test_chance_of_earlier_results():
    """A blind guess for accuracies, 0 for correlations, unknown otherwise."""
    found = {}
    for name, metric, value in (("rte", "accuracy", 0.54), ("cola", "matthews_correlation", 0.05), ("x", "f1", 0.1)):
        made = [document("snli", "softmax", value, metric=metric, task=name)]
        made[0]["metrics"][metric]["scale"] = 1
        (table,) = summarise([parse_result(each) for each in made])["accuracy"]
        found[name] = table["chance"], table["learnt"]
    assert found == {"rte": (0.5, False), "cola": (0.0, False), "x": (None, True)}


def test_unreadable_results(tmp_path):
    with pytest.raises(ValueError, match="holds no results of a comparison"):
        read_summary(tmp_path)
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a\.json is not a JSON document"):
        read_summary(tmp_path)


def test_plots(summary):
    figure = pareto(summary)
    assert figure.axes[0].get_title().startswith("snli")
    assert figure.axes[1].yaxis_inverted() and not figure.axes[0].yaxis_inverted()
    assert len(crossover(summary).axes) == 2  # one and two processes
    assert crossover({**summary, "speed": []}) is None and pareto({**summary, "accuracy": []}) is None
    assert best_of([(1, 1), (2, 2)]) == [(2, 2)]


def test_scores_before_training():
    """Untrained and after attention transfer, beside the final score; errors likewise."""

    def run(row, before, taught, value, metric="accuracy"):
        seen = [("before training", before), *([("after transfer", taught)] if taught else [])]
        history = [{"step": 0, "stage": stage, "metrics": {metric: {"value": v, "n": 4}}} for stage, v in seen]
        errors = {"before": {"overall": [0.5, 0.7]}, "after": {"overall": [0.1, 0.5]}} if taught else None
        transfer = {"error": {"after": [0.1, 0.2]}} if taught else None
        more = {"history": history, "attention_error": errors, "transfer": transfer}
        return parse_result(document("snli", row, value, metric=metric, **more))

    text = as_markdown(report(summarise([run("softmax", 0.8, None, 0.84), run("favor+", 0.2, 0.6, 0.63)])))
    assert "| favor+ | 20.0 | 60.0 | 63.0 | 75.0 % |" in text and "| softmax | 80.0 | – | 84.0 | 100.0 % |" in text
    assert "| 0.60 → 0.15 → 0.30 |" in text
    runs = [run("softmax", 30, None, 20, "perplexity"), run("favor+", 60, 40, 25, "perplexity")]
    text = as_markdown(report(summarise(runs)))
    assert "| favor+ | 60 | 40 | 25 | 1.250 × |" in text and "mean share" not in text
