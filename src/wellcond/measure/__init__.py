"""`wellcond measure`: which blocks of a model are ill-conditioned, and records of two public trained models."""
