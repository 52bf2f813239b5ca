"""Which ablations there are, and what each compares."""

import dataclasses
import enum

from sparda_jax.foresight import ForecastDesign
from sparda_jax.selection import Mode
from sparda_jax.train.forecast import PUBLISHED_DESIGN
from sparda_jax.train.loss import Objective, Teacher


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """A Forecast that is trained: all but what is named here is the same for all.

    Attributes:
        design: of the Forecast. objective, teacher: of its loss.
    """

    design: ForecastDesign = PUBLISHED_DESIGN
    objective: Objective = Objective.PUBLISHED
    teacher: Teacher = Teacher.FINE


VARIANTS = {
    "published": Variant(),
    "heads-2": Variant(design=ForecastDesign(heads_per_group=2)),
    "heads-4": Variant(design=ForecastDesign(heads_per_group=4)),
    "coarse-teacher": Variant(teacher=Teacher.COARSE),
    "without-rest": Variant(objective=Objective.CHOSEN),
    "ahead-2": Variant(design=ForecastDesign(lookahead=2)),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One row of an ablation.

    Attributes:
        label: of the row.
        variant: a name of `VARIANTS`; None: the checkpoint's own Forecast, nothing is trained.
        mode: how blocks are selected when it answers.
        most: of free blocks for a row, where their number is chosen by confidence; None: the model's constant.
    """

    label: str
    variant: str | None = None
    mode: Mode = Mode.SPARDA
    most: int | None = None


class Ablation(enum.StrEnum):
    """What is compared."""

    HEADS = "heads"
    TEACHER = "teacher"
    REST = "rest"
    PREDICTOR = "predictor"
    TOPK = "topk"
    LOOKAHEAD = "lookahead"


TITLES = {
    Ablation.HEADS: "Forecast heads for each group",
    Ablation.TEACHER: "fine and coarse teacher",
    Ablation.REST: "the loss with and without its rest",
    Ablation.PREDICTOR: "who chooses the blocks: the Forecast, InfiniGen's predictor, the layer's own queries",
    Ablation.TOPK: "a constant number of blocks and one by confidence",
    Ablation.LOOKAHEAD: "one layer ahead and two",
}


def cases_of(ablation: Ablation, free_blocks: int) -> list[Case]:
    """The rows of an ablation.

    Args:
        free_blocks: that the model selects besides those that are forced; a row may have twice as many by confidence.
    """
    return {
        Ablation.HEADS: [
            Case(label="1 head", variant="published"),
            Case(label="2 heads", variant="heads-2"),
            Case(label="4 heads", variant="heads-4"),
        ],
        Ablation.TEACHER: [
            Case(label="fine (2, 1)", variant="published"),
            Case(label="coarse (32, 16)", variant="coarse-teacher"),
        ],
        Ablation.REST: [
            Case(label="with the rest", variant="published"),
            Case(label="without", variant="without-rest"),
        ],
        Ablation.PREDICTOR: [
            Case(label=mode.value, mode=mode)
            for mode in (Mode.SPARSE, Mode.SPARDA, Mode.SPARDA_DECODE_ONLY, Mode.INFINIGEN, Mode.RANDOM)
        ],
        Ablation.TOPK: [
            Case(label="constant", mode=Mode.SPARDA),
            Case(label="by confidence", mode=Mode.SPARDA, most=2 * free_blocks),
        ],
        Ablation.LOOKAHEAD: [
            Case(label="1 layer", variant="published"),
            Case(label="2 layers", variant="ahead-2"),
        ],
    }[ablation]
