import lightning
import torch
from task import CLIP, EPOCHS, LR, MODEL, load_loaders, report, warm_up
from transformers import BertForSequenceClassification


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = BertForSequenceClassification.from_pretrained(MODEL)
        self.losses, self.right, self.total = [], 0, 0

    def training_step(self, batch, number):
        loss = self.model(**batch).loss
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, number):
        guesses = self.model(**batch).logits.argmax(-1)
        self.right += (guesses == batch["labels"]).sum().item()
        self.total += len(guesses)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=LR, weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


train, valid = load_loaders()
classifier = Classifier()
classifier.model.train()
trainer = lightning.Trainer(
    max_epochs=EPOCHS,
    gradient_clip_val=CLIP,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    limit_val_batches=0,
)
trainer.fit(classifier, train)
lightning.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False).validate(
    classifier, valid, verbose=False
)
report(classifier.losses, classifier.right / classifier.total)
