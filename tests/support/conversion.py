"""Batches for attention transfer, and what it has learned."""

import torch


def make_batches(count=6, rows=4, length=24):
    """Random tokens of the models of `support.models`; the first row of each batch is half padding."""
    batches = []
    for _ in range(count):
        mask = torch.ones(rows, length, dtype=torch.long)
        mask[0, length // 2 :] = 0
        batches.append({"input_ids": torch.randint(1, 50, (rows, length)), "attention_mask": mask})
    return batches


class Torn(Exception):
    pass


def torn(batches, end):
    """Batches, again and again, that break off before step `end`."""
    for number in range(end):
        yield batches[number % len(batches)]
    raise Torn


def learnt(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if ".rf." in name}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
