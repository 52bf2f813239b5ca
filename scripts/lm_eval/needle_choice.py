"""Documents of the task needle_choice: RULER's repeated noise, one needle, its number among three others."""

import random
from typing import Any

import datasets

DOCUMENTS = 20
# About 2,100 tokens of the bundled model.
SENTENCES = 60
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def documents(**_: Any) -> dict[str, datasets.Dataset]:
    """The same every time."""
    return {"test": datasets.Dataset.from_list([_document(random.Random(number)) for number in range(DOCUMENTS)])}


def _document(rng: random.Random) -> dict[str, Any]:
    key = "-".join(rng.sample(["amber", "copper", "kettle", "lantern", "marble", "orchard", "ribbon", "willow"], 2))
    choices = [str(number) for number in rng.sample(range(1_000_000, 10_000_000), 4)]
    right = rng.randrange(4)
    sentences = [NOISE] * SENTENCES
    sentences.insert(rng.randrange(SENTENCES), f"One of the special magic numbers for {key} is: {choices[right]}.")
    text = "\n".join(
        [
            "A special magic number is hidden within the following text. Make sure to memorize it. "
            "I will quiz you about the number afterwards.",
            *sentences,
            f"What is the special magic number for {key} mentioned in the provided text? "
            f"The special magic number for {key} mentioned in the provided text is",
        ]
    )
    return {"text": text, "choices": choices, "right": right}
