"""`paceline train family`: the models that ship with the package, from the standard library's sources."""
