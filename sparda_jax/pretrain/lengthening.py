"""The stages that make the grown model (growth.py) good at 16K tokens."""

import dataclasses

from sparda_jax.pretrain.contents import TaskMix
from sparda_jax.pretrain.facts import Spelling
from sparda_jax.pretrain.recipe import DENSE, SPARDA, SPARSE, Phase, Recipe

# More in RULER's layouts than before, and what a single look-up does not answer.
MIX = TaskMix(
    kinds=(
        ("single", 0.14),
        ("multikey", 0.26),
        ("multivalue", 0.11),
        ("multiquery", 0.11),
        ("keyvalue", 0.08),
        ("tracking", 0.08),
        ("copy", 0.02),
        ("chains", 0.08),
        ("common", 0.03),
        ("frequent", 0.03),
        ("reading", 0.06),
    ),
    ruler=0.5,
)

# Fifth stage: short rows first, where the new layers learn the most questions a second, then rows of 16K. The Forecast
# is scored throughout, gently, so that it follows the model that it looks into.
LENGTHENING = Recipe(
    phases=(
        Phase(seq_len=4096, tokens=40, modes=(SPARSE, DENSE)),
        Phase(seq_len=8192, tokens=40, modes=(SPARSE,)),
        Phase(seq_len=16384, tokens=180, modes=(SPARSE, SPARSE, DENSE)),
    ),
    peak_learning_rate=6e-4,
    final_learning_rate=6e-5,
    warmup_steps=100,
    routing_weight=0.1,
    foresight_weight=0.05,
    text_fraction=0.3,
    long_fraction=0.7,
    answer_weight=4.0,
    spelling=Spelling(invented_words=0.35, few_digits=0.35),
    mix=MIX,
    seed=5,
)

# Sixth stage: half of the steps attend to what the Forecast selects, with the rates that stage four ended with.
LONG_FORESIGHT = dataclasses.replace(
    LENGTHENING,
    phases=(Phase(seq_len=16384, tokens=96, modes=(SPARDA, SPARSE)),),
    peak_learning_rate=2e-4,
    final_learning_rate=1e-5,
    warmup_steps=50,
    foresight_weight=0.1,
    seed=6,
)
