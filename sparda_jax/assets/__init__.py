"""Files that ship with the package: the bundled model and InfiniGen's calibration text."""

from pathlib import Path

BUNDLED_MODEL = Path(__file__).parent / "sparda-mini"
CALIBRATION_TEXT = Path(__file__).parent / "calibration.txt"
