"""Wrote decode_step_*.json: ``python tests/data/step_excerpt.py PROFILE FIRST LAST`` prints some layers of a profile.

The layers from FIRST to LAST of the step that `bench step` would draw, and what runs within a layer's time before and
behind them; [name, start, end] with times in µs after the first of them.
"""

import json
import sys
from pathlib import Path

from sparda_jax.bench._step_parts import picture
from sparda_jax.bench._step_profile import read_profile

path, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
steps = read_profile(path).steps
drawn = picture(steps, first, last)
begin, end = drawn.span[0] - drawn.layer_us, drawn.span[1] + drawn.layer_us
(step,) = (step for step in steps if step[0].start <= drawn.span[0] < step[-1].end)
events = [event for event in step if begin < event.end and event.start < end]
print(json.dumps([[e.name, round(e.start - events[0].start, 1), round(e.end - events[0].start, 1)] for e in events]))
