"""The benchmarks of `wellcond bench`, one module each: they print a table and write JSON with the environment."""
