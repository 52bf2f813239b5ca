"""Does selection find what matters? RULER, needles, LongBench and HELMET against a checkpoint or a server."""
