import sys

import torch
from task import CLIP, EPOCHS, LR, MODEL, load_loaders, report, warm_up
from transformers import BertForSequenceClassification

import paceline


def accuracy(output, batch):
    return (output.logits.argmax(-1) == batch["labels"]).sum(), len(batch["labels"])


with paceline.start() as world:
    model = BertForSequenceClassification.from_pretrained(MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
    train, valid = load_loaders()
    loop = paceline.Loop(model, optimizer, layout=" ".join(sys.argv[1:]), example=next(iter(train)))
    losses = []
    model.train()
    for step in loop.loader(train, epochs=EPOCHS):
        for batch in step:
            step.backward(model(**batch).loss)
        step.clip_grad_norm_(CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(step.loss)
    found = loop.evaluate(loop.loader(valid), lambda output, batch: output.loss, {"accuracy": accuracy})
    if world.is_main:
        report(losses, found.metrics["accuracy"])
