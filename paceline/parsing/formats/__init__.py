"""How families of models write tool calls: a file each."""
