"""Other engines, each in a process and an environment of its own, so that they can be measured beside this one."""
