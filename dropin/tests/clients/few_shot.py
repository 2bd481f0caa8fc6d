"""setfit's Trainer: contrastive pairs, then a head, then predictions. Usage: few_shot.py FOLDER OUT.json"""

import random
from pathlib import Path

from datasets import Dataset
from outcome import history, record, weights
from sentences import WORDS, model
from setfit import SetFitModel, Trainer, TrainingArguments
from sklearn.linear_model import LogisticRegression
from transformers import set_seed


def data(seed):
    chance = random.Random(seed)
    rows = []
    for label in (0, 1) * 8:
        words = WORDS[2:50] if label else WORDS[50:]
        rows.append(
            {"text": " ".join(chance.choice(words) for _ in range(6)), "label": label}
        )
    return Dataset.from_list(rows)


def main(folder):
    body = model(str(Path(folder) / "model"))
    set_seed(5)
    classifier = SetFitModel(
        model_body=body, model_head=LogisticRegression(), labels=["no", "yes"]
    )
    args = TrainingArguments(
        str(folder), batch_size=4, num_epochs=1, max_steps=6, body_learning_rate=1e-3, logging_steps=1, report_to="none",
        save_strategy="no", seed=7,
    )  # fmt: skip
    trainer = Trainer(
        model=classifier,
        args=args,
        train_dataset=data(0),
        eval_dataset=data(1),
        metric="accuracy",
    )
    trainer.train()
    texts = data(2)["text"]
    return {
        "log": history(
            trainer.st_trainer, "embedding_loss", "grad_norm", "learning_rate", "step"
        ),
        "probabilities": classifier.predict_proba(list(texts)).tolist(),
        "predicted": list(map(str, classifier.predict(list(texts)))),
        "weights": weights(body.parameters()),
    }


if __name__ == "__main__":
    record(main)
