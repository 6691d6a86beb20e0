"""The speed part: one layer by length, other libraries, whole models, generation, compilation."""

from collections.abc import Iterator
from typing import Any

from hf_rfattn.bench import compile_time, decode, model, ops
from hf_rfattn.results import Block, Image, Paragraph, times

from .pages import Documents, Page, made_by, measured_on, of_kind

SHOWN_LENGTHS = (128, 512, 1024, 4096, 16384)  # of those measured; the files hold all
NOTHING = Paragraph("Nothing has been measured yet.")
DEFAULT_CACHE = Paragraph("Softmax is transformers' default cache, which copies all keys and values for every token.")

Document = dict[str, Any]
Named = tuple[str, Document]


def whole(documents: Documents, page: Page) -> list[Block]:
    """With every number of features, other libraries, and plots."""
    layers = of_kind(documents, "bench ops")
    alone = [each for each in layers if not each[1]["peers"]] or layers
    blocks: list[Block] = []
    for name, document in alone:
        blocks += [_layer_intro(name, document, page), _layer_table(document)]
        blocks += [*_pictures(ops, name, document)[:1], *ops.break_even(document, document["dtypes"][0])]
    for name, document in layers:
        if document["peers"]:
            blocks += _peers(name, document, page)
    for name, document in of_kind(documents, "bench model"):
        blocks += [_model_intro(name, document, page), *model.report(document, name.removesuffix(".json"))]
    for name, document in of_kind(documents, "bench decode"):
        blocks += [*_decode(name, document, page), *_pictures(decode, name, document)]
    for name, document in of_kind(documents, "bench compile"):
        blocks += _compile(name, document, page)
    return blocks or [NOTHING]


def short(documents: Documents, page: Page) -> list[Block]:
    """With the fewest features, and a sentence on other libraries."""
    layers = of_kind(documents, "bench ops")
    blocks: list[Block] = []
    for name, document in layers[:1]:
        features = min((each["features"] for each in document["crossovers"] if each["features"]), default=None)
        blocks += [_layer_intro(name, document, page), _layer_table(document, features)]
    blocks += _said_of_peers(layers)
    for name, document in of_kind(documents, "bench model"):
        found = model.report(document, name)
        blocks += [_model_intro(name, document, page), *(b for b in found if not isinstance(b, Image))]
    for name, document in of_kind(documents, "bench decode"):
        blocks += _decode(name, document, page)
    return blocks or [NOTHING]


def plots(documents: Documents) -> Iterator[tuple[Image, Document]]:
    """Those that the pages show, and what they are drawn from."""
    for kind, benchmark in (("bench ops", ops), ("bench model", model), ("bench decode", decode)):
        for name, document in of_kind(documents, kind):
            yield from ((image, document) for image in _pictures(benchmark, name, document)[:1])


def _pictures(benchmark: Any, name: str, document: Document) -> list[Image]:
    return [block for block in benchmark.report(document, name.removesuffix(".json")) if isinstance(block, Image)]


def _shown(lengths: list[int]) -> list[int]:
    return [length for length in lengths if length in SHOWN_LENGTHS] or lengths


def _layer_intro(name: str, document: Document, page: Page) -> Paragraph:
    shape = document["shape"]
    heads = f"{shape['batch'] * shape['heads']} heads of {shape['head_dim']}"
    return Paragraph(
        f"**One attention layer**, {heads}, on {measured_on(document)}: speed over `scaled_dot_product_attention`, by "
        f"length ({page.link(name)} has all lengths, types, times and spreads; {made_by(document)})."
    )


def _layer_table(document: Document, features: int | None = None) -> Block:
    return ops.speed_table(document, document["dtypes"][0], _shown(document["lengths"]), features)


def _peers(name: str, document: Document, page: Page) -> Iterator[Block]:
    yield Paragraph(
        f"**Other libraries**, float32, as many features as ours, in one run on {measured_on(document)}: speed of "
        f"`favor+` over theirs ({page.link(name)}; {made_by(document)} in the environment of `make peers`)."
    )
    yield ops.peers_table(document, _shown(document["lengths"]))
    checks = [check for check in document["checks"] if check["kind"] == "peer"]
    if checks:
        worst = max(checks, key=lambda check: check["deviation_at_magnitude_1"] or 0)
        failed = ", ".join(sorted({check["name"] for check in checks if not check["passed"]}))
        yield Paragraph(
            f"Each was compared with the definition first, to within {checks[0]['tolerance']}, on queries and keys of "
            f"standard deviation {checks[0]['magnitude']}: {f'{failed} failed' if failed else 'all passed'}. "
            f"At standard deviation 1 their epsilons take over: there {worst['name']} is off by "
            f"{100 * (worst['deviation_at_magnitude_1'] or 0):.0f} %."
        )


def _said_of_peers(layers: list[Named]) -> list[Block]:
    for _, document in layers:
        found: dict[str, list[float]] = {}
        for _, _, _, peer, speeds in ops.speeds_over_peers(document):
            found.setdefault(peer, []).extend(speeds.values())
        if found:
            spans = [f"{times(min(speeds))} to {times(max(speeds))} that of {peer}" for peer, speeds in found.items()]
            said = (
                "**Other libraries**, in the same run with as many features: the speed of `favor+` was "
                f"{' and '.join(spans)}, from the worst to the best of all lengths, directions, passes and numbers of "
                "features."
            )
            return [Paragraph(said)]
    return []


def _model_intro(name: str, document: Document, page: Page) -> Paragraph:
    about = document["model"]
    return Paragraph(
        f"**A whole model**: {about['name']} ({about['layers']} layers of {about['heads']} heads), {about['dtype']}, "
        f"on {measured_on(document)}: speed over softmax, and the memory of a step ({page.link(name)}; "
        f"{made_by(document)})."
    )


def _decode(name: str, document: Document, page: Page) -> list[Block]:
    about, batch = document["model"], document["batches"][0]
    intro = (
        f"**Generating a token**: {about['name']}, batch {batch}, {about['dtype']}, on {measured_on(document)}: "
        f"milliseconds by tokens in the cache ({page.link(name)}; {made_by(document)})."
    )
    return [Paragraph(intro), decode.time_table(document, batch, title=False), DEFAULT_CACHE]


def _compile(name: str, document: Document, page: Page) -> list[Block]:
    intro = (
        f"**torch.compile** ({document['backend']}): {document['model']['name']}, without gradients, on "
        f"{measured_on(document)}: seconds of the first call at each input length, in this order ({page.link(name)}; "
        f"{made_by(document)})."
    )
    said = "The second program serves all lengths after the first."
    return [Paragraph(intro), *compile_time.report(document, name), Paragraph(said)]
