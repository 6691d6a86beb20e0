"""Sample a text corpus from a language model, for comparisons of attention mechanisms in this model.

python recipes/write_text.py --model DIR_OR_NAME --output stories
"""

from training.messages import script  # isort: skip

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.progress import track
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_rfattn.results.documents import check_writable

BATCH = 100


@script()
def main(
    model: Annotated[str, typer.Option(help="Folder of a causal language model, or its name on the Hub.")],
    output: Annotated[Path, typer.Option(help="Folder for train.jsonl and validation.jsonl.")],
    train: Annotated[int, typer.Option(min=1, help="Number of training texts.")] = 500,
    validation: Annotated[int, typer.Option(min=1, help="Number of evaluation texts.")] = 100,
    length: Annotated[int, typer.Option(min=2, help="Maximum length of a text in tokens.")] = 256,
    seed: Annotated[int, typer.Option(help="Random seed.")] = 0,
) -> None:
    """Sample texts from a language model at temperature 1, starting from its first token."""
    check_writable(output)
    if output.exists() and any(output.iterdir()):
        raise typer.BadParameter(f"{output} is not empty; choose another folder.", param_hint="--output")
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if tokenizer.bos_token_id is None:
        raise typer.BadParameter(f"The tokenizer of {model} has no first token to begin with.", param_hint="--model")
    writer = AutoModelForCausalLM.from_pretrained(model, trust_remote_code=False).eval()
    torch.manual_seed(seed)
    texts: list[str] = []
    for start in track(range(0, train + validation, BATCH), description="writing"):
        first = torch.full((min(BATCH, train + validation - start), 1), tokenizer.bos_token_id)
        written = writer.generate(
            first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0, max_length=length,
            pad_token_id=tokenizer.eos_token_id,
        )  # fmt: skip
        texts += tokenizer.batch_decode(written, skip_special_tokens=True)
    output.mkdir(parents=True, exist_ok=True)
    for name, part in (("train", texts[:train]), ("validation", texts[train:])):
        lines = [json.dumps({"text": text}, ensure_ascii=False) for text in part]
        (output / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
