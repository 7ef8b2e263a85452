"""Texts that hide notes, for the shipped model, and questions about them."""

import random

from transformers import AutoTokenizer

from snapstream.assets import TASK_MODEL
from snapstream.evaluation.tasks.needle import notes


class Notes:
    """A text of at most so many tokens with its question; questions are in the order of the text."""

    def __init__(self, tokens, number, seed=0):
        self.tokenizer = AutoTokenizer.from_pretrained(TASK_MODEL)
        made = notes(random.Random(seed), tokens, self.count, None, number)
        self.text = made.text
        self.questions = sorted(made.questions, key=lambda question: made.text.index(question.parts[0]))

    def count(self, text):
        return len(self.tokenizer.encode(text))

    def prompt(self, question):
        return self.text + question.ask

    def depth(self, question):
        return self.text.index(question.parts[0]) / len(self.text)
