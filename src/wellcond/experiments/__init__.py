"""One file per experiment: what to run, how to judge it, how to draw it."""
