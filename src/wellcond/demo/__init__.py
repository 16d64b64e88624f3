"""`wellcond demo`: the training, graying and page behind it."""
