"""The one error of training."""


class TrainingError(ValueError):
    """Training that cannot start or go on; the message says what is wrong, what is kept and the way out."""
