import torch
from accelerate import Accelerator
from task import CLIP, EPOCHS, LR, MODEL, load_loaders, report, warm_up
from transformers import BertForSequenceClassification

accelerator = Accelerator(cpu=True)
model = BertForSequenceClassification.from_pretrained(MODEL)
optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
train, valid = load_loaders()
model, optimizer, train, valid, schedule = accelerator.prepare(model, optimizer, train, valid, schedule)
losses = []
for _ in range(EPOCHS):
    model.train()
    for batch in train:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
model.eval()
right = total = 0
for batch in valid:
    with torch.no_grad():
        logits = model(**batch).logits
    guesses, labels = accelerator.gather_for_metrics((logits.argmax(-1), batch["labels"]))
    right, total = right + (guesses == labels).sum().item(), total + len(labels)
report(losses, right / total)
