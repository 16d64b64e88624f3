"""One file per row of work to be timed; each prints a table and writes JSON with its environment."""
