"""One model on several processes, its ranks: how they meet, what they say to each other, and how they end together.

Rank 0 has the engine, and leads; the others have nothing but their part of the model, and follow. A replica is all of
them or nothing: when one ends, all do.
"""
