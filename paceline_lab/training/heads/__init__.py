"""`paceline train METHOD`: a head or a small draft for a target, from text."""
