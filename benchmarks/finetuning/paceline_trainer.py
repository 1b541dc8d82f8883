import sys

import torch
from task import BATCH, CLIP, EPOCHS, LR, MODEL, load_data, report, warm_up
from transformers import BertForSequenceClassification

import paceline


def accuracy(output, batch):
    return (output.logits.argmax(-1) == batch["labels"]).sum(), len(batch["labels"])


with paceline.start() as world:
    train, valid = load_data()
    trainer = paceline.Trainer(
        paceline.pretrained(BertForSequenceClassification, MODEL),
        loss=lambda output, batch: output.loss,
        optimizer=lambda named: torch.optim.AdamW([each for _, each in named], lr=LR, weight_decay=0.0),
        schedule=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up),
        clip_norm=CLIP,
        layout=" ".join(sys.argv[1:]),
        example=torch.utils.data.default_collate([train[0], train[1]]),
    )
    losses = []
    for batch in trainer.loader(train, global_batch_size=BATCH, shuffle=False, epochs=EPOCHS):
        losses.append(trainer.step(batch).loss)
    held_out = trainer.loader(valid, global_batch_size=BATCH, shuffle=False)
    found = trainer.evaluate(held_out, {"accuracy": accuracy})
    if world.is_main:
        report(losses, found.metrics["accuracy"])
