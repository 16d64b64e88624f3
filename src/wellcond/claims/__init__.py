"""One file a claim: arms, sets, the papers' numbers, how to judge and how to draw; beside them what they share."""
