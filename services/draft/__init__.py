"""The draft worker: grows trees for many requests of many targets."""
