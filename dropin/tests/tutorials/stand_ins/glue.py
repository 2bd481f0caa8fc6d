"""The metric of the GLUE tasks that compare two sentences: accuracy and F1, in the form that `evaluate.load` finds."""

import datasets
import evaluate
from sklearn.metrics import accuracy_score, f1_score


class Glue(evaluate.Metric):
    """Shares of right answers for one configuration, `mrpc`."""

    def _info(self):
        numbers = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions and references: class numbers",
            features=datasets.Features({"predictions": numbers, "references": numbers}),
            format="numpy",
        )

    def _compute(self, predictions, references):
        return {
            "accuracy": float(accuracy_score(references, predictions)),
            "f1": float(f1_score(references, predictions)),
        }
