"""Teach linear attention to imitate the softmax of a pretrained model, on unlabelled text; then fine-tune from there.

accelerate launch recipes/convert.py --model google-bert/bert-base-uncased --attention fmm --output converted
accelerate launch recipes/finetune_snli.py --model converted/model
"""

import training.messages  # noqa: F401  # isort: skip

from dataclasses import dataclass, field
from typing import Any

from training.data import check_texts, find_source, take
from training.language import load_text, split_blocks, tokens_of
from training.models import Collator, attention_of, choose_length, load_base, load_tokenizer, set_attention
from training.options import CommonOptions, described
from training.session import MODEL, TRANSFER, Session, run_recipe, whole_folder
from training.task import check_share
from training.teaching import MODEL_INPUTS, model_inputs, shared_batches, transfer, transfer_document

USUAL_LENGTH = 512


@dataclass(kw_only=True)
class ConvertOptions(CommonOptions):
    data_config: str | None = described("Which of several sets of that name on the Hub. Default: WikiText-2.")
    split: str = described("Which split to learn from.", "train")
    columns: list[str] = field(
        default_factory=lambda: ["text"], metadata={"help": "The column that holds the text, or two that hold pairs."}
    )
    join: bool = described("Read all texts as one stream, in blocks of --max-length, as language models do.", False)
    max_samples: int | None = described("Number of rows to learn from, the same for every seed.")

    steps: int = described("Steps of attention transfer.", 400)
    batch_size: int = described("Sequences per step, over all processes.", 8)
    learning_rate: float | None = described("Peak learning rate. Default: that of hf_rfattn.convert.")
    parts: float | None = described("Weight of a second loss, that far fields imitate softmax by themselves.")
    save_every: int = described("Steps between states that --resume can continue from.", 100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model is None or self.attention in (None, "softmax"):
            raise ValueError("Give --model, and --attention, the mechanism that is to learn.")
        if not 1 <= len(self.columns) <= 2 or (self.join and len(self.columns) > 1):
            raise ValueError("--columns names one column, or two for pairs; --join takes one.")


def convert(session: Session) -> None:
    options = session.options
    accelerator, batch_size = session.accelerator, options.batch_size
    check_share(batch_size, accelerator.num_processes, 1)
    tokenizer = load_tokenizer(options)
    model = load_base(options).to(accelerator.device)
    config = options.data_config or "wikitext-2-raw-v1"
    source = find_source(options.data, "Salesforce/wikitext", config, options.data_name)
    length = choose_length(model, options, USUAL_LENGTH, tokenizer)

    def encode(texts: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(*texts.values(), truncation=True, max_length=length)
        return {name: encoded[name] for name in MODEL_INPUTS if name in encoded}

    with accelerator.main_process_first():
        if options.join:
            texts = load_text(source, options.split, options.max_samples, options.columns[0])
            rows = split_blocks(tokens_of(texts, tokenizer), length).select_columns(["input_ids"])
        else:
            texts = source.load(options.split, options.columns)
            texts = texts.filter(lambda text: bool(str(text or "").strip()), input_columns=options.columns[0])
            check_texts(texts, options.columns)
            texts = take(texts, options.max_samples)
            rows = texts.map(encode, batched=True, remove_columns=texts.column_names, desc="tokens")
        rows = rows.shuffle(seed=0)
    if len(rows) <= batch_size:
        raise ValueError(
            f"{source.name} has {len(rows)} text(s); more than --batch-size {batch_size} are needed, since errors are "
            "measured on a batch that is not trained on."
        )
    set_attention(model, options)
    session.open_output()
    collate = Collator(tokenizer)
    done = transfer(
        session,
        model,
        shared_batches(session, rows.select(range(batch_size, len(rows))), collate),
        model_inputs(rows, collate, list(range(batch_size))),
        steps=options.steps,
        learning_rate=options.learning_rate,
        parts=options.parts,
    )
    if accelerator.is_main_process:
        with whole_folder(session.output / MODEL) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        found = {
            "attention": attention_of(model),
            "dataset": source.document(options.split, {options.split: texts}),
            "transfer": {**transfer_document(done, batch_size), "max_length": length},
            "errors": done.to_dict(),
        }
        session.finish(found, TRANSFER)


if __name__ == "__main__":
    run_recipe(ConvertOptions, "transfer", convert, __doc__)
