"""`wellcond measure`: which blocks of a model are ill-conditioned, and what trained models of others show."""
