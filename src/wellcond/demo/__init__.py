"""`wellcond demo`: what it trains, grays and shows."""
